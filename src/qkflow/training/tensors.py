"""Tensors in safetensors files that carry a checksum of their content. Nothing else is ever read: no pickle, no zip."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from qkflow.errors import CheckpointError
from qkflow.training.parallel import is_sharded, local, shard_like


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors, their `digest` in the header; a disk that is full raises `OSError`."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path.touch()
    mode = path.stat().st_mode
    try:
        # One entry only: the header's bytes must not depend on the order of a hash map.
        save_file(whole, path, metadata={"sha256": digest(whole)})
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error
    path.chmod(mode)  # the library makes the file readable by its owner alone, whatever the umask says


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read what `save_tensors` wrote; anything else, or anything altered, raises `CheckpointError`."""
    refuse_foreign(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            recorded = (file.metadata() or {}).get("sha256")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors ({error}): it is torn or something else"
        ) from error
    if recorded != digest(tensors):
        raise CheckpointError(f"{path} was altered after it was written: its content does not match its checksum")
    return tensors


def digest(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 over names, types, shapes and bytes, in the order of the names.

    >>> digest({"a": torch.zeros(2)}) == digest({"a": torch.zeros(1, 2)})
    False
    """
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def refuse_foreign(path: Path) -> None:
    """Raise `CheckpointError` for a missing file, and for pickles and zips, which could run code when opened."""
    try:
        with open(path, "rb") as file:
            head = file.read(9)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    if head[8:] == b"{":  # a safetensors header, whose first eight bytes are a length and may look like anything
        return
    if head.startswith((b"PK\x03\x04", b"\x80")):
        kind = "pickle" if head.startswith(b"\x80") else "zip archive (as torch.save writes)"
        raise CheckpointError(
            f"{path} is a {kind}, which can run code when it is opened: qkflow reads safetensors only; convert it first"
        )


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters and buffers by name; tied ones once, under their first name."""
    found: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        own = local(tensor)
        place = (own.data_ptr(), tensor.shape, tensor.stride())
        if own.numel() == 0 or place not in seen:
            found[name] = tensor
        seen.add(place)
    return found


def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `model_tensors` gave, in place; names, shapes or types that do not fit raise `CheckpointError`."""
    own = model_tensors(model)
    if own.keys() != tensors.keys():
        stray = sorted(own.keys() ^ tensors.keys())[0]
        raise CheckpointError(f"the weights do not belong to this model: {stray!r} is in only one of them")
    for name, tensor in own.items():
        given = tensors[name]
        if (given.shape, given.dtype) != (tensor.shape, tensor.dtype):
            raise CheckpointError(
                f"the weights do not belong to this model: {name!r} is {given.dtype} {list(given.shape)}, "
                f"the model's is {tensor.dtype} {list(tensor.shape)}"
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(shard_like(tensors[name], tensor) if is_sharded(tensor) else tensors[name])
