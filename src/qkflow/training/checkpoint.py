"""Checkpoints: atomic, verified, and read without running code.

    RUN/checkpoints/step-00000100/
      weights.safetensors      the model
      optimizer.safetensors    the optimizer state
      manifest.json            step, tokens, SHA-256 of the other files and of itself

A checkpoint is written under a temporary name, synced and renamed: under its own name it is complete, or was damaged
later, which the checksums detect. There is no random state to store, since every step has its own seed.

If the model is sharded, every process writes its shards instead:

      shard-00001-model-00001-of-00002.safetensors    rank 0's shards of the model
      shard-00001-model-00002-of-00002.safetensors    rank 0's shards of the optimizer state
      shard-00002-model-00001-of-00002.safetensors    rank 1's
      ...

These are the files of torch.distributed.checkpoint's safetensors storage, and its reader reads them. The position of
each shard is in the header of its file, as JSON: there is no pickle.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qkflow.errors import CheckpointError, DiskError
from qkflow.io import checksum, discard, disk_errors, sync, write_folder
from qkflow.training.distributed import SingleProcess, mark_on_all_ranks
from qkflow.training.tensors import load_tensors, refuse_foreign, save_tensors

FORMAT = 1
SHARDED_FORMAT = 2
KEPT = 2
"""Checkpoints that are kept."""
_PARTS = ("weights", "optimizer")
_FILES = {f"{part}.safetensors" for part in _PARTS}
_SHARD_NAME = re.compile(r"shard-\d{5}-model-0000[12]-of-0000[12]\.safetensors")
"""Before the first step there is no optimizer state, and no second file."""
_SHARD_METADATA = "DCP_SHARDING_INFO"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that has passed every check."""

    path: Path
    step: int
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    extra: dict[str, Any]
    """Other values of the manifest."""


class NewerFormatError(CheckpointError):
    """An intact checkpoint in a format that this version does not know."""


def save(
    folder: Path,
    step: int,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    extra: Mapping[str, Any],
    group: SingleProcess | None = None,
) -> Path:
    """Write the checkpoint of `step` into the run folder, remove all but the last two, and return its path.

    All processes of a group must call this; if the model is sharded, each writes its shards.
    """
    group = group or SingleProcess()
    path = folder / "checkpoints" / f"step-{step:08d}"
    if group.is_sharded:
        _save_sharded(path, step, weights, optimizer, extra, group)
    else:

        def fill(temporary: Path) -> None:
            for part, tensors in zip(_PARTS, (weights, optimizer), strict=True):
                save_tensors(temporary / f"{part}.safetensors", tensors)
            sums = {name: checksum(temporary / name) for name in sorted(_FILES)}
            (temporary / "manifest.json").write_bytes(_manifest(FORMAT, step, sums, extra))

        group.on_main(lambda: write_folder(path, fill))
    if group.is_main:
        prune(folder)
    return path


def _save_sharded(
    path: Path,
    step: int,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    extra: Mapping[str, Any],
    group: SingleProcess,
) -> None:
    temporary = path.with_name(group.broadcast(f".{path.name}.{os.getpid()}.tmp"))
    try:
        group.on_main(lambda: _write(path, lambda: temporary.mkdir(parents=True)))
        _write_shards(temporary, weights, optimizer)
        sums: dict[str, str] = {}
        with group.raise_on_all_ranks():  # each rank its own files: rank 0 may not see those of other machines yet
            for file in temporary.glob(f"shard-{group.rank + 1:05d}-*"):
                _write(path, lambda file=file: sync(file))  # torch's writer does not sync
                sums[file.name] = checksum(file)
        all_sums = {name: sha256 for rank_sums in group.gather(sums) for name, sha256 in rank_sums.items()}
        manifest = _manifest(SHARDED_FORMAT, step, all_sums, extra)
        group.on_main(lambda: _write(path, lambda: _into_place(temporary, path, manifest)))
    except BaseException:
        if group.is_main:
            discard(temporary)
        raise


