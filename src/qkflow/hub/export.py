"""A run as a folder of the Hub, written without transformers: config, weights, tokenizer and a model card."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.hub.card import model_card
from qkflow.hub.config_json import CAUSAL, MODEL_TYPE, describe
from qkflow.hub.safe_files import first_line
from qkflow.hub.tokens import write_tokenizer
from qkflow.hub.weights import INDEX, PREFIX, WHOLE, own_tensors
from qkflow.io import write_folder, write_json
from qkflow.training import LoadedRun, load_run, read_metrics
from qkflow.training.run_dir import read_json

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def export_run(run: Path | str, folder: Path | str, *, shard: str = "5GB") -> Path:
    """Write a run as a folder that `from_pretrained` and `read_folder` load, whole or not at all; the folder.

    Weights larger than `shard` are spread over several files.
    """
    folder, largest = Path(folder), shard_bytes(shard)
    refuse_taken(folder)
    loaded = load_run(run)
    write_folder(folder, lambda temporary: _fill(temporary, loaded, largest))
    return folder


def refuse_taken(folder: Path) -> None:
    """Raise `UsageError` unless there is nothing at a path, or an empty folder, and there can be one."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()) or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(f"{folder} exists already: choose another folder, or remove it")
    if (above := next(path for path in folder.absolute().parents if path.exists())).is_file():
        raise UsageError(f"{folder} cannot be a folder: {above} is a file; choose another")


def shard_bytes(text: str) -> int:
    """The size of a shard in bytes.

    >>> shard_bytes("5GB"), shard_bytes("200 kb")
    (5000000000, 200000)
    """
    found = re.fullmatch(r"(\d+) ?([KMGT]?B)", text.strip().upper())
    if found is None or int(found[1]) == 0:
        raise UsageError(f"a shard's size is a number and a unit, such as 500MB or 5GB: got {text!r}")
    return int(found[1]) * _UNITS[found[2]]


def _fill(folder: Path, run: LoadedRun, largest: int) -> None:
    end = run.tokenizer.end
    tokens = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    weights = {PREFIX + name: tensor.detach().contiguous() for name, tensor in own_tensors(run.model).items()}
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    what = {"architectures": [CAUSAL], "dtype": dtype, "model_type": MODEL_TYPE, "use_cache": True}
    write_json(folder / "config.json", {**describe(run.model.config), **tokens, **what})
    write_json(folder / "generation_config.json", tokens)
    write_weights(folder, weights, largest)
    write_tokenizer(run.tokenizer, folder)
    metrics = [record for record in read_metrics(run.folder / "metrics.jsonl") if record["kind"] == "eval"]
    environment = read_json(run.folder / "environment.json")
    (folder / "README.md").write_text(model_card(run, environment, metrics[-1] if metrics else None))


def write_weights(folder: Path, weights: Mapping[str, Tensor], largest: int) -> None:
    """Write tensors into one file, or into shards of at most so many bytes with an index; a tensor is never cut."""
    shards: list[dict[str, Tensor]] = [{}]
    held = 0
    for name, tensor in weights.items():
        if shards[-1] and held + tensor.nbytes > largest:
            shards.append({})
            held = 0
        shards[-1][name] = tensor
        held += tensor.nbytes
    many = len(shards)
    names = [WHOLE] if many == 1 else [f"model-{n + 1:05}-of-{many:05}.safetensors" for n in range(many)]
    for name, shard in zip(names, shards, strict=True):
        _save(folder / name, shard)
    if many > 1:
        places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(tensor.nbytes for tensor in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(errno.EIO, first_line(error), str(path)) from error
    path.chmod(mode)  # the library makes the file readable by its owner alone, whatever the umask says
