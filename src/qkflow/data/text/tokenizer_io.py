"""The tokenizer that a model was trained with, from its folder: of a run, or one that was exported.

| file                    | in                            | format                          |
|-------------------------|-------------------------------|---------------------------------|
| `qkflow_tokenizer.json` | an exported folder            | ours                            |
| `tokenizer.json`        | a run                         | ours, which has a `kind`        |
| `tokenizer.json`        | what save_pretrained wrote    | that of the tokenizers library  |
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qkflow.data.text.tokenizers import (
    GPT2_END,
    ByteTokenizer,
    Tokenizer,
    WordTokenizer,
    load_tokenizer,
    pair_tokenizer,
)
from qkflow.errors import UsageError

EXPORTED_TOKENIZER_FILE = "qkflow_tokenizer.json"
TOKENIZER_FILE = "tokenizer.json"


def saved_tokenizer(folder: str | None) -> Tokenizer:
    """The tokenizer of a folder; a folder without one of ours is a `UsageError`."""
    if folder is None:
        raise UsageError("tokens saved needs --vocabulary-files: a run folder, or one that `qkflow export` wrote")
    place = Path(folder).expanduser()
    found = find_tokenizer(place)
    if found is None:
        raise UsageError(f"{place} has no tokenizer of ours: give a run folder, or one that `qkflow export` wrote")
    return found


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder, or None where there is none that qkflow can read; a damaged one is a `UsageError`."""
    path = next(
        (folder / name for name in (EXPORTED_TOKENIZER_FILE, TOKENIZER_FILE) if (folder / name).is_file()), None
    )
    if path is None:
        return None
    try:
        data = json.loads(path.read_bytes())
        return load_tokenizer(path) if "kind" in data else _from_library(data, path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} is damaged ({type(error).__name__}): restore it from a copy") from error


def _from_library(data: dict[str, Any], path: Path) -> Tokenizer | None:
    """What was ours before the tokenizers library wrote it: the model, and one token more for the end."""
    ends = [token for token in data["added_tokens"] if token["special"]]
    model, before = data["model"], data["pre_tokenizer"] or {}
    if len(data["added_tokens"]) != 1 or not ends or data["normalizer"] is not None:
        return None
    end = ends[0]["id"]
    if model["type"] == "WordLevel" and before.get("type") == "Split":
        words = sorted(model["vocab"], key=model["vocab"].__getitem__)
        return WordTokenizer(words) if end == len(words) else None
    if model["type"] != "BPE" or before.get("type") != "ByteLevel" or before.get("add_prefix_space"):
        return None
    if not model["merges"]:
        bare = ByteTokenizer()
        return bare if (len(model["vocab"]), end) == (bare.end, bare.end) else None
    kind = "gpt2" if GPT2_END in model["vocab"] else "bpe"
    return pair_tokenizer(kind, {**data, "added_tokens": [], "post_processor": None}, end, path)
