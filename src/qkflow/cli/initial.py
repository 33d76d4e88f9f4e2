"""Weights that a run begins with: an exported folder's, or those of another run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from qkflow.data import Tokenizer
from qkflow.data.tokenizers import ByteTokenizer, WordTokenizer
from qkflow.errors import UsageError
from qkflow.models import DecoderConfig
from qkflow.training import load_run
from qkflow.training.run import read_json
from qkflow.training.tensors import model_tensors


@dataclass(frozen=True, kw_only=True)
class Initial:
    """What a run begins with."""

    model: DecoderConfig
    """The shape of the model."""
    weights: dict[str, Tensor]
    """Its tensors by name."""
    tokens: dict[str, str]
    """Settings of a corpus that make it the tokens the model knows; none where the usual ones do."""


def read_initial(folder: Path) -> Initial:
    """The model and the tokens of an exported folder, or of a run's final weights or latest checkpoint."""
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json: --init wants a folder of `qkflow export`, or a run")
    if "model_type" in read_json(folder / "config.json"):
        from qkflow.hub import read_folder

        found = read_folder(folder)
        return Initial(model=found.config, weights=found.weights, tokens=_tokens(found.tokenizer, folder))
    run = load_run(folder)
    return Initial(model=run.config.model, weights=model_tensors(run.model), tokens=_tokens(run.tokenizer, folder))


def _tokens(tokenizer: Tokenizer | None, folder: Path) -> dict[str, str]:
    if tokenizer is None or tokenizer.kind == WordTokenizer.kind:  # a task has its words
        return {}
    if tokenizer.kind == ByteTokenizer.kind:
        return {"tokens": "bytes"}
    return {"tokens": "saved", "vocabulary_files": str(folder)}
