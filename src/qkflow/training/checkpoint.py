"""Checkpoints: folders that are whole, verified and readable without running anything.

    RUN/checkpoints/step-00000100/
      weights.safetensors      the model
      optimizer.safetensors    the optimiser's memory
      manifest.json            step, tokens, SHA-256 of the other files, and its own

A checkpoint is filled under a temporary name, synced, and renamed: under its own name it is whole, or was damaged
later, and then the checksums tell. There is no state of a random generator to keep: every step seeds its own.

Where each process of a run has only pieces of the model, a checkpoint holds those instead (`sharded`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from qkflow.errors import CheckpointError, DiskError
from qkflow.io import checksum, discard, sync, write_folder
from qkflow.training.distributed import World
from qkflow.training.sharded import NAME, PARTS, Pieces, write_pieces
from qkflow.training.tensors import load_tensors, refuse_foreign, save_tensors

FORMAT = 1
SHARDED = 2
"""The format of a checkpoint that holds pieces."""
KEPT = 2
_FILES = {f"{part}.safetensors" for part in PARTS}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that has passed every check."""

    path: Path
    """Its folder."""
    step: int
    """Optimiser steps made."""
    weights: Mapping[str, Tensor]
    """The model's tensors by name."""
    optimizer: Mapping[str, Tensor]
    """The optimiser's tensors by name."""
    extra: dict[str, Any]
    """What else was written into the manifest."""


def save(
    folder: Path, step: int, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], extra: Mapping[str, Any]
) -> Path:
    """Write the checkpoint of `step` into the run folder, then remove all but the last two; its path."""
    path = folder / "checkpoints" / f"step-{step:08d}"

    def fill(temporary: Path) -> None:
        for part, tensors in zip(PARTS, (weights, optimizer), strict=True):
            save_tensors(temporary / f"{part}.safetensors", tensors)
        sums = {name: checksum(temporary / name) for name in sorted(_FILES)}
        (temporary / "manifest.json").write_bytes(_manifest_of(FORMAT, step, sums, extra))

    write_folder(path, fill)
    prune(folder)
    return path


def save_sharded(
    folder: Path,
    step: int,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    extra: Mapping[str, Any],
    world: World,
) -> Path:
    """`save` by all processes of a run, each of which has pieces. All of them have to come here."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    temporary = path.with_name(world.first(f".{path.name}.{os.getpid()}.tmp"))
    try:
        with world.agreed():
            if world.leads:
                _guarded(path, lambda: temporary.mkdir(parents=True))
        write_pieces(temporary, weights, optimizer)
        sums: dict[str, str] = {}
        with world.agreed():  # each its own: over a network, the first process may not see the others' files at once
            for file in temporary.glob(f"shard-{world.rank + 1:05d}-*"):
                _guarded(path, lambda file=file: sync(file))  # torch's writer does not wait for the end of it
                sums[file.name] = checksum(file)
        sums = {name: sha256 for some in world.gather(sums) for name, sha256 in some.items()}
        with world.agreed():
            if world.leads:
                _guarded(path, lambda: _into_place(temporary, path, _manifest_of(SHARDED, step, sums, extra)))
    except BaseException:
        if world.leads:
            discard(temporary)
        raise
    if world.leads:
        prune(folder)
    return path


def _into_place(temporary: Path, path: Path, manifest: bytes) -> None:
    (temporary / "manifest.json").write_bytes(manifest)
    sync(temporary / "manifest.json")
    sync(temporary)
    os.rename(temporary, path)
    sync(path.parent)


def _manifest_of(number: int, step: int, files: Mapping[str, str], extra: Mapping[str, Any]) -> bytes:
    return _render({"format": number, "step": step, "files": dict(files), "extra": dict(extra)})


def _guarded(path: Path, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        text = f"could not write {path} ({error.strerror}); what was there before is kept"
        raise DiskError(error.errno, text) from error


def prune(folder: Path) -> None:
    """Remove all checkpoints but the last two."""
    for old in find(folder)[:-KEPT]:
        _remove(old)


def find(folder: Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first, whole or not.

    >>> find(Path("no such run"))
    []
    """
    return sorted((folder / "checkpoints").glob("step-" + "[0-9]" * 8))


