"""attempt.json in a run folder: how often the run was started, its peak memory, and why it failed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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


def update_status(folder: Path, **changes: Any) -> None:
    """Change fields of the status in a run folder."""
    write_json(folder / FILE, to_dict(replace(read_status(folder), **changes)))
