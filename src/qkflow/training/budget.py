"""A budget in time becomes a number of steps before the run begins, and the steps are what goes on record."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np

from qkflow.data import Split
from qkflow.errors import UsageError
from qkflow.training.config import TrainConfig
from qkflow.training.distributed import ALONE, Parallel, World, join
from qkflow.training.evaluation import held_out
from qkflow.training.learner import Learner, open_checked
from qkflow.training.parallel import quiet
from qkflow.training.reproducibility import own_randomness, threads


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How long the parts of a run take on this machine as it stands."""

    step: float
    """Seconds a training step."""
    token: float
    """Seconds a token of held-out text."""
    answer: float = 0.0
    """Seconds a token of a task's test instances, which may be longer than those it learns from."""

    def times(self, ratio: float) -> Speed:
        """The speed of what takes so many times as long.

        >>> Speed(step=1.0, token=0.5).times(2.0).token
        1.0
        """
        return Speed(step=self.step * ratio, token=self.token * ratio, answer=self.answer * ratio)


def measure(config: TrainConfig, seconds: float, world: World = ALONE) -> Speed:
    """Let a throwaway model make steps for about `seconds`, three at least, and a piece of an evaluation.

    Neither a folder nor the global generators change. The processes of a world do it together, and the first one's
    clock counts.
    """
    with world.agreed():
        device, corpus = world.device(config.device), open_checked(config)
    with threads(config.threads), own_randomness(device), quiet(world):
        with world.agreed():
            learner = Learner(config, corpus, device, world=world)
        learner.spread()
        learner.learn(lambda: False)  # the first step allocates, and compiles
        began, times = time.perf_counter(), []
        while len(times) < 3 or world.any(world.leads and time.perf_counter() - began < seconds):
            times.append(learner.learn(lambda: False)["seconds"])
        piece = config.evaluate_batch * config.context
        learner.evaluate(piece, lambda: False)
        began = time.perf_counter()
        learner.evaluate(piece, lambda: False)
        token = (time.perf_counter() - began) / tokens_read(corpus.validation, config, piece)
        answer = 0.0
        if corpus.task is not None:
            some = max(piece, int(np.unique(np.diff(corpus.test.documents)).sum()))  # room for one of every length
            began = time.perf_counter()
            learner.recall(some, lambda: False)
            answer = (time.perf_counter() - began) / tokens_read(corpus.test, config, some)
    return Speed(**world.first(asdict(Speed(step=statistics.median(times), token=token, answer=answer))))


def steps_for_budget(config: TrainConfig, seconds: float, *, parallel: Parallel | None = None) -> int:
    """How many steps of `config` (whose own number is ignored) fit into `seconds`, evaluations included; at least 1.

    Under torchrun, of all its processes together.
    """
    with join(parallel) as world:
        with world.agreed():
            if not seconds > 0:
                raise UsageError(f"a budget must be more than 0 seconds, got {seconds:g}")
        speed = measure(config, min(0.05 * seconds, 5.0), world)
        with world.agreed():
            return _fitting(config, seconds, speed)


def _fitting(config: TrainConfig, seconds: float, speed: Speed) -> int:
    corpus = open_checked(config)
    during = speed.token * tokens_read(corpus.validation, config, config.evaluate_tokens)
    final = speed.token * tokens_read(corpus.validation, config, config.final_tokens)
    if corpus.task is not None:
        final += (answers := speed.answer * tokens_read(corpus.test, config, None))
        if answers > seconds:
            raise UsageError(
                f"answering the {len(corpus.test.documents):,} test instances of {corpus.name} takes about "
                f"{answers:.0f} s, and the budget is {seconds:g} s: give a longer --budget, or ask for fewer (each=N)"
            )
    return max(1, int((seconds - during - final) / (speed.step + during / config.evaluate_every)))


def tokens_read(split: Split, config: TrainConfig, limit: int | None) -> int:
    """Tokens that an evaluation with this limit reads."""
    return sum(window.length for window in held_out(split, context=config.context, stride=config.stride, limit=limit))
