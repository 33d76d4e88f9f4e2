"""attempt.json in a run folder: how often the run was started, its peak memory, and why it failed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qkflow.config import from_dict, to_dict
from qkflow.errors import UsageError
from qkflow.io import write_json
from qkflow.training.run_dir import read_json

FILE = "attempt.json"


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The attempts at one run."""

    attempts: int = 0
    """How often training was started or resumed."""
    peak_bytes: int | None = None
    """Peak memory beyond what the process held before; None until the run is finished."""
    failed: str | None = None
    """Why the last attempt failed, on one line; None if it did not."""
    failed_for_good: bool = False
    """Whether another attempt would fail again."""


def read_status(folder: Path) -> RunStatus:
    """The status in a run folder; a new one if there is none, or it is damaged: no run depends on it.

    >>> read_status(Path("no such folder")).attempts
    0
    """
    path = folder / FILE
    if not path.exists():
        return RunStatus()
    try:
        return from_dict(RunStatus, read_json(path))
    except UsageError:
        return RunStatus()


def update_status(
    folder: Path,
    *,
    failed: str | None,
    failed_for_good: bool | None = None,
    attempts: int | None = None,
    peak_bytes: int | None = None,
) -> None:
    """Write whether the run failed, and the other fields that are given, to the status in a run folder."""
    status = read_status(folder)
    status = RunStatus(
        attempts=status.attempts if attempts is None else attempts,
        peak_bytes=status.peak_bytes if peak_bytes is None else peak_bytes,
        failed=failed,
        failed_for_good=status.failed_for_good if failed_for_good is None else failed_for_good,
    )
    write_json(folder / FILE, to_dict(status))
