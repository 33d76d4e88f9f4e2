"""Files that are either whole or absent: atomic writes, checksums, locks."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qkflow.errors import BusyError, DiskError, UsageError


def cache_folder() -> Path:
    """Where prepared corpora and built kernels are kept: QKFLOW_CACHE, else qkflow in XDG_CACHE_HOME or ~/.cache."""
    own, shared = os.environ.get("QKFLOW_CACHE"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(own) if own else Path(shared or "~/.cache") / "qkflow"
    try:
        return folder.expanduser()
    except RuntimeError:
        raise UsageError(f"{folder} has no home to be in: set QKFLOW_CACHE to a folder that can be written") from None


def checksum(path: Path) -> str:
    """The SHA-256 of a file's bytes, read in pieces so that size does not matter."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Ask the system to put a file, or a folder's list of names, on the disk before we go on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes | str) -> None:
    """Write a whole file under a temporary name, sync it, and rename it into place: a reader never sees half of it."""
    data = content.encode() if isinstance(content, str) else content

    def fill(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            file.write(data)

    replace(path, fill)


def write_json(path: Path, value: Any) -> None:
    """`write_file` of a value as indented JSON with sorted keys; NaN is refused, since JSON has none."""
    write_file(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write files into a temporary folder, sync them, and rename the folder into place."""

    def fill_and_sync(temporary: Path) -> None:
        temporary.mkdir(parents=True)
        fill(temporary)
        for file in sorted(temporary.rglob("*")):
            sync(file)

    replace(path, fill_and_sync)


def replace(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a file (or make a folder) under a temporary name, sync it, and rename it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fill(temporary)
        sync(temporary)
        os.rename(temporary, path)
        sync(path.parent)
    except OSError as error:
        discard(temporary)
        raise DiskError(
            error.errno, f"could not write {path} ({error.strerror}); what was there before is kept"
        ) from error
    except BaseException:
        discard(temporary)
        raise


def discard(path: Path) -> None:
    """Remove a file or a folder if it is there; a failure to do so is no failure."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on `path` (a file made for it). The kernel lets go when the process ends, however it ends.

    Without `wait`, a lock that another process holds raises `BusyError` at once.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+")  # noqa: SIM115
    except OSError as error:
        raise DiskError(error.errno, f"could not write {path} ({error.strerror})") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            message = f"{path.parent} is in use by another process (id {holder}): wait for it, or choose another folder"
            raise BusyError(message) from None
        with contextlib.suppress(OSError):  # the id is for the message above; the lock holds without it
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), str(os.getpid()).encode())
        yield
