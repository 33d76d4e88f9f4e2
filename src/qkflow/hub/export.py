"""Export a run to a model folder, without transformers: config, weights, tokenizer and model card."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from qkflow.data import Tokenizer, WordTokenizer
from qkflow.errors import UsageError
from qkflow.hub.config_json import CAUSAL_LM, MODEL_TYPE, model_keys
from qkflow.hub.load import GENERATION_CONFIG, INDEX, PREFIX, WEIGHTS
from qkflow.hub.tokenizer import write_tokenizer
from qkflow.io import write_folder, write_json
from qkflow.training import LoadedRun, load_run, read_metrics
from qkflow.training.run_dir import read_json
from qkflow.training.tensors import model_tensors, save_tensors

_METADATA = {"format": "pt"}
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def export_run(run: Path | str, folder: Path | str, *, shard_size: str = "5GB") -> Path:
    """Write a run to a folder that `from_pretrained` and `read_folder` load. Returns the folder.

    The folder is written completely or not at all. Weights larger than `shard_size` are split into several files.
    """
    folder, max_bytes = Path(folder), parse_size(shard_size)
    _refuse_existing(folder)
    loaded = load_run(run)
    write_folder(folder, lambda temporary: _write_files(temporary, loaded, max_bytes))
    return folder


def parse_size(text: str) -> int:
    """Convert a size such as 500MB to bytes.

    >>> parse_size("5GB"), parse_size("200 kb")
    (5000000000, 200000)
    """
    match = re.fullmatch(r"(\d+) ?([KMGT]?B)", text.strip().upper())
    if match is None or int(match[1]) == 0:
        raise UsageError(f"cannot read the shard size {text!r}: expected a number and a unit, such as 500MB or 5GB")
    return int(match[1]) * _UNITS[match[2]]


def _refuse_existing(folder: Path) -> None:
    """Raise `UsageError` unless the path is free or an empty directory, and can be created."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()) or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(f"{folder} exists already: choose another folder, or remove it")
    if (parent := next(path for path in folder.absolute().parents if path.exists())).is_file():
        raise UsageError(f"{folder} cannot be created: {parent} is a file; choose another folder")


def _write_files(folder: Path, run: LoadedRun, max_bytes: int) -> None:
    end = run.tokenizer.end
    special_tokens = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    weights = {PREFIX + name: tensor for name, tensor in model_tensors(run.model).items()}
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    general = {"architectures": [CAUSAL_LM], "dtype": dtype, "model_type": MODEL_TYPE, "use_cache": True}
    write_json(folder / "config.json", {**model_keys(run.model.config), **special_tokens, **general})
    write_json(folder / GENERATION_CONFIG, special_tokens)
    _write_weights(folder, weights, max_bytes)
    write_tokenizer(run.tokenizer, folder)
    evaluations = [record for record in read_metrics(run.folder / "metrics.jsonl") if record["kind"] == "eval"]
    environment = read_json(run.folder / "environment.json")
    (folder / "README.md").write_text(model_card(run, environment, evaluations[-1] if evaluations else None))


def _write_weights(folder: Path, weights: Mapping[str, Tensor], max_bytes: int) -> None:
    """Write the tensors to one file, or to shards of at most `max_bytes` with an index; no tensor is split."""
    shards: list[dict[str, Tensor]] = [{}]
    shard_bytes = 0
    for name, tensor in weights.items():
        if shards[-1] and shard_bytes + tensor.nbytes > max_bytes:
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = tensor
        shard_bytes += tensor.nbytes
    if len(shards) == 1:
        save_tensors(folder / WEIGHTS, shards[0], _METADATA)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_tensors(folder / file, shard, _METADATA)
        weight_map |= dict.fromkeys(shard, file)
    total_size = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- qkflow
---

# {title}

A causal language model of qkflow: attention whose queries and keys move.

| | |
|---|---|
{rows}

## Use

```python
{code}
```

The first line needs `pip install 'qkflow[hf]'`. This folder contains no code.

## Trained with

```
{command}
```
"""


def model_card(run: LoadedRun, environment: Mapping[str, Any], evaluation: Mapping[str, Any] | None) -> str:
    """The README.md of an exported run; `evaluation` is the last one on held-out documents."""
    config, model = run.config, run.model.config
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    mechanism = model.mechanism if isinstance(model.mechanism, str) else ", ".join(model.mechanism)
    data = environment.get("data", {})
    rows = {
        "mechanism": f"`{mechanism}`",
        "parameters": f"{parameters:,} ({model.layers} layers of width {model.width}, {model.heads} heads)",
        "vocabulary": f"{run.tokenizer.vocabulary:,} tokens (`{run.tokenizer.kind}`)",
        "corpus": f"`{data.get('name', run.data.source)}` (SHA-256 `{data.get('digest', 'unknown')}`)",
        "training": f"{run.step:,} of {config.steps:,} steps of {config.batch} x {config.context} tokens",
        "seeds": f"{config.seed} (model), {config.data_seed} (data)",
    }
    if evaluation is None:
        rows["held-out data"] = "not evaluated"
    else:
        names = {"bits_per_byte": "bits per byte", "perplexity": "perplexity per token", "accuracy": "accuracy"}
        for key, name in names.items():
            if isinstance(evaluation.get(key), int | float):
                rows[f"held-out {name}"] = f"{evaluation[key]:.4f} after {evaluation['step']:,} steps"
    return _CARD.format(
        title=f"A {mechanism} language model",
        rows="\n".join(f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in rows.items()),
        code="\n".join(loading_code("FOLDER", run.tokenizer)),
        command=shlex.join(environment.get("command") or ["qkflow", "train"]),
    )


def loading_code(folder: str, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Lines of Python that load the model of a folder and generate text."""
    prompt = tokenizer.words[0] if isinstance(tokenizer, WordTokenizer) else "The "
    return (
        "import qkflow.hf",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"model = AutoModelForCausalLM.from_pretrained({folder!r})",
        f"tokenizer = AutoTokenizer.from_pretrained({folder!r})",
        f"prompt = tokenizer({prompt!r}, return_tensors='pt')",
        "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=40)[0]))",
    )
