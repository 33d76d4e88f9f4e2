"""A budget in time becomes a number of steps before the run begins, and the steps are what goes on record."""

from __future__ import annotations

import statistics
import time

from qkflow.data import windows
from qkflow.errors import UsageError
from qkflow.training.config import TrainConfig
from qkflow.training.environment import pick_device
from qkflow.training.evaluation import evaluate
from qkflow.training.learner import Learner, open_checked
from qkflow.training.runtime import own_randomness, threads

_WARM, _TIMED, _SHARE = 2, 10, 0.05


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
        times = [learner.learn(lambda: False)["seconds"] for _ in range(_WARM)]
        began = time.perf_counter()
        times = []
        while len(times) < 3 or (len(times) < _TIMED and time.perf_counter() - began < _SHARE * seconds):
            times.append(learner.learn(lambda: False)["seconds"])
        step = statistics.median(times)

        def tokens(limit: int | None) -> int:
            todo = windows(corpus.validation, context=config.context, stride=config.stride, limit=limit)
            return sum(window.length for window in todo)

        piece = min(
            config.evaluate_tokens or config.evaluate_batch * config.context, config.evaluate_batch * config.context
        )
        began = time.perf_counter()
        evaluate(
            learner.model,
            corpus.validation,
            context=config.context,
            batch=config.evaluate_batch,
            stride=config.stride,
            limit=piece,
        )
        token = (time.perf_counter() - began) / tokens(piece)
    during, final = token * tokens(config.evaluate_tokens), token * tokens(config.final_tokens)
    return max(1, int((seconds - during - final) / (step + during / config.evaluate_every)))
