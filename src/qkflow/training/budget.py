"""Convert a time budget into a number of steps, before the run starts."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np

from qkflow.errors import UsageError
from qkflow.training.config import TrainConfig
from qkflow.training.distributed import Parallel, SingleProcess, join
from qkflow.training.losses import Objective, open_objective
from qkflow.training.parallel import ignore_view_warnings
from qkflow.training.reproducibility import flushed_denormals, own_randomness, threads
from qkflow.training.step import Learner


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of a run on this machine."""

    step: float
    """Seconds per training step."""
    token: float
    """Seconds per token of validation data."""
    answer: float = 0.0
    """Seconds per token of a recall task's test data, whose instances may be longer than those it trains on."""

    def times(self, ratio: float) -> Speed:
        """The speed of a run that takes `ratio` times as long.

        >>> Speed(step=1.0, token=0.5).times(2.0).token
        1.0
        """
        return Speed(step=self.step * ratio, token=self.token * ratio, answer=self.answer * ratio)


def measure_speed(
    config: TrainConfig, seconds: float, *, objective: Objective | None = None, group: SingleProcess | None = None
) -> Speed:
    """Measure the speed of a temporary model for about `seconds`, at least three steps, and part of an evaluation.

    No files and no global random generators change. All processes of a group measure together, and the clock of rank 0
    decides.
    """
    group = group or SingleProcess()
    with group.raise_on_all_ranks():
        device, objective = group.device(config.device), objective or open_objective(config)
    with (
        threads(config.threads),
        flushed_denormals(config.flush_denormals),
        own_randomness(device),
        ignore_view_warnings(group),
    ):
        with group.raise_on_all_ranks():
            learner = Learner(config, objective, device, group=group)
        learner.parallelize()
        learner.train_step(_never)  # the first step allocates and compiles
        started, times = time.perf_counter(), []
        while len(times) < 3 or group.broadcast(time.perf_counter() - started < seconds):
            times.append(learner.train_step(_never)["seconds"])
        limit = config.evaluate_batch * config.context
        learner.evaluate(objective.validation(limit), _never)
        held_out = objective.validation(limit)
        started = time.perf_counter()
        learner.evaluate(held_out, _never)
        token = (time.perf_counter() - started) / held_out.n_tokens()
        answer = 0.0
        if (test := objective.test(None)) is not None:
            one_of_each_length = int(np.unique([window.length for window in test.windows]).sum())
            held_out = objective.test(max(limit, one_of_each_length)) or test
            started = time.perf_counter()
            learner.evaluate(held_out, _never)
            answer = (time.perf_counter() - started) / held_out.n_tokens()
    return Speed(**group.broadcast(asdict(Speed(step=statistics.median(times), token=token, answer=answer))))


def steps_for_budget(config: TrainConfig, seconds: float, *, parallel: Parallel | None = None) -> int:
    """The number of steps that fit into `seconds`, including evaluations; at least 1. `config.steps` is ignored.

    Under torchrun, all processes take part.
    """
    with join(parallel) as group:
        with group.raise_on_all_ranks():
            if not seconds > 0:
                raise UsageError(f"a budget must be more than 0 seconds, got {seconds:g}")
            objective = open_objective(config)
        speed = measure_speed(config, min(0.05 * seconds, 5.0), objective=objective, group=group)
        with group.raise_on_all_ranks():
            return _fitting_steps(config, objective, seconds, speed)


def _fitting_steps(config: TrainConfig, objective: Objective, seconds: float, speed: Speed) -> int:
    evaluation = speed.token * objective.validation(config.evaluate_tokens).n_tokens()
    final = speed.token * objective.validation(config.final_tokens).n_tokens()
    if (test := objective.test(None)) is not None:
        final += (answers := speed.answer * test.n_tokens())
        if answers > seconds:
            raise UsageError(
                f"evaluating the {len(test.sizes):,} test instances of {objective.name} takes about {answers:.0f} s, "
                f"but the budget is {seconds:g} s: use a longer --budget, or fewer instances (each=N)"
            )
    return max(1, int((seconds - evaluation - final) / (speed.step + evaluation / config.evaluate_every)))


def _never() -> bool:
    return False
