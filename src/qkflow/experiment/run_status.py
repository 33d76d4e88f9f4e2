"""attempt.json of a run in a study: how often it was begun, what memory it took, and why it failed if it did."""

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
    """What became of the attempts at one run."""

    attempts: int = 0
    """How often training was begun or gone on with."""
    peak_bytes: int | None = None
    """Memory at the peak, beyond what the process held before; None until the run is finished."""
    failed: str | None = None
    """Why the last attempt failed, in a line; None if it did not."""
    failed_for_good: bool = False
    """Whether another attempt would come to the same."""


def read_status(folder: Path) -> RunStatus:
    """The record of a run folder; a fresh one where there is none.

    >>> read_status(Path("no such folder")).attempts
    0
    """
    path = folder / FILE
    if not path.exists():
        return RunStatus()
    try:
        return from_dict(RunStatus, read_json(path))
    except UsageError:  # it only helps: a run does not depend on it
        return RunStatus()


def write_status(folder: Path, record: RunStatus) -> None:
    """Replace the record of a run folder."""
    write_json(folder / FILE, to_dict(record))
