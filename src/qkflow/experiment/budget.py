"""Match the arms, and turn a time budget into a model size, a number of steps and a number of seeds.

All arms have the same number of parameters, and train on the same tokens, FLOPs or seconds. The speed of every arm is
measured with as many concurrent runs as the experiment will have. The first entry of `PREFERENCES` is chosen whose runs
have enough steps and ten training tokens per parameter if every arm needs all its seeds; then the steps fill the
budget. What the user has fixed stays fixed. Arms that are decided with fewer seeds leave their time to the others.
"""

from __future__ import annotations

import heapq
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from qkflow.data import Corpus, Split
from qkflow.errors import UsageError
from qkflow.experiment.executors.base import Executor, Resources
from qkflow.experiment.spec import ExperimentSpec, Match, parse_arm, refuse_duplicate_arms
from qkflow.formatting import format_compact, format_duration
from qkflow.models import Decoder, DecoderConfig, matched, parameters, size
from qkflow.training import TrainConfig
from qkflow.training.budget import Speed, measure_speed
from qkflow.training.regime import default_batch

EVALUATIONS = 20
"""Evaluations per run. Steps are a multiple of it, so that one evaluation is at the end of the stable learning rate."""
TUNING_EVALUATIONS = 4
"""Evaluations per tuning run; only the last one matters."""
TOLERANCE = 0.005
"""The largest relative difference between an arm's parameters and the baseline's."""
OWN = "own"
"""The size of an experiment with a given model."""

_CONTEXT = {"100k": 128}
_DEFAULT_CONTEXT = 256
_RECALL_STEP_TOKENS = 2048
"""Tokens per step of a recall task."""

PREFERENCES = (("5m", 8), ("1m", 8), ("500k", 8), ("100k", 8), ("100k", 5), ("100k", 4), ("100k", 3))
"""Sizes, and seeds that fit into the budget if no arm is decided early; the best first."""
DEFAULT_BUDGET = 600.0
"""Seconds, if neither a budget nor tokens are given."""
DEFAULT_SEEDS = 5
"""Seeds, if tokens are given and no budget."""
TOKENS_PER_PARAMETER = 10
"""Training tokens per parameter that a size needs to be chosen."""
ENOUGH_STEPS, FEWEST_STEPS = 1500, 800
"""Steps that a size needs to be chosen; and those that are enough for a budget below ten minutes, with any tokens."""
TUNING_BUDGET = 1800.0
"""Seconds of budget from which each arm tunes its learning rate."""
TUNING_FACTORS = (0.5, 1.0, 2.0)
"""Learning rates that tuning tries, as multiples of the default."""
RESERVE = 0.05
"""The fraction of a budget for starting runs and writing the report."""
_MEASURING = 0.03
"""The fraction of a budget for measuring the speed of all arms at one size."""
_MOST_PLANNED_SEEDS = 50

_EVALUATION_TIME, _FINAL_EVALUATION_TIME = 0.05, 0.1
"""The fractions of a run's time for the evaluations during it, and for the last one."""
_FORWARD_COST = 1 / 3
"""The cost of evaluating a token, relative to training on it: one forward pass instead of one forward and two back."""
_MIN_EVALUATION_TOKENS = 8192
_MIN_WINDOWS = 400
"""Windows in the last evaluation: a few of each document if there are about 100."""

MeasureSpeeds = Callable[["SizedArms", float], tuple[Speed, ...]]
"""Measures the speed of each arm, spending about this many seconds on each."""
Notice = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class MatchedArm:
    """An arm at one size, with the baseline's number of parameters."""

    name: str
    model: DecoderConfig
    parameters: int
    flops_per_token: int
    """Of one forward pass at the context length."""
    state_bytes: int


@dataclass(frozen=True, kw_only=True)
class SizedArms:
    """All arms of an experiment at one model size."""

    size: str
    context: int
    batch: int
    arms: tuple[MatchedArm, ...]

    @property
    def step_tokens(self) -> int:
        """Training tokens per step."""
        return self.batch * self.context

    @property
    def parameters(self) -> int:
        """The number of parameters of the baseline."""
        return self.arms[0].parameters


