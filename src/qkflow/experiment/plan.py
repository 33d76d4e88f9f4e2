"""From a request to a design: the corpus is looked at, the arms are matched, and a budget becomes steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import cast

from qkflow.data import Corpus, Split, open_corpus, windows
from qkflow.errors import UsageError
from qkflow.experiment.budget import BudgetChoice, choose
from qkflow.experiment.design import DECAY, EVALUATIONS, ArmDesign, Design, configured, folder_names
from qkflow.experiment.executors.base import Executor, Resources
from qkflow.experiment.matching import Shape
from qkflow.experiment.spec import Device, ExperimentSpec
from qkflow.experiment.stats.verdict import look_rate
from qkflow.experiment.timing import evaluated, tuning_steps
from qkflow.experiment.worker import measure_speed
from qkflow.training import TrainConfig
from qkflow.training.budget import Speed
from qkflow.training.losses import open_objective
from qkflow.training.reproducibility import pick_device

_FEWEST_SEEDS = 2
_LARGE = 10_000_000
"""Parameters from which on a checkpoint is too large to be written every minute."""


def plan(
    request: ExperimentSpec, engine: Executor, *, notice: Callable[[str], None], command: Sequence[str] = ()
) -> Design:
    """The design of a new study that does not extend another."""
    corpus = open_corpus(request.corpus)
    refuse_small(corpus)
    refuse_context(request, corpus)
    device = cast(Device, pick_device("auto").type) if request.device == "auto" else request.device
    jobs, threads = shared_out(request, engine.cores(), on_cpu=device == "cpu")

    def measure(shape: Shape, seconds: float) -> tuple[Speed, ...]:
        base = base_config(request, corpus, shape, EVALUATIONS, threads, device)
        open_objective(base)
        return measured(engine, base, shape, seconds, jobs, notice)

    choice = choose(request, corpus, jobs=jobs, measure=measure, notice=notice)
    base = base_config(request, corpus, choice.shape, choice.steps[0], threads, device)
    open_objective(base)
    return Design(
        request=request,
        command=tuple(command),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        corpus=corpus.name,
        digest=corpus.digest,
        size=choice.shape.size,
        arms=_arms(request, choice),
        seeds=choice.seeds,
        base=base,
        jobs=jobs,
        look=1,
        error_rate=look_rate(request.error_rate, 1),
        extends=None,
        expected_seconds=choice.seconds,
        unit=corpus.unit,
    )


def refuse_small(corpus: Corpus) -> None:
    """Refuse a corpus on which nothing could be compared."""
    if (documents := len(corpus.validation.documents)) < 2:
        more = "give more text, or shorter passages" if corpus.task is None else "ask the task for more (validation=N)"
        raise UsageError(f"{corpus.name} has {documents} held-out documents, and a comparison needs at least 2: {more}")


def refuse_context(request: ExperimentSpec, corpus: Corpus) -> None:
    """Refuse windows of another length than a task's instances."""
    if corpus.context is not None and request.context not in (None, corpus.context):
        raise UsageError(
            f"the instances of {corpus.name} are {corpus.context} tokens long, got a context of {request.context}: "
            f"leave it out, or give the task length={request.context}"
        )


def shared_out(request: ExperimentSpec, cores: Sequence[int], *, on_cpu: bool) -> tuple[int, int]:
    """Runs at a time, and threads of each, on machines with so many cores.

    One thread a run is the best use of cores as long as there are runs enough; more threads in all than cores would
    slow all of them down many times.
    """
    runs = len(request.arms) * (request.seeds or _FEWEST_SEEDS)
    if not on_cpu:
        return request.jobs or 1, request.threads or max(cores)
    at_once = runs if request.jobs is None else request.jobs
    threads = request.threads or min(max(cores), max(1, sum(cores) // at_once))
    room = sum(machine // threads for machine in cores)
    return request.jobs or max(1, min(runs, room)), threads


def base_config(
    request: ExperimentSpec, corpus: Corpus, shape: Shape, steps: int, threads: int, device: Device
) -> TrainConfig:
    """The config of the baseline's first run, from which all others differ in a few fields."""
    during, final = evaluated(steps * shape.step_tokens, corpus.validation)
    return configured(
        TrainConfig(
            data=request.corpus,
            model=shape.arms[0].model,
            steps=steps,
            context=shape.context,
            batch=shape.batch,
            schedule="stable",
            decay=DECAY,
            evaluate_tokens=during,
            final_tokens=_of_two_documents(corpus.validation, final),
            log_every=max(1, min(10, steps // 100)),
            checkpoint_every=None,
            checkpoint_minutes=1.0 if shape.parameters < _LARGE else 10.0,
            device=device,
            threads=threads,
        ),
        shape.arms[0].name,
        shape.arms[0].model,
        steps,
        0,
        request.learning_rates[0],
    )


def _of_two_documents(held_out: Split, limit: int | None) -> int | None:
    """The limit, raised until two whole documents fit under it, however unequal they are."""
    while limit is not None:
        if len({window.document for window in windows(held_out, context=2**20, limit=limit)}) > 1:
            return limit
        limit = 2 * limit if 2 * limit < len(held_out.tokens) else None
    return None


def measured(
    engine: Executor, base: TrainConfig, shape: Shape, seconds: float, jobs: int, notice: Callable[[str], None]
) -> tuple[Speed, ...]:
    """The speed of each arm with `jobs` copies of it at once; one that cannot be run gets a guess from its FLOPs."""
    found: list[Speed | None] = []
    why = ""
    need = Resources(threads=base.threads or 1, gpus=int(base.device == "cuda"))
    for arm in shape.arms:
        config = configured(base, arm.name, arm.model, base.steps, 0, base.lr)
        calls = [
            done for done in engine.work(measure_speed, [(config, seconds)] * jobs, at_once=jobs, need=need) if done
        ]
        speeds = [done.value for done in calls if done.crash is None]
        if len(speeds) < len(calls):
            why = next(done.crash for done in calls if done.crash is not None)
            notice(f"the speed of {arm.name} could not be measured: {why}")
        found.append(_middle(speeds) if speeds else None)
    known = [(speed, arm) for speed, arm in zip(found, shape.arms, strict=True) if speed is not None]
    if not known:
        raise UsageError(f"no arm could be run: {why}")
    guess, like = known[0]

    return tuple(
        speed or guess.times(arm.flops_per_token / like.flops_per_token)
        for speed, arm in zip(found, shape.arms, strict=True)
    )


def _middle(speeds: Sequence[Speed]) -> Speed:
    return Speed(
        step=statistics.median(speed.step for speed in speeds),
        token=statistics.median(speed.token for speed in speeds),
        answer=statistics.median(speed.answer for speed in speeds),
    )


def _arms(request: ExperimentSpec, choice: BudgetChoice) -> tuple[ArmDesign, ...]:
    tuned = len(request.learning_rates) > 1
    names = folder_names(request.arms)
    return tuple(
        ArmDesign(
            name=arm.name,
            folder=folder,
            model=arm.model,
            parameters=arm.parameters,
            flops_per_token=arm.flops_per_token,
            state_bytes=arm.state_bytes,
            steps=steps,
            tuning_steps=tuning_steps(steps) if tuned else 0,
            seconds_per_step=None if choice.speeds is None else choice.speeds[number].step,
        )
        for number, (arm, folder, steps) in enumerate(zip(choice.shape.arms, names, choice.steps, strict=True))
    )
