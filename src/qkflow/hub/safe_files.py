"""Read files of an untrusted folder: only regular files inside it, of limited size, with unique JSON keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qkflow.errors import CheckpointError

MAX_JSON_BYTES = 256 << 20
"""Larger JSON files are refused; vocabularies take a few megabytes."""


def path_inside(folder: Path, name: str) -> Path:
    """The path of a file in the folder. Raises `CheckpointError` if the name or a symbolic link leads out of it.

    Links to `blobs` are allowed in a snapshot of the Hub's cache, which consists of them.
    """
    if name in ("", ".", "..") or Path(name).name != name or "\\" in name or "\0" in name:
        raise CheckpointError(f"{folder} refers to the file {name!r}, which is outside the folder: do not trust it")
    path, root = folder / name, folder.resolve()
    allowed = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    if path.exists() and not any(path.resolve().is_relative_to(parent) for parent in allowed):
        raise CheckpointError(f"{path} is a link that leads out of its folder: do not trust it")
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a file: expected a folder written by `qkflow export` or save_pretrained")
    return path


def read_json_object(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from a file in the folder. Raises `CheckpointError` for anything else."""
    path = path_inside(folder, name)
    try:
        refuse_large_json(path)
        return parse_json_object(path.read_bytes(), path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error


def refuse_large_json(path: Path) -> None:
    """Raise `CheckpointError` if the file exists and is larger than `MAX_JSON_BYTES`."""
    if path.exists() and (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} has {size:,} bytes: expected at most {MAX_JSON_BYTES:,}")


def parse_json_object(content: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object whose keys are unique; `path` is for error messages."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path} contains the key {repeated!r} twice: its value is ambiguous")
        return dict(pairs)

    try:
        value = json.loads(content, object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({first_line(error)})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} contains a {type(value).__name__}: expected a JSON object")
    return value


def first_line(error: BaseException) -> str:
    """The first line of an error message, or the error's type if it has none."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
