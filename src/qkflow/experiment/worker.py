"""What happens in the process of one run: train, and say in plain data how it ended."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from qkflow.errors import BusyError, DiskError, DivergenceError, Interrupted, UsageError
from qkflow.experiment.run_status import read_status, write_status
from qkflow.io import discard, locked
from qkflow.training import Callback, Run, TrainConfig, budget, train
from qkflow.training.budget import Speed
from qkflow.training.run_dir import holds_run


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One run to be made."""

    folder: str
    """The run folder; a run that it holds is gone on with."""
    config: TrainConfig
    """What to train."""
    command: tuple[str, ...]
    """For the run's record."""
    patience: float
    """Seconds to wait for the lock of a process that is about to die."""


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run, or an attempt at it, ended."""

    kind: Literal["finished", "diverged", "refused", "disk full", "stopped", "crashed"]
    """`diverged` would do so again; `refused` is something for the user to mend; `crashed` may go better next time."""
    reason: str = ""
    """Why, in a line; empty for a finished run."""
    errno: int | None = None
    """The system's number for what is wrong with the disk."""


def make_run(order: RunSpec) -> RunOutcome:
    """Train to the end, from a checkpoint where there is one; whatever goes wrong comes back as an `RunOutcome`."""
    folder = Path(order.folder)
    try:
        _train(order, folder)
    except DivergenceError as error:
        reason = str(error).split(". ")[0]  # the rest advises the owner of a single run
        return failed(folder, RunOutcome(kind="diverged", reason=reason))
    except DiskError as error:
        cause = error.__cause__ if isinstance(error.__cause__, DiskError) else error
        return RunOutcome(kind="disk full", reason=str(cause.strerror), errno=cause.errno)
    except Interrupted as error:
        return RunOutcome(kind="stopped", reason=str(error).split(":")[0])
    except UsageError as error:
        return failed(folder, RunOutcome(kind="refused", reason=str(error)))
    except Exception as error:  # a mechanism may be anyone's code
        return failed(folder, RunOutcome(kind="crashed", reason=described(error)))
    return RunOutcome(kind="finished")


def failed(folder: Path, ending: RunOutcome) -> RunOutcome:
    """Put a failure on record; the ending given."""
    for_good = ending.kind == "diverged"
    write_status(folder, replace(read_status(folder), failed=ending.reason, failed_for_good=for_good))
    return ending


def described(error: BaseException) -> str:
    """An exception on one line.

    >>> described(RuntimeError("no memory"))
    'RuntimeError: no memory'
    """
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def measure_speed(order: tuple[TrainConfig, float]) -> Speed:
    """`qkflow.training.budget.measure_speed`, for an engine."""
    return budget.measure_speed(*order)


class _Begin(Callback):
    """Counts the attempt once the run's lock is held."""

    def on_start(self, run: Run) -> None:
        record = read_status(run.folder)
        write_status(run.folder, replace(record, attempts=record.attempts + 1, failed=None, failed_for_good=False))


def _train(order: RunSpec, folder: Path) -> None:
    before, deadline = _peak_bytes(), time.monotonic() + order.patience
    while True:
        try:
            with locked(folder / "lock"):  # whoever may be dying in there is gone, and has begun a run or has not
                resume = holds_run(folder)
            train(order.config, folder, callbacks=[_Begin()], resume=resume, command=order.command)
            break
        except BusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    record = read_status(folder)
    peak = _gpu_bytes() if order.config.device == "cuda" else _peak_bytes() - before
    write_status(folder, replace(record, peak_bytes=max(peak, record.peak_bytes or 0), failed=None))
    discard(folder / "checkpoints")


def _peak_bytes() -> int:
    """The most memory that this process has held; Linux counts it in kibibytes, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _gpu_bytes() -> int:
    return torch.cuda.max_memory_allocated()
