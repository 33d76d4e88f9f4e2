"""A budget in time becomes a number of steps before the run begins, and the steps are what goes on record."""

from __future__ import annotations

import statistics
import time

from qkflow.data import windows
from qkflow.errors import UsageError
from qkflow.training.config import TrainConfig
from qkflow.training.environment import pick_device
from qkflow.training.learner import Learner, open_checked
from qkflow.training.runtime import own_randomness, threads


def steps_for_budget(config: TrainConfig, seconds: float) -> int:
    """How many steps of `config` (whose own number is ignored) fit into `seconds`, evaluations included; at least 1.

    A throwaway model makes a few steps and a piece of an evaluation. Neither a folder nor the global generators change.
    """
    if not seconds > 0:
        raise UsageError(f"a budget must be more than 0 seconds, got {seconds:g}")
    device = pick_device(config.device)
    corpus = open_checked(config)
    with threads(config.threads), own_randomness(device):
        learner = Learner(config, corpus, device)
        learner.learn(lambda: False)  # the first step allocates, and compiles
        began, times = time.perf_counter(), []
        while len(times) < 3 or (len(times) < 10 and time.perf_counter() - began < 0.05 * seconds):
            times.append(learner.learn(lambda: False)["seconds"])
        step = statistics.median(times)

        def tokens(limit: int | None) -> int:
            todo = windows(corpus.validation, context=config.context, stride=config.stride, limit=limit)
            return sum(window.length for window in todo)

        piece = config.evaluate_batch * config.context
        began = time.perf_counter()
        learner.evaluate(piece, lambda: False)
        token = (time.perf_counter() - began) / tokens(piece)
    during, final = token * tokens(config.evaluate_tokens), token * tokens(config.final_tokens)
    return max(1, int((seconds - during - final) / (step + during / config.evaluate_every)))