def _write_shards(folder: Path, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
    """Write the shards of every process into an existing folder. All of them must call this."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

    parts = dict(zip(_PARTS, (weights, optimizer), strict=True))
    tensors = {f"{part}.{name}": tensor for part, named in parts.items() for name, tensor in named.items()}
    file_index = {name: 1 + _PARTS.index(name.split(".", 1)[0]) for name in tensors}
    writer = HuggingFaceStorageWriter(path=str(folder), fqn_to_index_mapping=file_index, save_distributed=True)
    try:
        save_state_dict(tensors, storage_writer=writer)
    except CheckpointException as caught:  # the same on every rank
        rank, (error, _) = next(iter(sorted(caught.failures.items())))
        number = error.errno if isinstance(error, OSError) else None
        text = f"process {rank} could not write its shards into {folder} ({error})"
        raise mark_on_all_ranks(DiskError(number or errno.EIO, text)) from caught


def _into_place(temporary: Path, path: Path, manifest: bytes) -> None:
    (temporary / "manifest.json").write_bytes(manifest)
    sync(temporary / "manifest.json")
    sync(temporary)
    os.rename(temporary, path)
    sync(path.parent)


def _write(path: Path, action: Callable[[], None]) -> None:
    try:
        action()
    except OSError as error:
        text = f"could not write {path} ({error.strerror}); earlier checkpoints are kept"
        raise DiskError(error.errno, text) from error


def prune(folder: Path) -> None:
    """Remove all checkpoints but the last two."""
    for path in find(folder)[:-KEPT]:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            os.rename(path, temporary)  # an interrupted removal must not leave part of a checkpoint under its name
            discard(temporary)


def find(folder: Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first, valid or not.

    >>> find(Path("no such run"))
    []
    """
    return sorted((folder / "checkpoints").glob("step-" + "[0-9]" * 8))


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; a truncated, altered, missing, extra or foreign file raises `CheckpointError`."""
    if not path.is_dir():
        if path.exists():
            refuse_foreign(path)
        raise CheckpointError(
            f"{path} is not a checkpoint: expected a folder with manifest.json and .safetensors files"
        )
    try:
        manifest = _read_manifest(path)
        _verify(path, manifest)
        if manifest["format"] == SHARDED_FORMAT:
            files = [path / name for name in sorted(manifest["files"])]
            weights, optimizer = (ShardedTensors(files, part) for part in _PARTS)
        else:
            weights, optimizer = (load_tensors(path / f"{part}.safetensors") for part in _PARTS)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path} cannot be read ({error.strerror})") from error
    return Checkpoint(path=path, step=manifest["step"], weights=weights, optimizer=optimizer, extra=manifest["extra"])


def load_latest(folder: Path) -> tuple[Checkpoint | None, dict[Path, str]]:
    """The newest valid checkpoint (None if there is none), and the reason for each newer one that was refused.

    A checkpoint of a newer qkflow is intact but cannot be read here: it raises, so that its progress is not lost.
    """
    refused: dict[Path, str] = {}
    for path in reversed(find(folder)):
        try:
            return load(path), refused
        except NewerFormatError:
            raise
        except CheckpointError as error:
            refused[path] = str(error)
    if refused:
        raise CheckpointError(
            f"no checkpoint of {folder} can be used ({'; '.join(refused.values())}): restore one from a copy, "
            f"or delete {folder / 'checkpoints'} to restart the run from step 0"
        )
    return None, refused


def set_aside(path: Path) -> Path:
    """Rename a refused checkpoint, so that it neither blocks a new one nor counts as one of the last two."""
    aside = path.with_name(f"refused-{path.name}")
    discard(aside)
    with disk_errors(f"rename {path}"):
        os.rename(path, aside)
    return aside


def _manifest(number: int, step: int, files: Mapping[str, str], extra: Mapping[str, Any]) -> bytes:
    return _render({"format": number, "step": step, "files": dict(files), "extra": dict(extra)})


def _render(manifest: dict[str, Any]) -> bytes:
    """The content of manifest.json: a reader renders the manifest again and compares every byte."""
    text = json.dumps(manifest, sort_keys=True, allow_nan=False)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return (json.dumps({"manifest": manifest, "sha256": sha256}, indent=2, sort_keys=True) + "\n").encode()


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, if its bytes are exactly those that were written."""
    file = path / "manifest.json"
    content = file.read_bytes()
    try:
        manifest = json.loads(content)["manifest"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} is truncated or altered: it is not a manifest") from error
    if not isinstance(manifest, dict) or content != _render(manifest):
        raise CheckpointError(f"{file} is truncated or altered: its checksum does not match")
    if (number := manifest.get("format")) not in (FORMAT, SHARDED_FORMAT):
        raise NewerFormatError(
            f"{path} has format {number}, but this qkflow reads formats {FORMAT} and {SHARDED_FORMAT}: "
            "use the version that wrote it"
        )
    files = manifest.get("files")
    has_names = isinstance(files, dict) and (
        all(_SHARD_NAME.fullmatch(name) for name in files) if number == SHARDED_FORMAT else set(files) == _FILES
    )
    if not has_names or type(manifest.get("step")) is not int or not isinstance(manifest.get("extra"), dict):
        raise CheckpointError(f"{file} is not a manifest of qkflow")
    return manifest


def _verify(path: Path, manifest: dict[str, Any]) -> None:
    """Compare a folder with its manifest: its name, its files and their checksums."""
    if path.name != f"step-{manifest['step']:08d}":
        raise CheckpointError(f"{path} contains step {manifest['step']}: it was renamed")
    names = {file.name for file in path.iterdir() if not file.name.startswith(".")}
    for name in sorted(names ^ {"manifest.json", *manifest["files"]}):
        raise CheckpointError(f"{path / name} is {'not part of the checkpoint' if name in names else 'missing'}")
    for name, recorded in manifest["files"].items():
        if checksum(path / name) != recorded:
            raise CheckpointError(f"{path / name} is truncated or altered: its checksum does not match")


class _Shard(NamedTuple):
    """Consecutive rows of a tensor, or all of it."""

    first_row: int
    shape: tuple[int, ...]
    dtype: str
    file: Path


class ShardedTensors(Mapping[str, Tensor]):
    """Tensors by name, each assembled from its shards on access, so that one at a time is in memory."""

    def __init__(self, files: Sequence[Path], part: str) -> None:
        self._prefix = f"{part}."
        self._shards: dict[str, list[_Shard]] = {}
        for file in files:
            refuse_foreign(file)
            for name, shard in _read_header(file):
                if name.startswith(self._prefix):
                    self._shards.setdefault(name.removeprefix(self._prefix), []).append(shard)
        for name, shards in self._shards.items():
            shards.sort()
            _check_shards(name, shards)

    def __getitem__(self, name: str) -> Tensor:
        tensors = []
        for shard in self._shards[name]:
            with safe_open(shard.file, framework="pt") as file:
                tensors.append(file.get_tensor(self._prefix + name))
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


def _read_header(file: Path) -> Iterator[tuple[str, _Shard]]:
    """The shards of a file by name; empty ones are left out."""
    try:
        with safe_open(file, framework="pt") as opened:
            positions = json.loads((opened.metadata() or {}).get(_SHARD_METADATA, "null"))
            for name in opened.keys():  # noqa: SIM118
                view = opened.get_slice(name)
                shape, offsets = tuple(view.get_shape()), positions[name]["saved_offsets"]
                first_row = offsets[0] if shape else 0
                if len(offsets) != len(shape) or any(offsets[1:]) or type(first_row) is not int or first_row < 0:
                    raise CheckpointError(f"{file}: {name!r} is not a shard of consecutive rows")
                if 0 not in shape:
                    yield name, _Shard(first_row, shape, str(view.get_dtype()), file)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} cannot be read as shards ({error}): truncated, or not a shard file") from error


def _check_shards(name: str, shards: Sequence[_Shard]) -> None:
    """Raise if shards overlap, leave a gap, or belong to different tensors."""
    row = 0
    for shard in shards:
        fits = shard.shape[1:] == shards[0].shape[1:] and shard.dtype == shards[0].dtype
        if shard.first_row != row or not fits or (not shard.shape and len(shards) > 1):
            raise CheckpointError(f"{shard.file}: the shards of {name!r} do not fit together")
        row += shard.shape[0] if shard.shape else 1
