"""metrics.jsonl: one JSON object a line, in the order of the steps. A kill can tear only the last line."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qkflow.errors import DiskError
from qkflow.io import write_file


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole record of the file; torn lines are left out.

    >>> read_metrics(Path("no such file"))
    []
    """
    return [record for _, record in _lines(path)]


def trim_metrics(path: Path, step: int) -> int:
    """Drop what was written after `step`, and torn lines, in one atomic write; the number of lines dropped.

    What a run wrote between its last checkpoint and a kill is made again, and would stand there twice.
    """
    kept = [line for line, record in _lines(path) if record["step"] <= step]
    content = b"".join(line + b"\n" for line in kept)
    before = path.read_bytes() if path.exists() else b""
    if content != before:
        write_file(path, content)
    return len(before.splitlines()) - len(kept)


class Metrics:
    """The open file: `write` appends a record, `sync` puts all of them on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._guarded():
            self._file = open(path, "ab")  # noqa: SIM115
        self.evaluated = {record["step"] for record in read_metrics(path) if record["kind"] == "eval"}

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; a value that is not finite is refused, since JSON has none."""
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        with self._guarded():
            self._file.write(line)
            self._file.flush()
        if record["kind"] == "eval":
            self.evaluated.add(record["step"])

    def sync(self) -> None:
        """Return when every record is on the disk."""
        with self._guarded():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DiskError(error.errno, f"could not write {self.path} ({error.strerror})") from error


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int) and isinstance(record.get("kind"), str):
            yield line, record
