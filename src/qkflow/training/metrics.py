"""metrics.jsonl: one JSON object per line, in the order of the steps. A crash can truncate only the last line."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qkflow.io import disk_errors, write_file


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read every complete record; truncated lines are skipped.

    >>> read_metrics(Path("no such file"))
    []
    """
    return [record for _, record in _lines(path)]


def metrics_checksum(path: Path, size: int | None = None) -> dict[str, Any]:
    """The size and the SHA-256 of the file, or of its first bytes."""
    content = (path.read_bytes() if path.exists() else b"")[:size]
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def trim_metrics(path: Path, step: int) -> int:
    """Remove records after `step` and truncated lines, in one atomic write; return the number of lines removed.

    A resumed run computes the records after its checkpoint again, and they would appear twice.
    """
    kept = [line for line, record in _lines(path) if record["step"] <= step]
    content = b"".join(line + b"\n" for line in kept)
    before = path.read_bytes() if path.exists() else b""
    if content != before:
        write_file(path, content)
    return len(before.splitlines()) - len(kept)


class Metrics:
    """metrics.jsonl, opened for appending."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with disk_errors(f"write {self.path}"):
            self._file = open(path, "ab")  # noqa: SIM115

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; a non-finite value raises `ValueError`, since JSON cannot represent it."""
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        with disk_errors(f"write {self.path}"):
            self._file.write(line)
            self._file.flush()

    def sync(self) -> None:
        """Sync all records to disk."""
        with disk_errors(f"write {self.path}"):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()


class MetricsReader:
    """Reads metrics.jsonl while it is being written.

    >>> MetricsReader(Path("no such file")).read()
    []
    """

    def __init__(self, path: Path) -> None:
        self.path, self._position = path, 0

    def read(self) -> list[dict[str, Any]]:
        """The records that were completed since the last call."""
        if not self.path.exists() or self.path.stat().st_size == self._position:
            return []
        with open(self.path, "rb") as file:
            file.seek(self._position)
            content = file.read()
        content = content[: content.rfind(b"\n") + 1]
        self._position += len(content)
        return [record for _, record in _parse(content)]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    return _parse(path.read_bytes() if path.exists() else b"")


def _parse(content: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for line in content.split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int) and isinstance(record.get("kind"), str):
            yield line, record