def load(path: Path) -> Checkpoint:
    """Read one checkpoint; whatever is torn, altered, missing, added or foreign raises `CheckpointError`."""
    if not path.is_dir():
        if path.exists():
            refuse_foreign(path)
        raise CheckpointError(
            f"{path} is not a checkpoint: expected a folder with manifest.json and .safetensors files"
        )
    try:
        body = _manifest(path)
        _verify(path, body)
        weights, optimizer = (_read(path, body, part) for part in PARTS)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path} cannot be read ({error.strerror})") from error
    return Checkpoint(path=path, step=body["step"], weights=weights, optimizer=optimizer, extra=body["extra"])


def load_latest(folder: Path) -> tuple[Checkpoint | None, dict[Path, str]]:
    """The newest checkpoint that passes (None if none was ever written), and for each newer one why it was refused.

    One written by a newer qkflow is intact and only unreadable here: it stops the search instead of losing its work.
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
            f"or delete {folder / 'checkpoints'} to begin the run again from step 0"
        )
    return None, refused


def set_aside(path: Path) -> Path:
    """Rename a refused checkpoint, so that it is not in the way of a new one and is not one of the last two kept."""
    aside = path.with_name(f"refused-{path.name}")
    discard(aside)
    try:
        os.rename(path, aside)
    except OSError as error:
        raise DiskError(error.errno, f"could not rename {path} ({error.strerror})") from error
    return aside


class NewerFormatError(CheckpointError):
    """An intact checkpoint in a format this version does not know."""


def _manifest(path: Path) -> dict[str, Any]:
    """The body of manifest.json, if its bytes are exactly those that were written."""
    file = path / "manifest.json"
    content = file.read_bytes()
    try:
        body = json.loads(content)["manifest"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} is torn or altered: it is not a manifest") from error
    if not isinstance(body, dict) or content != _render(body):
        raise CheckpointError(f"{file} is torn or altered: its checksum is not the one on record")
    if (number := body.get("format")) not in (FORMAT, SHARDED):
        raise NewerFormatError(
            f"{path} has format {number}, this qkflow reads format {FORMAT} and {SHARDED}: use the qkflow that wrote it"
        )
    files = body.get("files")
    pieces = isinstance(files, dict) and all(NAME.fullmatch(name) for name in files)
    named = pieces if number == SHARDED else isinstance(files, dict) and set(files) == _FILES
    if not named or type(body.get("step")) is not int or not isinstance(body.get("extra"), dict):
        raise CheckpointError(f"{file} is not a manifest of qkflow")
    return body


def _read(path: Path, body: dict[str, Any], part: str) -> Mapping[str, Tensor]:
    if body["format"] == SHARDED:
        return Pieces([path / name for name in sorted(body["files"])], part)
    return load_tensors(path / f"{part}.safetensors")


def _verify(path: Path, body: dict[str, Any]) -> None:
    """Hold a folder to its manifest: its name, the files in it and the bytes of each."""
    if path.name != f"step-{body['step']:08d}":
        raise CheckpointError(f"{path} holds step {body['step']}: it was renamed")
    names = {file.name for file in path.iterdir() if not file.name.startswith(".")}
    for name in sorted(names ^ {"manifest.json", *body["files"]}):
        raise CheckpointError(f"{path / name} is {'not part of the checkpoint' if name in names else 'missing'}")
    for name, recorded in body["files"].items():
        if checksum(path / name) != recorded:
            raise CheckpointError(f"{path / name} is torn or altered: its checksum is not the one on record")


def _render(body: dict[str, Any]) -> bytes:
    """The whole file: a reader renders the body again and compares every byte."""
    text = json.dumps(body, sort_keys=True, allow_nan=False)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return (json.dumps({"manifest": body, "sha256": sha256}, indent=2, sort_keys=True) + "\n").encode()


def _remove(path: Path) -> None:
    """Take the name away first: a removal that is killed half way must not leave half a checkpoint under it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        os.rename(path, temporary)
    except OSError:
        return
    discard(temporary)
