"""What a study has on record, read back: a file that is damaged is said to be, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qkflow.errors import CheckpointError
from qkflow.experiment.metrics.rationale import TrainingPoint


def read_json(path: Path, *, whole: bool = False) -> Any:
    """The content of a file in a run's folder, which is worth nothing without it; or of a file that is `whole`."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise damaged(path if whole else path.parent, error) from error


def read_path(folder: Path) -> tuple[TrainingPoint, ...]:
    """A run along its training."""
    try:
        found = tuple(TrainingPoint(**point) for point in read_json(folder / "path.json"))
    except TypeError as error:
        raise damaged(folder, error) from error
    if not found:
        raise damaged(folder, "path.json is empty")
    return found


def damaged(path: Path, reason: object) -> CheckpointError:
    """An error about a run, or a file, that cannot be read."""
    told = " ".join(str(reason).split())
    return CheckpointError(f"{path} cannot be read ({told}): delete it, and the same command makes it anew")
