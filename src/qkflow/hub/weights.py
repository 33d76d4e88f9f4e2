"""The tensors of a folder: where they are and of which shape, from the headers alone, before any is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from qkflow.errors import CheckpointError
from qkflow.hub.safe_files import first_line, inside, parse_table, read_table
from qkflow.mechanisms import mechanism
from qkflow.models.stack import StackConfig
from qkflow.training.tensors import refuse_foreign

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PREFIX = "model."
"""Before our names of tensors: transformers keeps the bare model under this name."""
LARGEST_HEADER = 100 << 20
FLOATS = ("F64", "F32", "F16", "BF16")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a folder."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def survey(folder: Path) -> dict[str, Entry]:
    """Every tensor of a folder by name, from one file or from shards that agree with their index."""
    if inside(folder, WHOLE).exists():
        return _header(folder, WHOLE)
    if not inside(folder, INDEX).exists():
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
        if pickles:
            raise CheckpointError(
                f"{folder} has its weights in {pickles[0]}, a pickle, which can run code when it is opened: "
                "qkflow reads safetensors only; convert it first"
            )
        raise CheckpointError(f"{folder} has no weights: expected {WHOLE} or {INDEX}")
    listed = _index(folder)
    found: dict[str, Entry] = {}
    for file in sorted(set(listed.values())):
        own = _header(folder, file)
        expected = {name for name, place in listed.items() if place == file}
        if stray := sorted(own.keys() ^ expected):
            where = f"{file} only" if stray[0] in own else f"{INDEX} only"
            raise CheckpointError(f"{folder}: the shards do not agree with their index, {stray[0]!r} is in {where}")
        found |= own
    return found


def read_tensors(folder: Path, entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """The tensors of a survey."""
    tensors: dict[str, Tensor] = {}
    for file in sorted({entry.file for entry in entries.values()}):
        with safe_open(inside(folder, file), framework="pt") as validate_input:
            tensors |= {name: validate_input.get_tensor(name) for name, entry in entries.items() if entry.file == file}
    return tensors


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, shared ones once, under their first name; also of a model without storage."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            found[name] = tensor
        seen.add(id(tensor))
    return found


def fit(folder: Path, entries: Mapping[str, Entry], model: nn.Module, *, but: frozenset[str] = frozenset()) -> None:
    """Raise `CheckpointError` unless the tensors are those of the model (which needs no storage), less some names."""
    own = {PREFIX + name: tensor for name, tensor in own_tensors(model).items()}
    if stray := sorted((own.keys() ^ entries.keys()) - but):
        where = "the model only" if stray[0] in own else "the weights only"
        raise CheckpointError(f"{folder}: the weights do not belong to its config, {stray[0]!r} is in {where}")
    for name, tensor in own.items():
        if name in but:
            continue
        entry = entries[name]
        if entry.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{folder}: {name!r} has shape {list(entry.shape)}, by its config it has {list(tensor.shape)}"
            )
        if tensor.dtype.is_floating_point and entry.dtype not in FLOATS:
            raise CheckpointError(f"{folder}: {name!r} holds {entry.dtype}, expected one of {', '.join(FLOATS)}")


def _index(folder: Path) -> dict[str, str]:
    weight_map = read_table(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX} has no table 'weight_map' of tensors and their files")
    for file in weight_map.values():
        if not inside(folder, file).exists():
            raise CheckpointError(f"{folder} lacks the shard {file}, which its index names: copy it there")
        if not file.endswith(".safetensors"):
            raise CheckpointError(f"{folder / INDEX} names {file}: qkflow reads safetensors only")
    return weight_map


def _header(folder: Path, file: str) -> dict[str, Entry]:
    path = inside(folder, file)
    refuse_foreign(path)
    _check_header(path)
    try:
        with safe_open(path, framework="pt") as validate_input:
            pieces: dict[str, Any] = {name: validate_input.get_slice(name) for name in validate_input.keys()}  # noqa: SIM118
            return {
                name: Entry(file=file, dtype=str(piece.get_dtype()), shape=tuple(piece.get_shape()))
                for name, piece in pieces.items()
            }
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors ({first_line(error)}): it is torn or something else"
        ) from error


def _check_header(path: Path) -> None:
    """What the library does not look at: names that stand twice in the header."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, LARGEST_HEADER):
            raise CheckpointError(
                f"{path} announces a header of {length:,} bytes in a file of {size:,}: it is torn or something else"
            )
        parse_table(file.read(length), path)


def without_storage(
    build: Callable[[Any], nn.Module], config: StackConfig, entries: Mapping[str, Entry], folder: Path
) -> nn.Module:
    """The model of a config on no device at all, once its largest sizes are seen to be those of the weights."""
    embedding = entries.get(f"{PREFIX}embedding.weight")
    expected = (config.vocabulary, config.width)
    if embedding is None or embedding.shape != expected:
        got = "is missing" if embedding is None else f"has shape {list(embedding.shape)}"
        raise CheckpointError(f"{folder}: '{PREFIX}embedding.weight' {got}, by its config it has {list(expected)}")
    if config.layers > len(entries) or _turns(config) > len(entries):
        raise CheckpointError(f"{folder}: its config asks for more parts than the {len(entries)} tensors it has")
    try:
        with torch.device("meta"):
            return build(config)
    except (RuntimeError, OverflowError, TypeError, MemoryError) as error:
        raise CheckpointError(f"{folder}: its config makes no model ({first_line(error)})") from error


def _turns(config: StackConfig) -> int:
    """How often the couplings alternate, at most: each turn has networks of its own."""
    couplings = [getattr(mechanism(spec), "coupling", None) for spec in dict.fromkeys(config.mechanisms)]
    return max(getattr(coupling, "alternations", 1) for coupling in couplings)