def match_arms(spec: ExperimentSpec, size_name: str, vocabulary: int, instance_length: int | None = None) -> SizedArms:
    """The arms of a spec at a named size (or `OWN`), each with as many parameters as the baseline.

    For a recall task, `instance_length` is the context length.

    >>> from qkflow.data import CorpusConfig
    >>> sized = match_arms(ExperimentSpec(data=CorpusConfig(), arms=("standard", "differential")), "100k", 257)
    >>> [arm.parameters for arm in sized.arms], sized.context
    ([100224, 100032], 128)
    """
    context = spec.context or instance_length or _CONTEXT.get(size_name, _DEFAULT_CONTEXT)
    base = spec.model or size(size_name, vocabulary=vocabulary)
    if base.vocabulary < vocabulary:
        base = replace(base, vocabulary=vocabulary)
    refuse_duplicate_arms(spec.arms)
    models = [replace(base, mechanism=parse_arm(name).mechanism) for name in spec.arms]
    target = parameters(models[0])
    batch = spec.batch or default_batch(spec.tokens or TOKENS_PER_PARAMETER * target, context)
    if spec.batch is None and instance_length is not None:
        batch = max(1, _RECALL_STEP_TOKENS // instance_length)
    arms = tuple(_match(name, model, target, context) for name, model in zip(spec.arms, models, strict=True))
    return SizedArms(size=size_name, context=context, batch=batch, arms=arms)


def steps_per_arm(arms: SizedArms, steps: int, match: Match, seconds: Sequence[float] = ()) -> tuple[int, ...]:
    """Steps of each arm if the baseline has `steps`. `seconds` is the time per step of each arm.

    >>> from qkflow.data import CorpusConfig
    >>> sized = match_arms(ExperimentSpec(data=CorpusConfig(), arms=("standard", "differential")), "100k", 257)
    >>> steps_per_arm(sized, 1000, "tokens"), steps_per_arm(sized, 1000, "seconds", [0.01, 0.02])
    ((1000, 1000), (1000, 500))
    """
    if match == "tokens":
        return (steps,) * len(arms.arms)
    costs = seconds if match == "seconds" else [arm.flops_per_token for arm in arms.arms]
    return tuple(round_steps(steps * costs[0] / cost) for cost in costs)


def round_steps(steps: float) -> int:
    """The nearest positive multiple of `EVALUATIONS`."""
    return max(1, round(steps / EVALUATIONS)) * EVALUATIONS


def _match(name: str, model: DecoderConfig, target: int, context: int) -> MatchedArm:
    try:
        model = matched(model, target)
    except UsageError as error:
        raise UsageError(f"cannot match the arm {name!r}: {error}") from error
    with torch.device("meta"):
        cost = Decoder(model).cost(context)
    count = cost.parameters
    if abs(count / target - 1) > TOLERANCE:
        raise UsageError(
            f"cannot match the arm {name!r}: the closest to the baseline's {target:,} parameters is {count:,} "
            f"({count / target - 1:+.1%}, with a feed-forward width of {model.hidden}), and at most {TOLERANCE:.1%} is "
            "allowed: choose a larger size"
        )
    flops = round(cost.flops / context)
    return MatchedArm(name=name, model=model, parameters=count, flops_per_token=flops, state_bytes=cost.state_bytes)


@dataclass(frozen=True, kw_only=True)
class BudgetChoice:
    """What a budget is spent on."""

    arms: SizedArms
    seeds: int
    steps: tuple[int, ...]
    """Steps of each arm."""
    speeds: tuple[Speed, ...] | None = None
    """Speed of each arm; None if nothing depended on it."""
    seconds: float | None = None
    """Expected time of all runs."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """An experiment whose number of steps is open."""

    arms: SizedArms
    seeds: int
    speeds: tuple[Speed, ...]
    """Speed of each arm."""
    match: Match
    rates: int
    """Learning rates that each arm tries."""
    jobs: int
    """Concurrent runs."""
    held_out: Split
    graded: int = 0
    """Tokens of the test instances of a recall task, which every run answers at its end."""

    def steps(self, steps: int) -> tuple[int, ...]:
        """Steps of each arm if the baseline has `steps`."""
        return steps_per_arm(self.arms, steps, self.match, [speed.step for speed in self.speeds])

    def seconds(self, steps: int) -> float:
        """Time of all runs, tuning included, if the baseline has `steps`."""
        tokens = steps * self.arms.step_tokens
        during, last = evaluation_tokens(tokens, self.arms.context, len(self.held_out.tokens))
        arm_steps = self.steps(steps)

        def stage(times: int, steps: Iterable[int], evaluations: int) -> float:
            evaluated = evaluations * during + last
            runs = [
                n * speed.step + evaluated * speed.token + self.graded * speed.answer
                for n, speed in zip(steps, self.speeds, strict=True)
            ]
            return makespan(sorted(runs, reverse=True) * times, self.jobs)

        tuning = stage(self.rates, map(tuning_steps, arm_steps), TUNING_EVALUATIONS) if self.rates > 1 else 0.0
        return tuning + stage(self.seeds, arm_steps, EVALUATIONS)

    def most_steps(self, seconds: float) -> int:
        """The most steps of the baseline that fit into `seconds`; at least those of the shortest run."""
        low, high = 1, 2
        while self.seconds(high * EVALUATIONS) <= seconds:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.seconds(middle * EVALUATIONS) <= seconds else (low, middle)
        return low * EVALUATIONS

    def steps_for_tokens(self, tokens: float) -> int:
        """The most steps of the baseline with which no arm trains on more than `tokens`; 0 if there are none."""
        longest = max(self.steps(10**6)) / 10**6
        most = int(tokens / self.arms.step_tokens / longest) // EVALUATIONS * EVALUATIONS
        rounded_up = most > 0 and max(self.steps(most)) * self.arms.step_tokens > tokens
        return most - EVALUATIONS if rounded_up else most


def n_rates(spec: ExperimentSpec) -> int:
    """Learning rates that each arm tries; 1 if it is not tuned."""
    if spec.learning_rates is not None:
        return len(spec.learning_rates)
    is_tuned = spec.base is None and spec.budget is not None and spec.budget >= TUNING_BUDGET
    return len(TUNING_FACTORS) if is_tuned else 1


def makespan(durations: Iterable[float], slots: int) -> float:
    """When the last run ends if each starts, in this order, as soon as a slot is free.

    >>> makespan([3.0, 2.0, 2.0, 1.0], 2)
    4.0
    """
    free = [0.0] * slots
    for duration in durations:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)


def evaluation_tokens(train_tokens: int, context: int, available: int) -> tuple[int, int]:
    """Held-out tokens of the evaluations during a run with this many training tokens, and of the last evaluation."""
    during = max(_MIN_EVALUATION_TOKENS, int(_EVALUATION_TIME * train_tokens / _FORWARD_COST / EVALUATIONS))
    final = max(_MIN_WINDOWS * context, int(_FINAL_EVALUATION_TIME * train_tokens / _FORWARD_COST))
    return min(during, available), min(final, available)


def tuning_steps(steps: int) -> int:
    """Steps of a tuning run: a quarter of a run's.

    >>> tuning_steps(1000)
    240
    """
    return round_steps(steps / 4)


def measure_speeds(
    executor: Executor,
    configs: Mapping[str, TrainConfig],
    arms: SizedArms,
    seconds: float,
    jobs: int,
    notice: Notice,
) -> tuple[Speed, ...]:
    """The speed of each arm with `jobs` copies of it at once; an arm that fails is estimated from its FLOPs."""
    speeds: list[Speed | None] = []
    reason = ""
    for arm in arms.arms:
        config = configs[arm.name]
        resources = Resources(threads=config.threads or 1, gpus=int(config.device == "cuda"))
        calls = [
            call
            for call in executor.run(measure_call, [(config, seconds)] * jobs, workers=jobs, resources=resources)
            if call is not None
        ]
        measured = [call.value for call in calls if call.crash is None]
        if len(measured) < len(calls):
            reason = next(call.crash for call in calls if call.crash is not None)
            notice(f"could not measure the speed of {arm.name}: {reason}")
        speeds.append(_median(measured) if measured else None)
    known = [(speed, arm) for speed, arm in zip(speeds, arms.arms, strict=True) if speed is not None]
    if not known:
        raise UsageError(f"no arm could be run: {reason}")
    reference, reference_arm = known[0]
    return tuple(
        speed or reference.times(arm.flops_per_token / reference_arm.flops_per_token)
        for speed, arm in zip(speeds, arms.arms, strict=True)
    )


def measure_call(argument: tuple[TrainConfig, float]) -> Speed:
    """`measure_speed` with one argument, for an executor."""
    return measure_speed(*argument)


def choose_budget(
    spec: ExperimentSpec,
    corpus: Corpus,
    *,
    jobs: int,
    measure: MeasureSpeeds,
    notice: Notice,
    clock: Callable[[], float] = time.monotonic,
) -> BudgetChoice:
    """The size, seeds and steps of an experiment with `jobs` concurrent runs."""
    chooser = _Chooser(spec, corpus, jobs, measure, notice, clock)
    if spec.budget is None and spec.tokens is not None:
        return chooser.check_passes(chooser.without_budget())
    return chooser.check_passes(chooser.within(spec.budget or DEFAULT_BUDGET))


def size_options(spec: ExperimentSpec) -> tuple[tuple[str, int], ...]:
    """The sizes and seeds that a spec allows, the best first.

    >>> from qkflow.data import CorpusConfig
    >>> size_options(ExperimentSpec(data=CorpusConfig(), arms=("standard", "differential"), size="1m"))
    (('1m', 8), ('1m', 5), ('1m', 4), ('1m', 3))
    """
    if (fixed := OWN if spec.model is not None else spec.size) is None:
        options = [(name, spec.seeds or seeds) for name, seeds in PREFERENCES]
    else:
        options = [(fixed, spec.seeds or seeds) for seeds in (8, 5, 4, 3)]
    return tuple(dict.fromkeys(options))


class _Chooser:
    def __init__(
        self,
        spec: ExperimentSpec,
        corpus: Corpus,
        jobs: int,
        measure: MeasureSpeeds,
        notice: Notice,
        clock: Callable[[], float],
    ) -> None:
        self.spec, self.corpus, self.jobs = spec, corpus, jobs
        self.measure, self.notice, self.clock = measure, notice, clock
        self.start = clock()
        self.train_tokens = len(corpus.train.tokens)
        self.more = "use more text" if corpus.context is None else "use more instances (train=N)"

    def sized(self, name: str) -> SizedArms:
        return match_arms(self.spec, name, self.corpus.vocabulary, self.corpus.context)

    def without_budget(self) -> BudgetChoice:
        """The tokens are given: the largest size for which they suffice. Speeds are measured only if needed."""
        names = dict.fromkeys(name for name, _ in size_options(self.spec))
        sizes = [self.sized(name) for name in names]
        sufficient = [
            arms
            for arms in sizes
            if self.requested_steps(arms) * arms.step_tokens >= TOKENS_PER_PARAMETER * arms.parameters
        ]
        arms, seeds = (sufficient or sizes[-1:])[0], self.spec.seeds or DEFAULT_SEEDS
        if self.spec.match == "seconds":
            work = self.workload(arms, seeds, self.measured(arms, DEFAULT_BUDGET))
            return self.choice(work, self.requested_steps(arms))
        steps = steps_per_arm(arms, self.requested_steps(arms), self.spec.match)
        return BudgetChoice(arms=arms, seeds=seeds, steps=steps)

    def within(self, budget: float) -> BudgetChoice:
        """The first option that the budget allows, or else the last, each measured at its own size."""
        options = size_options(self.spec)
        sizes = {name: self.sized(name) for name, _ in options}
        smallest = sizes[options[-1][0]]
        speeds = {smallest.size: self.measured(smallest, budget)}
        for name, seeds in options[:-1]:
            arms = sizes[name]
            if name not in speeds:
                estimate = predict_speeds(speeds[smallest.size], smallest, arms)
                if not self.fits(self.workload(arms, seeds, estimate), budget):
                    continue
                speeds[name] = self.measured(arms, budget)
            work = self.workload(arms, seeds, speeds[name])
            if self.fits(work, budget):
                break
        else:
            work = self.workload(smallest, options[-1][1], speeds[smallest.size])
        steps = self.steps_within(work, budget)
        return self.announce(self.choice(self.more_seeds(work, steps, budget), steps), budget)

    def steps_within(self, work: Workload, budget: float) -> int:
        """Steps of the baseline: those requested, or as many as the time and the corpus allow."""
        if self.spec.tokens is not None:
            return self.requested_steps(work.arms)
        steps = work.most_steps(self.time_left(budget))
        most = work.steps_for_tokens(self.spec.passes * self.train_tokens)
        if most < EVALUATIONS:
            needed = math.ceil(EVALUATIONS * work.arms.step_tokens / self.spec.passes)
            raise UsageError(
                f"{self.corpus.name} has {self.train_tokens:,} training tokens, the shortest runs need {needed:,} for "
                f"{self.spec.passes:g} passes: {self.more}, or a smaller --batch or --context"
            )
        if steps <= most:
            return steps
        rest = "the rest of the time goes to more seeds" if self.spec.seeds is None else "the study will end earlier"
        self.notice(
            f"runs are limited to {self.spec.passes:g} passes over the {format_compact(self.train_tokens)} training "
            f"tokens of {self.corpus.name}: {rest}"
        )
        return most

    def more_seeds(self, work: Workload, steps: int, budget: float) -> Workload:
        """The workload with as many seeds as fit, if runs cannot be longer."""
        if self.spec.seeds is not None:
            return work
        while work.seeds < _MOST_PLANNED_SEEDS:
            larger = replace(work, seeds=work.seeds + 1)
            if larger.seconds(steps) > self.time_left(budget):
                break
            work = larger
        return work

    def fits(self, work: Workload, budget: float) -> bool:
        """Whether time and corpus suffice for every run."""
        if self.spec.tokens is not None:
            return work.seconds(self.requested_steps(work.arms)) <= self.time_left(budget)
        steps = min(
            work.most_steps(self.time_left(budget)), work.steps_for_tokens(self.spec.passes * self.train_tokens)
        )
        fewest = min(work.steps(steps)) if steps else 0
        if budget < DEFAULT_BUDGET:
            return fewest >= FEWEST_STEPS
        has_tokens = fewest * work.arms.step_tokens >= TOKENS_PER_PARAMETER * work.arms.parameters
        return has_tokens and fewest >= ENOUGH_STEPS

    def requested_steps(self, arms: SizedArms) -> int:
        return round_steps((self.spec.tokens or 0) / arms.step_tokens)

    def check_passes(self, choice: BudgetChoice) -> BudgetChoice:
        """Refuse a choice with too many passes over the corpus."""
        tokens = max(choice.steps) * choice.arms.step_tokens
        if (passes := tokens / self.train_tokens) > self.spec.passes:
            raise UsageError(
                f"a run of {tokens:,} training tokens (its steps are a multiple of {EVALUATIONS}) makes {passes:.1f} "
                f"passes over the {self.train_tokens:,} of {self.corpus.name}: use fewer --train-tokens, "
                f"or --passes {math.ceil(10 * passes) / 10:g}"
            )
        return choice

    def measured(self, arms: SizedArms, budget: float) -> tuple[Speed, ...]:
        self.notice(f"measuring the speed of {len(arms.arms)} arms at {arms.size}, {self.jobs} runs at a time")
        return self.measure(arms, min(3.0, max(0.2, _MEASURING * budget / len(arms.arms))))

    def workload(self, arms: SizedArms, seeds: int, speeds: tuple[Speed, ...]) -> Workload:
        return Workload(
            arms=arms,
            seeds=seeds,
            speeds=speeds,
            match=self.spec.match,
            rates=n_rates(self.spec),
            jobs=self.jobs,
            held_out=self.corpus.validation if self.corpus.task is not None else self.corpus.test,
            graded=0 if self.corpus.context is None else len(self.corpus.test.tokens),
        )

    def choice(self, work: Workload, steps: int) -> BudgetChoice:
        return BudgetChoice(
            arms=work.arms, seeds=work.seeds, steps=work.steps(steps), speeds=work.speeds, seconds=work.seconds(steps)
        )

    def announce(self, choice: BudgetChoice, budget: float) -> BudgetChoice:
        arms, count, rates = choice.arms, len(choice.arms.arms), n_rates(self.spec)
        tokens = choice.steps[0] * arms.step_tokens
        tuning = f", {count * rates} tuning runs" if rates > 1 else ""
        self.notice(
            f"budget {format_duration(budget)}: {format_compact(arms.parameters)} parameters, "
            f"{choice.steps[0]:,} steps ({format_compact(tokens)} tokens) per run, time for {choice.seeds} seeds of "
            f"{count} arms{tuning}"
        )
        if tokens < TOKENS_PER_PARAMETER * arms.parameters:
            per_parameter = f"{tokens / arms.parameters:.1f} training tokens per parameter"
            self.notice(f"only {per_parameter} ({TOKENS_PER_PARAMETER} recommended)")
        if (choice.seconds or 0.0) > self.time_left(budget):
            self.notice(f"the runs are expected to take {format_duration(choice.seconds or 0.0)}, more than the budget")
        return choice

    def time_left(self, budget: float) -> float:
        """Seconds for runs."""
        return (1 - RESERVE) * budget - (self.clock() - self.start)


def predict_speeds(speeds: tuple[Speed, ...], measured: SizedArms, other: SizedArms) -> tuple[Speed, ...]:
    """The speeds at another size, in proportion to the declared FLOPs."""
    predicted = []
    for speed, old, new in zip(speeds, measured.arms, other.arms, strict=True):
        ratio = new.flops_per_token / old.flops_per_token
        step = speed.step * ratio * other.step_tokens / measured.step_tokens
        predicted.append(replace(speed.times(ratio), step=step))
    return tuple(predicted)


def _median(speeds: Sequence[Speed]) -> Speed:
    return Speed(
        step=statistics.median(speed.step for speed in speeds),
        token=statistics.median(speed.token for speed in speeds),
        answer=statistics.median(speed.answer for speed in speeds),
    )
