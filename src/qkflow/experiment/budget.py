"""Time into size, seeds and steps: the speed of every arm is measured, with as many runs at once as there will be.

Of the sizes and numbers of seeds in `PREFERENCES` the first is taken that gives every run ten training tokens a
parameter, then as many steps as fit. What the user has fixed stays as it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from qkflow.data import Corpus
from qkflow.errors import UsageError
from qkflow.experiment.design import EVALUATIONS
from qkflow.experiment.matching import OWN, Shape, shape, steps_of, whole
from qkflow.experiment.spec import ExperimentSpec
from qkflow.experiment.timing import Workload
from qkflow.formatting import format_compact, format_duration
from qkflow.training.budget import Speed

PREFERENCES = (
    ("5m", 10),
    ("5m", 5),
    ("1m", 10),
    ("1m", 5),
    ("500k", 5),
    ("100k", 5),
    ("100k", 3),
    ("100k", 2),
)
"""Sizes and seeds, the best first."""
USUAL_BUDGET = 600.0
"""Seconds of a study for which neither a budget nor tokens were asked."""
USUAL_SEEDS = 5
"""Where tokens were asked for, and no budget."""
ENOUGH = 10
"""Training tokens a parameter without which a size is not chosen."""
ASIDE = 0.1
"""The part of a budget that is not for runs, but for starting them and for the report."""
_MEASURING = 0.03
"""The part of a budget in which all arms at one size make the steps that are measured."""

_SAFELY = 0.9
"""Advice leaves room for a machine that is a little faster the next time it is measured."""

Measure = Callable[[Shape, float], tuple[Speed, ...]]
"""Gives the speed of each arm of a shape, with about so many seconds of steps for each."""
Notice = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class BudgetChoice:
    """What the budget came to."""

    shape: Shape
    """The arms at the size chosen."""
    seeds: int
    """Runs of each arm."""
    steps: tuple[int, ...]
    """Steps of each arm."""
    speeds: tuple[Speed, ...] | None = None
    """Of each arm; None where nothing depended on them."""
    seconds: float | None = None
    """What all runs are expected to take."""


def choose(
    request: ExperimentSpec,
    corpus: Corpus,
    *,
    jobs: int,
    measure: Measure,
    notice: Notice,
    clock: Callable[[], float] = time.monotonic,
) -> BudgetChoice:
    """Size, seeds and steps of a study with `jobs` runs at a time."""
    chooser = _Chooser(request, corpus, jobs, measure, notice, clock)
    if request.budget is None and request.tokens is not None:
        return chooser.readable(chooser.without_budget())
    return chooser.readable(chooser.within(request.budget or USUAL_BUDGET))


def options(request: ExperimentSpec) -> tuple[tuple[str, int], ...]:
    """The sizes and seeds that a request leaves open, the best first.

    >>> from qkflow.data import CorpusConfig
    >>> options(ExperimentSpec(corpus=CorpusConfig(), arms=("standard", "differential"), size="1m"))
    (('1m', 10), ('1m', 5), ('1m', 3), ('1m', 2))
    """
    if (fixed := OWN if request.model is not None else request.size) is None:
        found = [(name, request.seeds or seeds) for name, seeds in PREFERENCES]
    else:
        found = [(fixed, request.seeds or seeds) for seeds in (10, 5, 3, 2)]
    return tuple(dict.fromkeys(found))


class _Chooser:
    def __init__(
        self,
        request: ExperimentSpec,
        corpus: Corpus,
        jobs: int,
        measure: Measure,
        notice: Notice,
        clock: Callable[[], float],
    ) -> None:
        self.request, self.corpus, self.jobs = request, corpus, jobs
        self.measure, self.notice, self.clock = measure, notice, clock
        self.began = clock()
        self.text = len(corpus.train.tokens)
        self.more = "more text" if corpus.context is None else "the task more instances (train=N)"

    def shape(self, name: str) -> Shape:
        """The arms at one size."""
        return shape(self.request, name, self.corpus.vocabulary, self.corpus.context)

    def without_budget(self) -> BudgetChoice:
        """The tokens are given: the largest size for which they are enough, and nothing is measured without need."""
        names = dict.fromkeys(name for name, _ in options(self.request))
        made = [self.shape(name) for name in names]
        enough = [one for one in made if self.asked(one) * one.step_tokens >= ENOUGH * one.parameters]
        chosen, seeds = (enough or made[-1:])[0], self.request.seeds or USUAL_SEEDS
        if self.request.match == "seconds":
            work = self.workload(chosen, seeds, self.measured(chosen, USUAL_BUDGET))
            return self.choice(work, self.asked(chosen))
        return BudgetChoice(shape=chosen, seeds=seeds, steps=steps_of(chosen, self.asked(chosen), self.request.match))

    def within(self, budget: float) -> BudgetChoice:
        """The first option that the budget affords, or else the last, measured at its own size."""
        possible = options(self.request)
        shapes = {name: self.shape(name) for name, _ in possible}
        smallest = shapes[possible[-1][0]]
        speeds = {smallest.size: self.measured(smallest, budget)}
        for name, seeds in possible[:-1]:
            made = shapes[name]
            if name not in speeds:
                guess = predicted(speeds[smallest.size], smallest, made)
                if not self.affords(self.workload(made, seeds, guess), budget):
                    continue
                speeds[name] = self.measured(made, budget)
            work = self.workload(made, seeds, speeds[name])
            if self.affords(work, budget):
                break
        else:
            work = self.workload(smallest, possible[-1][1], speeds[smallest.size])
        return self.announced(self.choice(work, self.filled(work, budget)), budget)

    def filled(self, work: Workload, budget: float) -> int:
        """Steps of the baseline: those asked for, or as many as time and text allow."""
        if self.request.tokens is not None:
            return self.asked(work.shape)
        steps, most = work.within(self.left(budget)), work.reading(self.request.passes * self.text)
        if most < EVALUATIONS:
            need = math.ceil(EVALUATIONS * work.shape.step_tokens / self.request.passes)
            raise UsageError(
                f"{self.corpus.name} has {self.text:,} training tokens, and the shortest runs need {need:,} for "
                f"{self.request.passes:g} passes: give {self.more}, or a smaller --batch or --context"
            )
        if steps <= most:
            return steps
        spent = self.clock() - self.began
        fits = format_duration(_SAFELY * (work.seconds(most) + spent) / (1 - ASIDE))
        often = (
            f"{self.corpus.name} has {format_compact(self.text)} training tokens, which "
            f"{format_duration(budget)} would read more than {self.request.passes:g} times"
        )
        if self.request.budget is not None:
            passes = math.ceil(10 * self.request.passes * steps / most / _SAFELY) / 10
            raise UsageError(f"{often}: give --budget {fits}, or allow --passes {passes:g}, or give {self.more}")
        self.notice(f"{often}: the study is shortened to about {fits}")
        return most

    def affords(self, work: Workload, budget: float) -> bool:
        """Whether time and text are enough for every run."""
        if self.request.tokens is not None:
            return work.seconds(self.asked(work.shape)) <= self.left(budget)
        steps = min(work.within(self.left(budget)), work.reading(self.request.passes * self.text))
        return steps > 0 and min(work.steps(steps)) * work.shape.step_tokens >= ENOUGH * work.shape.parameters

    def asked(self, made: Shape) -> int:
        """The steps of the tokens asked for."""
        return whole((self.request.tokens or 0) / made.step_tokens)

    def readable(self, choice: BudgetChoice) -> BudgetChoice:
        """The choice, unless an arm of it would read the corpus too often."""
        tokens = max(choice.steps) * choice.shape.step_tokens
        if (passes := tokens / self.text) > self.request.passes:
            raise UsageError(
                f"a run of {tokens:,} training tokens (its steps are a multiple of {EVALUATIONS}) would read the "
                f"{self.text:,} of {self.corpus.name} {passes:.1f} times: give fewer --train-tokens, "
                f"or allow --passes {math.ceil(10 * passes) / 10:g}"
            )
        return choice

    def measured(self, made: Shape, budget: float) -> tuple[Speed, ...]:
        """The speed of each arm."""
        self.notice(f"measuring the speed of {len(made.arms)} arms at {made.size}, {self.jobs} runs at a time")
        return self.measure(made, min(3.0, max(0.2, _MEASURING * budget / len(made.arms))))

    def workload(self, made: Shape, seeds: int, speeds: tuple[Speed, ...]) -> Workload:
        """What is to be done."""
        return Workload(
            shape=made,
            seeds=seeds,
            speeds=speeds,
            match=self.request.match,
            rates=len(self.request.learning_rates),
            jobs=self.jobs,
            held_out=self.corpus.validation,
            graded=0 if self.corpus.context is None else len(self.corpus.test.tokens),
        )

    def choice(self, work: Workload, steps: int) -> BudgetChoice:
        """The workload with its steps."""
        return BudgetChoice(
            shape=work.shape,
            seeds=work.seeds,
            steps=work.steps(steps),
            speeds=work.speeds,
            seconds=work.seconds(steps),
        )

    def announced(self, choice: BudgetChoice, budget: float) -> BudgetChoice:
        """The choice, after telling the user."""
        made, arms, rates = choice.shape, len(choice.shape.arms), len(self.request.learning_rates)
        tokens, runs = choice.steps[0] * made.step_tokens, arms * choice.seeds
        tuning = f" after {arms * rates} short ones to choose learning rates" if rates > 1 else ""
        self.notice(
            f"budget {format_duration(budget)}: {format_compact(made.parameters)} parameters, "
            f"{format_compact(tokens)} tokens per run, "
            f"{arms} arms x {choice.seeds} seeds = {runs} runs{tuning}, {min(self.jobs, runs)} at a time"
        )
        if tokens < ENOUGH * made.parameters:
            self.notice(f"that is little: {tokens / made.parameters:.1f} training tokens a parameter")
        if (choice.seconds or 0.0) > self.left(budget):
            expected = format_duration(choice.seconds or 0.0)
            self.notice(f"the runs are expected to take {expected}, longer than the budget")
        return choice

    def left(self, budget: float) -> float:
        """Seconds for runs."""
        return (1 - ASIDE) * budget - (self.clock() - self.began)


def predicted(speeds: tuple[Speed, ...], known: Shape, other: Shape) -> tuple[Speed, ...]:
    """The speeds of another size, in proportion to the declared FLOPs."""
    found = []
    for speed, old, new in zip(speeds, known.arms, other.arms, strict=True):
        ratio = new.flops_per_token / old.flops_per_token
        step = speed.step * ratio * other.step_tokens / known.step_tokens
        found.append(replace(speed.times(ratio), step=step))
    return tuple(found)
