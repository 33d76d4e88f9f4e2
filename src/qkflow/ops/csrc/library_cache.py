"""A directory of compiled libraries that nobody else can write to, and whose content is verified before it is loaded.

The directory belongs to the current user and has the mode 0700. A library is named after the SHA-256 of its bytes, and
the manifest of a build, `KEY.sha256`, names the library. `open` reads both and returns a descriptor of the file whose
bytes it has verified: load that descriptor (`loadable`), not a path, which may have been replaced in the meantime.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
from pathlib import Path

from qkflow.errors import UsageError

_PRIVATE = 0o700
_OTHERS_CAN_WRITE = 0o022
_OWN_FILE = re.compile(r"[0-9a-f]{64}\.so|[0-9a-f]{32}\.sha256|\.[0-9a-f]{32,64}\.(so|sha256)\.[0-9a-f]{16}")
"""Names of libraries, of manifests, and of temporary files that `_write` renames to them."""


class LibraryCache:
    """The libraries in a directory, which is created; raises if it cannot be made private."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=_PRIVATE)
        self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._make_private()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LibraryCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the directory; descriptors returned by `open` stay open."""
        os.close(self._directory)

    def open(self, key: str) -> tuple[int, Path] | None:
        """A descriptor and the path of the verified library of a build; None if it is missing, altered or not ours."""
        manifest = self._open_file(f"{key}.sha256")
        if manifest is None:
            return None
        with open(manifest, "rb") as file:
            digest = file.read(65).decode("ascii", "replace")
        if len(digest) != 64 or not digest.isalnum():
            return None
        name = f"{digest}.so"
        library = self._open_file(name)
        if library is None:
            return None
        with open(library, "rb", closefd=False) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == digest:
                return library, self.path / name
        os.close(library)
        return None

    def store(self, key: str, content: bytes) -> None:
        """Write the library of a build, then its manifest, each atomically: concurrent builds need no lock."""
        digest = hashlib.sha256(content).hexdigest()
        self._write(f"{digest}.so", content)
        self._write(f"{key}.sha256", digest.encode())

    def _make_private(self) -> None:
        status = os.fstat(self._directory)
        if status.st_uid != os.geteuid():
            raise UsageError(
                f"{self.path} belongs to user {status.st_uid}, not to user {os.geteuid()}:"
                " set QKFLOW_CACHE to a folder of your own"
            )
        if stat.S_IMODE(status.st_mode) == _PRIVATE:
            return
        os.fchmod(self._directory, _PRIVATE)
        if stat.S_IMODE(os.fstat(self._directory).st_mode) != _PRIVATE:
            raise UsageError(f"{self.path} cannot be made private: set QKFLOW_CACHE to a folder on another file system")
        if status.st_mode & _OTHERS_CAN_WRITE:  # anyone may have planted libraries; other files are not read
            for name in filter(_OWN_FILE.fullmatch, os.listdir(self._directory)):  # noqa: PTH208
                with contextlib.suppress(IsADirectoryError, PermissionError):
                    os.unlink(name, dir_fd=self._directory)

    def _open_file(self, name: str) -> int | None:
        """A descriptor of a regular file that only this user can write; None if there is none."""
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._directory)
        except OSError:
            return None
        status = os.fstat(descriptor)
        is_own = status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_CAN_WRITE
        if stat.S_ISREG(status.st_mode) and is_own:
            return descriptor
        os.close(descriptor)
        return None

    def _write(self, name: str, content: bytes) -> None:
        temporary = f".{name}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(temporary, flags, 0o600, dir_fd=self._directory)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            os.rename(temporary, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except BaseException:
            os.unlink(temporary, dir_fd=self._directory)
            raise


def loadable(descriptor: int, path: Path) -> str:
    """The name under which to load a verified library: its descriptor, or its path where there is no /proc.

    The descriptor must stay open, because the loader identifies a library by this name.
    """
    name = f"/proc/self/fd/{descriptor}"
    return name if os.path.exists(name) else str(path)  # noqa: PTH110
