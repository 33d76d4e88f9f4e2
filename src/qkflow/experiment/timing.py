"""How long a study takes: the runs of every arm, evaluations included, packed onto as many slots as run at a time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from qkflow.data import Split
from qkflow.experiment.design import EVALUATIONS, TUNING_EVALUATIONS
from qkflow.experiment.matching import Shape, steps_of, whole
from qkflow.experiment.spec import Match
from qkflow.training.budget import Speed

_DURING = 0.06
"""The part of a run that its evaluations before the last may take, and the last one, below."""
_LAST = 0.15
_FORWARD = 1 / 3
"""What reading a held-out token costs, as a part of training on one: a step is one pass forward, and two back."""
_LEAST = 8192
"""Held-out tokens of an evaluation, at least: fewer say nothing."""
_DOCUMENTS = 8
"""Documents that the last evaluation has room for, at least, if they are of the usual length."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A study of which only the steps are open."""

    shape: Shape
    """Its arms."""
    seeds: int
    """Runs of each arm."""
    speeds: tuple[Speed, ...]
    """Of each arm."""
    match: Match
    """What the arms share."""
    rates: int
    """Learning rates that each arm tries."""
    jobs: int
    """Runs at a time."""
    held_out: Split
    """The held-out documents."""
    graded: int = 0
    """Tokens of a task's test instances, which every run answers after its last step."""

    def steps(self, steps: int) -> tuple[int, ...]:
        """Steps of each arm where the baseline makes `steps`."""
        return steps_of(self.shape, steps, self.match, [speed.step for speed in self.speeds])

    def seconds(self, steps: int) -> float:
        """What all runs take, tuning first, where the baseline makes `steps`."""
        during, final = evaluated(steps * self.shape.step_tokens, self.held_out)
        last = len(self.held_out.tokens) if final is None else final
        each = self.steps(steps)

        def stage(times: int, steps: Iterable[int], evaluations: int) -> float:
            read = evaluations * during + last
            runs = [
                n * speed.step + read * speed.token + self.graded * speed.answer
                for n, speed in zip(steps, self.speeds, strict=True)
            ]
            return makespan(sorted(runs, reverse=True) * times, self.jobs)

        tuning = stage(self.rates, map(tuning_steps, each), TUNING_EVALUATIONS) if self.rates > 1 else 0.0
        return tuning + stage(self.seeds, each, EVALUATIONS)

    def within(self, seconds: float) -> int:
        """The most steps of the baseline that fit into `seconds`; never fewer than the shortest run has."""
        low, high = 1, 2
        while self.seconds(high * EVALUATIONS) <= seconds:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.seconds(middle * EVALUATIONS) <= seconds else (low, middle)
        return low * EVALUATIONS

    def reading(self, tokens: float) -> int:
        """The most steps of the baseline with which no arm trains on more than `tokens`; 0 if there are none such."""
        longest = max(self.steps(10**6)) / 10**6
        most = int(tokens / self.shape.step_tokens / longest) // EVALUATIONS * EVALUATIONS
        rounded_up = most > 0 and max(self.steps(most)) * self.shape.step_tokens > tokens
        return most - EVALUATIONS if rounded_up else most


def makespan(durations: Iterable[float], slots: int) -> float:
    """When the last of some runs ends, if each begins, in their order, as soon as a slot is free.

    >>> makespan([3.0, 2.0, 2.0, 1.0], 2)
    4.0
    """
    free = [0.0] * slots
    for duration in durations:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)


def evaluated(tokens: int, held_out: Split) -> tuple[int, int | None]:
    """Held-out tokens of the evaluations during a run of so many training tokens, and of the last (None: all)."""
    there = len(held_out.tokens)
    a_few = there * _DOCUMENTS // len(held_out.documents)
    during = max(_LEAST, int(_DURING * tokens / _FORWARD / EVALUATIONS))
    final = max(_LEAST, a_few, int(_LAST * tokens / _FORWARD))
    return min(during, there), None if final >= there else final


def tuning_steps(steps: int) -> int:
    """Steps of a tuning run: a quarter of a run's.

    >>> tuning_steps(1000)
    240
    """
    return whole(steps / 4)
