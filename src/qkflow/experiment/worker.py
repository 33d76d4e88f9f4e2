"""One training run in a worker process: trained or resumed, with its peak memory and its failures recorded."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from qkflow.data.tasks import TaskConfig
from qkflow.errors import BusyError, DiskError, DivergenceError, Interrupted, UsageError
from qkflow.experiment.executors.base import describe_error
from qkflow.experiment.metrics.measurement import RationaleMeasurement
from qkflow.experiment.run_status import read_status, update_status
from qkflow.io import discard, locked
from qkflow.training import Callback, Run, TrainConfig, train
from qkflow.training.run_dir import holds_run


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One run for a worker process."""

    folder: str
    """The run folder; a run that it holds is resumed."""
    config: TrainConfig
    command: tuple[str, ...]
    """Recorded with the run."""
    lock_timeout: float
    """Seconds to wait for the lock of a dying process."""
    measurement: RationaleMeasurement | None = None
    """What is measured besides the loss."""


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How an attempt at a run ended."""

    kind: Literal["finished", "diverged", "refused", "disk full", "stopped", "crashed"]
    """`diverged` would happen again; `refused` needs the user; `crashed` may succeed on the next attempt."""
    reason: str = ""
    """Why, on one line; empty for a finished run."""
    errno: int | None = None
    """The system's error number, for `disk full`."""


def run_one(spec: RunSpec) -> RunOutcome:
    """Train one run to its end, from a checkpoint if there is one. Errors are returned as a `RunOutcome`."""
    folder = Path(spec.folder)
    try:
        _train(spec, folder)
    except DivergenceError as error:
        reason = str(error).split(". ")[0]  # the rest is advice for a single run
        return _failed(folder, RunOutcome(kind="diverged", reason=reason))
    except DiskError as error:
        cause = error.__cause__ if isinstance(error.__cause__, DiskError) else error
        return RunOutcome(kind="disk full", reason=str(cause.strerror), errno=cause.errno)
    except Interrupted as error:
        return RunOutcome(kind="stopped", reason=str(error).split(":")[0])
    except UsageError as error:
        return _failed(folder, RunOutcome(kind="refused", reason=str(error)))
    except Exception as error:  # a mechanism may be anyone's code
        is_task = isinstance(spec.config.data, TaskConfig)
        flags = "--batch, --longest or --jobs" if is_task else "--batch, --context, --size or --jobs"
        return _failed(folder, RunOutcome(kind="crashed", reason=describe_error(error, reduce=flags)))
    return RunOutcome(kind="finished")


class _CountAttempt(Callback):
    """Counts the attempt once the run's lock is held."""

    def on_start(self, run: Run) -> None:
        attempts = read_status(run.folder).attempts + 1
        update_status(run.folder, attempts=attempts, failed=None, failed_for_good=False)


def _train(spec: RunSpec, folder: Path) -> None:
    before, deadline = _peak_bytes(), time.monotonic() + spec.lock_timeout
    while True:
        try:
            with locked(folder / "lock"):  # a dying process has released it, and has started the run or not
                resume = holds_run(folder)
            train(
                spec.config,
                folder,
                callbacks=[_CountAttempt()],
                measurement=spec.measurement,
                resume=resume,
                command=spec.command,
            )
            break
        except BusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    peak = torch.cuda.max_memory_allocated() if spec.config.device == "cuda" else _peak_bytes() - before
    update_status(folder, peak_bytes=max(peak, read_status(folder).peak_bytes or 0), failed=None)
    discard(folder / "checkpoints")


def _failed(folder: Path, outcome: RunOutcome) -> RunOutcome:
    """Record a failure, and return it."""
    update_status(folder, failed=outcome.reason, failed_for_good=outcome.kind == "diverged")
    return outcome


def _peak_bytes() -> int:
    """The peak memory of this process; Linux counts it in kibibytes, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
