"""Files of a folder that someone else made: found inside it, of a size one can read, and with every key once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qkflow.errors import CheckpointError

LARGEST_JSON = 256 << 20
"""Bytes of the largest JSON file that is read: vocabularies have a few million."""


def inside(folder: Path, name: str) -> Path:
    """A file of the folder by its name; one that lies or leads elsewhere is a `CheckpointError`.

    In the cache of the Hub files are links to blobs two folders above, which is where they belong.
    """
    if name in ("", ".", "..") or Path(name).name != name or "\\" in name or "\0" in name:
        raise CheckpointError(f"{folder} names the file {name!r}, which lies outside of it: do not trust this folder")
    path, root = folder / name, folder.resolve()
    homes = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    if path.exists() and not any(path.resolve().is_relative_to(home) for home in homes):
        raise CheckpointError(f"{path} is a link that leads out of its folder: do not trust this folder")
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a file: expected one that `qkflow export` or save_pretrained wrote")
    return path


def read_table(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of the folder as a table; a key that stands twice in it is a `CheckpointError`."""
    path = inside(folder, name)
    try:
        refuse_large(path)
        return parse_table(path.read_bytes(), path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error


def refuse_large(path: Path) -> None:
    """Raise `CheckpointError` for a file, if there is one, that is too large to be JSON of ours."""
    if path.exists() and (size := path.stat().st_size) > LARGEST_JSON:
        raise CheckpointError(f"{path} has {size:,} bytes, more than any {path.name} needs")


def parse_table(content: bytes, path: Path) -> dict[str, Any]:
    """Bytes of JSON as a table."""
    try:
        value = json.loads(content, object_pairs_hook=lambda pairs: _once(pairs, path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} cannot be read as JSON ({first_line(error)})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, expected a table of names and values")
    return value


def _once(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"{path} has the key {twice!r} twice: readers would not agree on its value")
    return table


def first_line(error: BaseException) -> str:
    """What an error says, on one line."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
