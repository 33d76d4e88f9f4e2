"""Checkpoints of a sharded run: every process writes its pieces, and anyone can put them together.

    RUN/checkpoints/step-00000100/
      shard-00001-model-00001-of-00002.safetensors    the first process's pieces of the model
      shard-00001-model-00002-of-00002.safetensors    the first process's pieces of the optimiser's memory
      shard-00002-model-00001-of-00002.safetensors    the second process's
      ...
      manifest.json                                   as in every checkpoint

The files are those of torch.distributed.checkpoint's safetensors storage, and its reader reads them. Where each piece
lies in its tensor stands in the header of its file, as JSON: there is no pickle.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qkflow.errors import CheckpointError, DiskError
from qkflow.training.distributed import known_to_all
from qkflow.training.tensors import refuse_foreign

NAME = re.compile(r"shard-\d{5}-model-0000[12]-of-0000[12]\.safetensors")
"""How the files of pieces are called; before the first step the optimiser has no memory, and no file."""
PARTS = ("weights", "optimizer")
"""The two files of a process."""
_PLACES = "DCP_SHARDING_INFO"


def write_pieces(folder: Path, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
    """Let every process write its pieces into a folder that is there. All of them have to come here."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    parts = dict(zip(PARTS, (weights, optimizer), strict=True))
    tensors = {f"{part}.{name}": tensor for part, some in parts.items() for name, tensor in some.items()}
    file_of = {name: 1 + PARTS.index(name.split(".", 1)[0]) for name in tensors}
    writer = HuggingFaceStorageWriter(path=str(folder), fqn_to_index_mapping=file_of, save_distributed=True)
    try:
        save(tensors, storage_writer=writer)
    except CheckpointException as caught:  # the same on every process
        rank, (error, _) = next(iter(sorted(caught.failures.items())))
        number = error.errno if isinstance(error, OSError) else None
        text = f"process {rank} could not write its pieces into {folder} ({error})"
        raise known_to_all(DiskError(number or errno.EIO, text)) from caught


class _Piece(NamedTuple):
    """A part of a tensor: some of its rows, in order, or all of it."""

    first: int
    shape: tuple[int, ...]
    dtype: str
    file: Path


class Pieces(Mapping[str, Tensor]):
    """Tensors by name, each put together from its pieces when it is asked for, so that one at a time is whole."""

    def __init__(self, files: Sequence[Path], part: str) -> None:
        self._part = f"{part}."
        self._pieces: dict[str, list[_Piece]] = {}
        for file in files:
            refuse_foreign(file)
            for name, piece in _header(file):
                if name.startswith(self._part):
                    self._pieces.setdefault(name.removeprefix(self._part), []).append(piece)
        for name, pieces in self._pieces.items():
            pieces.sort()
            _check(name, pieces)

    def __getitem__(self, name: str) -> Tensor:
        found = []
        for piece in self._pieces[name]:
            with safe_open(piece.file, framework="pt") as file:
                found.append(file.get_tensor(self._part + name))
        return torch.cat(found) if len(found) > 1 else found[0].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


def _header(file: Path) -> Iterator[tuple[str, _Piece]]:
    """What lies in a file, by name; nothing of a tensor that the process had no part of."""
    try:
        with safe_open(file, framework="pt") as validate_input:
            places = json.loads((validate_input.metadata() or {}).get(_PLACES, "null"))
            for name in validate_input.keys():  # noqa: SIM118
                part = validate_input.get_slice(name)
                shape, offsets = tuple(part.get_shape()), places[name]["saved_offsets"]
                rows = offsets[0] if shape else 0
                if len(offsets) != len(shape) or any(offsets[1:]) or type(rows) is not int or rows < 0:
                    raise CheckpointError(f"{file}: {name!r} is not a piece of some rows of a tensor")
                if 0 not in shape:
                    yield name, _Piece(rows, shape, str(part.get_dtype()), file)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} cannot be read as pieces of tensors ({error}): it is torn or else") from error


def _check(name: str, pieces: Sequence[_Piece]) -> None:
    """Refuse pieces that leave a gap, lie upon each other, or do not belong together."""
    row = 0
    for piece in pieces:
        fits = piece.shape[1:] == pieces[0].shape[1:] and piece.dtype == pieces[0].dtype
        if piece.first != row or not fits or (not piece.shape and len(pieces) > 1):
            raise CheckpointError(f"{piece.file}: the pieces of {name!r} do not fit together")
        row += piece.shape[0] if piece.shape else 1
