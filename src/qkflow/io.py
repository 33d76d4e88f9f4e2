"""Atomic writes, checksums and file locks.

A file or folder is written under a temporary name, synced to disk and renamed, so a reader sees either the old content
or the complete new content, even after a crash.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from qkflow.errors import BusyError, DiskError, UsageError

BAD_NPY = (ValueError, EOFError, SyntaxError, tokenize.TokenError)
"""What `numpy.load` raises for a file that is not a .npy file, or whose header is damaged."""


def cache_folder() -> Path:
    """Return the cache of prepared corpora and compiled kernels.

    It is QKFLOW_CACHE if set, else `qkflow` in XDG_CACHE_HOME or ~/.cache.
    """
    own, shared = os.environ.get("QKFLOW_CACHE"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(own) if own else Path(shared or "~/.cache") / "qkflow"
    try:
        return folder.expanduser()
    except RuntimeError:
        raise UsageError(
            f"cannot determine the home directory for the cache {folder}: set QKFLOW_CACHE to a writable folder"
        ) from None


def refuse_special_files(path: Path) -> None:
    """Raise `UsageError` if a file, or a file in a folder, is a pipe, a device or a socket: reading it may not end."""
    folders = os.walk(path) if path.is_dir() else []
    for file in (path, *(Path(folder, name) for folder, _, names in folders for name in names)):
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise UsageError(f"{file} is not a regular file: remove it, or give another path")


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes | str) -> None:
    """Write a file atomically; text is encoded as UTF-8."""
    data = content.encode() if isinstance(content, str) else content
    replace(path, lambda temporary: temporary.write_bytes(data))


def render_json(value: Any) -> str:
    """Indented JSON with sorted keys. NaN and infinity raise a `ValueError`."""
    return json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write a value atomically; see `render_json`."""
    write_file(path, render_json(value))


def write_folder(path: Path, fill: Callable[[Path], object]) -> None:
    """Create a folder atomically; `fill` writes its files."""

    def fill_and_sync(temporary: Path) -> None:
        temporary.mkdir(parents=True)
        fill(temporary)
        for file in sorted(temporary.rglob("*")):
            sync(file)

    replace(path, fill_and_sync)


def replace(path: Path, fill: Callable[[Path], object]) -> None:
    """Create or replace a file or folder atomically; `fill` writes it at the temporary path that it receives."""
    if not path.name:  # the current folder or the root
        raise DiskError(errno.EISDIR, f"could not write {path}, which is a directory: give another path")
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
            error.errno, f"could not write {path} ({error.strerror}); its previous content is unchanged"
        ) from error
    except BaseException:
        discard(temporary)
        raise


def discard(path: Path) -> None:
    """Delete a file or folder if it exists; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def disk_errors(action: str) -> Iterator[None]:
    """Convert an `OSError` in the block to a `DiskError` that says what could not be done, such as "write FILE"."""
    try:
        yield
    except OSError as error:
        raise DiskError(error.errno, f"could not {action} ({error.strerror})") from error


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which is created. The kernel releases it if the process dies.

    If another process holds the lock, wait for it if `wait` is true; otherwise raise a `BusyError`.
    Folders that are created for the lock are removed if the block raises and has written nothing into them.
    """
    missing = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    with _removed_on_failure(path, missing), disk_errors(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+")  # noqa: SIM115
    with file, _removed_on_failure(path, missing):
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise BusyError(
                f"{path.parent} is in use by another process (id {holder}): "
                "wait until it finishes, or choose another folder"
            ) from None
        with contextlib.suppress(OSError):  # the id is only for the message above
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), str(os.getpid()).encode())
        yield


@contextlib.contextmanager
def _removed_on_failure(lock: Path, created: Sequence[Path]) -> Iterator[None]:
    """If the block raises, remove the folders that were created for the lock, as long as they hold nothing else."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            if created and lock.exists() and list(lock.parent.iterdir()) == [lock]:
                lock.unlink()
        for folder in created:  # the innermost first; one that is not empty stays, and its parents with it
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
