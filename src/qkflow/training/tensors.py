"""Safetensors files with a checksum of their content. Pickles and zip archives are refused."""

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
from qkflow.training.parallel import is_sharded, shard_like


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors as safetensors; a full disk raises `OSError`. By default the header holds their `digest`."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path.touch()
    mode = path.stat().st_mode
    try:
        # One entry only: the header's bytes must not depend on the order of a hash map.
        save_file(contiguous, path, metadata or {"sha256": digest(contiguous)})
    except SafetensorError as error:
        match = re.search(r"os error (\d+)", str(error))
        number = int(match[1]) if match else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error
    path.chmod(mode)  # safetensors makes the file readable by its owner only, ignoring the umask


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read the result of `save_tensors`; other or altered files raise `CheckpointError`."""
    refuse_foreign(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            recorded = (file.metadata() or {}).get("sha256")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors ({error}): truncated, or not a safetensors file"
        ) from error
    if recorded != digest(tensors):
        raise CheckpointError(f"{path} was altered: its content does not match its checksum")
    return tensors


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the names, types, shapes and bytes of tensors, sorted by name.

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
    """Raise `CheckpointError` for a missing file, and for pickles and zip archives, which can run code when opened."""
    try:
        with open(path, "rb") as file:
            head = file.read(9)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    if head[8:] == b"{":  # a safetensors header; its first eight bytes are a length and can have any value
        return
    if head.startswith((b"PK\x03\x04", b"\x80")):
        kind = "pickle" if head.startswith(b"\x80") else "zip archive (as torch.save writes)"
        raise CheckpointError(
            f"{path} is a {kind}, which can run code when it is opened: qkflow reads safetensors only, convert it first"
        )


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model by name; tied ones once, under their first name."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), (name, tensor.detach()))
    return dict(tensors.values())


def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load the result of `model_tensors` in place; mismatching names, shapes or types raise `CheckpointError`."""
    own = model_tensors(model)
    if own.keys() != tensors.keys():
        stray = sorted(own.keys() ^ tensors.keys())[0]
        raise CheckpointError(f"the weights do not match the model: {stray!r} is in only one of them")
    for name, tensor in own.items():
        loaded = tensors[name]
        if (loaded.shape, loaded.dtype) != (tensor.shape, tensor.dtype):
            raise CheckpointError(
                f"the weights do not match the model: {name!r} is {loaded.dtype} {list(loaded.shape)}, "
                f"expected {tensor.dtype} {list(tensor.shape)}"
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(shard_like(tensors[name], tensor) if is_sharded(tensor) else tensors[name])
