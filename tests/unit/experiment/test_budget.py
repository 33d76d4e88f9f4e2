"""Time budgets become a size, seeds and steps."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data import Corpus, CorpusConfig, Split, open_corpus, windows
from qkflow.errors import UsageError
from qkflow.experiment import budget as module
from qkflow.experiment import planner
from qkflow.experiment.budget import (
    PREFERENCES,
    BudgetChoice,
    SizedArms,
    Workload,
    choose_budget,
    evaluation_tokens,
    makespan,
    match_arms,
    predict_speeds,
    size_options,
    tuning_steps,
)
from qkflow.experiment.spec import ExperimentSpec
from qkflow.formatting import format_duration
from qkflow.training.budget import Speed

Ask = Callable[..., ExperimentSpec]
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Machine:
    """Time on it passes only while it is measured; a training FLOP takes `per_flop` seconds, on every arm."""

    def __init__(self, per_flop: float = 1e-11, slower: float = 1.0, measuring: float = 1.0) -> None:
        self.per_flop, self.slower, self.measuring = per_flop, slower, measuring
        self.now = 0.0
        self.measured: list[str] = []
        self.notices: list[str] = []

    def measure(self, matched: SizedArms, seconds: float) -> tuple[Speed, ...]:
        self.measured.append(matched.size)
        self.now += self.measuring
        costs = [3 * arm.flops_per_token * self.per_flop for arm in matched.arms]
        costs[1:] = [cost * self.slower for cost in costs[1:]]
        return tuple(Speed(step=cost * matched.step_tokens, token=cost / 3, answer=cost) for cost in costs)

    def choose_budget(self, spec: ExperimentSpec, corpus: Corpus, jobs: int = 2) -> BudgetChoice:
        return choose_budget(
            spec,
            corpus,
            jobs=jobs,
            measure=self.measure,
            notice=self.notices.append,
            clock=lambda: self.now,
        )


@pytest.fixture(autouse=True)
def _shapes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matching the large sizes takes a while, and gives the same every time."""
    monkeypatch.setattr(module, "match_arms", remembered)


@functools.cache
def remembered(spec: ExperimentSpec, name: str, vocabulary: int, instance: int | None) -> SizedArms:
    if plain(spec) != spec:
        return remembered(plain(spec), name, vocabulary, instance)
    return match_arms(spec, name, vocabulary, instance)


def plain(spec: ExperimentSpec) -> ExperimentSpec:
    """The request without what its shape does not depend on."""
    return ExperimentSpec(data=CorpusConfig(), arms=spec.arms, model=spec.model, context=spec.context, batch=spec.batch)


@pytest.fixture
def corpus(ask: Ask) -> Corpus:
    return open_corpus(ask().data)


@pytest.fixture
def open_ask(ask: Ask) -> Ask:
    """A request that leaves everything to the budget, for a text without an end."""

    def make(**changes: Any) -> ExperimentSpec:
        free = {"model": None, "tokens": None, "seeds": None, "context": None, "batch": None, "passes": 1e9}
        return ask(**{**free, **changes})

    return make


@pytest.mark.parametrize("budget", [20.0, 120.0, 600.0, 7200.0, 86400.0])
@pytest.mark.parametrize("match", ["tokens", "flops", "seconds"])
def test_the_runs_fit_into_the_budget_and_fill_it(open_ask: Ask, corpus: Corpus, budget: float, match: str) -> None:
    machine = Machine(slower=1.7)
    choice = machine.choose_budget(open_ask(budget=budget, match=match), corpus)
    left = 0.95 * budget - machine.now
    assert choice.seconds is not None
    assert 0.8 * left <= choice.seconds <= left
    assert (choice.arms.size, choice.seeds) in PREFERENCES
    assert all(steps % 20 == 0 for steps in choice.steps)


def test_more_time_buys_more(open_ask: Ask, corpus: Corpus) -> None:
    budgets = (3.0, 60.0, 300.0, 1800.0, 10_000.0, 1e6)
    choices = [Machine().choose_budget(open_ask(budget=budget), corpus) for budget in budgets]
    ranks = [PREFERENCES.index((choice.arms.size, choice.seeds)) for choice in choices]
    assert ranks == sorted(ranks, reverse=True)
    assert ranks[0] == len(PREFERENCES) - 1
    assert ranks[-1] == 0


def test_every_run_has_enough_steps_and_tokens_unless_the_size_is_the_smallest(open_ask: Ask, corpus: Corpus) -> None:
    """Below ten minutes, 800 steps are enough."""
    for budget in (60.0, 600.0, 3600.0):
        choice = Machine(slower=3.0).choose_budget(open_ask(budget=budget, match="seconds"), corpus)
        shortest = min(choice.steps) * choice.arms.step_tokens
        if (choice.arms.size, choice.seeds) != PREFERENCES[-1]:
            assert min(choice.steps) >= (1500 if budget >= 600 else 800)
            assert shortest >= 10 * choice.arms.parameters or budget < 600
    poor = Machine()
    assert poor.choose_budget(open_ask(budget=3.0), corpus).arms.size == "100k"
    assert any("training tokens per parameter" in note for note in poor.notices)


def test_the_chosen_size_was_measured(open_ask: Ask, corpus: Corpus) -> None:
    machine = Machine()
    choice = machine.choose_budget(open_ask(budget=1e6), corpus)
    assert choice.arms.size == "5m"
    assert machine.measured == ["100k", "5m"]
    assert choice.speeds == Machine().measure(choice.arms, 1.0)


def test_a_size_that_is_slower_than_predicted_is_rejected(open_ask: Ask, corpus: Corpus) -> None:
    class Slow(Machine):
        def measure(self, matched: SizedArms, seconds: float) -> tuple[Speed, ...]:
            found = super().measure(matched, seconds)
            return found if matched.size == "100k" else tuple(Speed(step=1e6, token=1e6) for _ in found)

    machine = Slow()
    assert machine.choose_budget(open_ask(budget=1e6), corpus).arms.size == "100k"
    assert machine.measured == ["100k", "5m", "1m", "500k"]


def test_the_choice_is_announced_on_one_line(open_ask: Ask, corpus: Corpus) -> None:
    machine = Machine()
    choice = machine.choose_budget(open_ask(budget=180.0, learning_rates=(1e-3, 3e-3)), corpus, jobs=3)
    line = next(note for note in machine.notices if note.startswith("budget"))
    assert re.fullmatch(
        rf"budget 3m: \d+k parameters, [\d,]+ steps \([\d.]+[kM] tokens\) per run, time for {choice.seeds} seeds of "
        "2 arms, 4 tuning runs",
        line,
    )


@pytest.mark.parametrize("fixed", [{"size": "1m"}, {"seeds": 7}, {"size": "500k", "seeds": 1}, {"tokens": 10**6}])
@pytest.mark.parametrize("budget", [1.0, 100.0, 1e6])
def test_fixed_options_do_not_depend_on_the_budget(
    open_ask: Ask, corpus: Corpus, fixed: dict[str, Any], budget: float
) -> None:
    choice = Machine().choose_budget(open_ask(budget=budget, **fixed), corpus)
    assert choice.arms.size == fixed.get("size", choice.arms.size)
    assert choice.seeds == fixed.get("seeds", choice.seeds)
    if "tokens" in fixed:
        assert abs(choice.steps[0] * choice.arms.step_tokens / 10**6 - 1) < 0.1


def test_exceeding_the_budget_is_announced(open_ask: Ask, corpus: Corpus) -> None:
    machine = Machine()
    machine.choose_budget(open_ask(budget=10.0, size="5m", seeds=10, tokens=10**8), corpus)
    assert any("more than the budget" in note for note in machine.notices)


def test_tokens_without_a_budget_need_no_measurement(open_ask: Ask, corpus: Corpus) -> None:
    machine = Machine()
    sizes = [machine.choose_budget(open_ask(tokens=tokens), corpus).arms.size for tokens in (10**5, 6 * 10**6, 10**8)]
    assert sizes == ["100k", "500k", "5m"]
    assert machine.choose_budget(open_ask(tokens=10**6), corpus).seeds == 5
    assert not machine.measured
    timed = machine.choose_budget(open_ask(tokens=10**6, match="seconds"), corpus)
    assert machine.measured == ["100k"]
    assert timed.speeds is not None


def test_matching_seconds_gives_steps_in_proportion(open_ask: Ask, corpus: Corpus) -> None:
    choice = Machine(slower=2.0).choose_budget(open_ask(budget=3600.0, match="seconds"), corpus)
    assert choice.speeds is not None
    spent = [steps * speed.step for steps, speed in zip(choice.steps, choice.speeds, strict=True)]
    assert abs(spent[1] / spent[0] - 1) < 0.02


def test_time_that_a_small_corpus_cannot_use_goes_to_more_seeds(open_ask: Ask, corpus: Corpus) -> None:
    machine = Machine(per_flop=1e-9)
    choice = machine.choose_budget(open_ask(budget=3600.0, size="100k", context=16, batch=4, passes=4.0), corpus)
    assert 2 * len(corpus.train.tokens) < max(choice.steps) * choice.arms.step_tokens <= 4 * len(corpus.train.tokens)
    assert choice.seeds > 8
    assert choice.seeds == 50 or 0.8 * 3600 < (choice.seconds or 0.0) <= 3600
    assert any("more seeds" in note for note in machine.notices)


def test_a_small_corpus_and_a_limit_of_seeds_end_the_study_earlier(open_ask: Ask, corpus: Corpus) -> None:
    machine = Machine(per_flop=1e-9)
    spec = open_ask(budget=3600.0, size="100k", seeds=2, context=16, batch=4, passes=4.0)
    choice = machine.choose_budget(spec, corpus)
    assert choice.seeds == 2
    assert (choice.seconds or 0.0) < 1800
    assert any("end earlier" in note for note in machine.notices)


def test_no_arm_exceeds_the_passes_if_arms_differ_in_tokens(open_ask: Ask, corpus: Corpus) -> None:
    machine = Machine(slower=0.25)
    choice = machine.choose_budget(open_ask(context=16, batch=4, passes=4.0, match="seconds"), corpus)
    assert choice.steps[1] > 3 * choice.steps[0]
    assert max(choice.steps) * choice.arms.step_tokens <= 4 * len(corpus.train.tokens)


def test_too_many_tokens_for_the_corpus_are_refused(open_ask: Ask, corpus: Corpus) -> None:
    """Also where it is not the baseline that would read the most."""
    small = {"size": "100k", "context": 16, "batch": 4, "passes": 4.0}
    for part, match, fits in ((1.05, "tokens", False), (0.97, "tokens", True), (0.97, "seconds", False)):
        spec = open_ask(tokens=round(part * 4 * len(corpus.train.tokens)), match=match, **small)
        if fits:
            Machine(slower=0.5).choose_budget(spec, corpus)
            continue
        with pytest.raises(UsageError, match=r"fewer --train-tokens, or --passes [\d.]+"):
            Machine(slower=0.5).choose_budget(spec, corpus)


def test_a_corpus_too_small_for_the_shortest_run_is_refused(open_ask: Ask, corpus: Corpus) -> None:
    with pytest.raises(UsageError, match=r"the shortest runs need [\d,]+ for 4 passes: use more text"):
        Machine().choose_budget(open_ask(passes=4.0, batch=64), corpus)


def test_a_corpus_without_two_held_out_documents_is_refused(
    ask: Ask, inline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = open_corpus(ask().data)
    one = replace(corpus.validation, documents=corpus.validation.documents[:1], sizes=corpus.validation.sizes[:1])
    monkeypatch.setattr(planner, "open_corpus", lambda config: replace(corpus, validation=one))
    with pytest.raises(UsageError, match="has 1 held-out documents, at least 2 are needed"):
        planner.make_design(ask(), inline(), notice=lambda text: None)


def test_a_corpus_without_enough_windows_for_a_batch_is_refused_before_any_run(ask: Ask, inline: Any) -> None:
    executor = inline()
    for changes in ({"tokens": 20 * 64 * 64}, {"tokens": None, "budget": 60.0}):
        with pytest.raises(UsageError, match=r"2000 is too large for the corpus"):
            planner.make_design(ask(batch=2000, passes=1e9, **changes), executor, notice=lambda text: None)
    assert not executor.calls


def test_speeds_are_predicted_from_flops(ask: Ask) -> None:
    small, large = (match_arms(ask(model=None, context=None, batch=None), name, 257) for name in ("100k", "1m"))
    guess = predict_speeds(Machine().measure(small, 1.0), small, large)
    truth = Machine().measure(large, 1.0)
    assert [speed.step for speed in guess] == pytest.approx([speed.step for speed in truth])
    assert [speed.token for speed in guess] == pytest.approx([speed.token for speed in truth])


@given(durations=st.lists(st.floats(0.1, 10), min_size=1, max_size=6), slots=st.integers(1, 4))
@settings(deadline=None, max_examples=25)
def test_makespan_is_within_the_bound_of_list_scheduling(durations: list[float], slots: int) -> None:
    found = makespan(durations, slots)
    best = min(
        max(sum(d for d, s in zip(durations, places, strict=True) if s == slot) for slot in range(slots))
        for places in itertools.product(range(slots), repeat=len(durations))
    )
    assert best - 1e-9 <= found <= best * (2 - 1 / slots) + 1e-9


def held_out(tokens: int, documents: int = 100) -> Split:
    ends = np.linspace(0, tokens, documents + 1, dtype=np.int64)
    spans = np.stack([ends[:-1], ends[1:]], axis=1)
    return Split(tokens=np.zeros(tokens, np.uint16), documents=spans, sizes=np.diff(spans).ravel())


@given(tokens=st.integers(1, 10**9), context=st.sampled_from([16, 256]), available=st.integers(100, 10**6))
@settings(deadline=None, max_examples=25)
def test_evaluations_cost_a_small_fraction_of_a_run(tokens: int, context: int, available: int) -> None:
    during, final = evaluation_tokens(tokens, context, available)
    assert 20 * during / 3 <= max(0.051 * tokens, 20 * 8192 / 3)
    assert final / 3 <= max(0.101 * tokens, 400 * context / 3)
    assert 1 <= during <= available
    assert min(400 * context, available) <= final <= available


def test_the_last_evaluation_covers_two_documents_of_any_length(
    ask: Ask, inline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = open_corpus(ask().data)
    unequal = held_out(10**6)
    spans = np.stack([np.arange(100) * 10, np.arange(100) * 10 + 9], axis=1)
    spans[1:] += 10**6 - 2000  # one of nearly all tokens, and the rest tiny
    spans[0] = (1, 10**6 - 2000)
    several = np.array([[1, 400_000], [400_001, 900_000], [900_001, 1_000_000]])
    for documents in (spans, several):
        split = replace(unequal, documents=documents, sizes=np.diff(documents).ravel())
        monkeypatch.setattr(planner, "open_corpus", lambda config, split=split: replace(corpus, test=split))
        limit = planner.make_design(ask(), inline(), notice=lambda text: None).base.final_tokens
        assert len({window.document for window in windows(split, context=16, limit=limit)}) > 1


def test_tuning_counts_towards_the_time(ask: Ask) -> None:
    matched = match_arms(ask(model=None, context=None, batch=None), "100k", 257)
    speeds = Machine().measure(matched, 1.0)
    plain, tuned = (
        Workload(
            arms=matched,
            seeds=2,
            speeds=speeds,
            match="tokens",
            rates=chosen_rates,
            jobs=2,
            held_out=held_out(10**5),
        )
        for chosen_rates in (1, 4)
    )
    assert 1.4 * plain.seconds(4000) < tuned.seconds(4000) < 1.8 * plain.seconds(4000)
    assert tuning_steps(4000) == 1000


def test_answering_recall_questions_counts_towards_the_time(ask: Ask) -> None:
    matched = match_arms(ask(model=None, context=None, batch=None), "100k", 257)
    speeds = Machine().measure(matched, 1.0)
    plain, asked = (
        Workload(
            arms=matched,
            seeds=2,
            speeds=speeds,
            match="tokens",
            rates=1,
            jobs=1,
            held_out=held_out(10**5),
            graded=graded,
        )
        for graded in (0, 10**6)
    )
    answering = 2 * 10**6 * sum(speed.answer for speed in speeds)  # at the speed of test instances, which may be long
    assert asked.seconds(400) - plain.seconds(400) == pytest.approx(answering)


def test_a_recall_task_with_one_held_out_instance_is_refused_with_advice() -> None:
    task = CorpusConfig(source="mqar:pairs=2,length=16,keys=4,values=4,train=8,validation=1,each=2")
    with pytest.raises(UsageError, match=r"at least 2 are needed: set validation=N"):
        planner._refuse_small_corpus(open_corpus(task))


def test_a_recall_task_too_small_for_the_budget_is_refused_with_advice(ask: Ask) -> None:
    task = CorpusConfig(source="mqar:pairs=2,length=16,keys=4,values=4,train=64,validation=8,each=2")
    asked = ask(data=task, model=None, size="100k", context=None, batch=None, tokens=None, budget=600.0)
    with pytest.raises(UsageError, match=r"more instances \(train=N\)"):
        Machine().choose_budget(asked, open_corpus(task))


def test_size_options_respect_fixed_fields(ask: Ask, open_ask: Ask) -> None:
    assert size_options(open_ask()) == PREFERENCES
    assert size_options(open_ask(seeds=4)) == (("5m", 4), ("1m", 4), ("500k", 4), ("100k", 4))
    assert size_options(ask(seeds=None)) == (("own", 8), ("own", 5), ("own", 4), ("own", 3))
    assert format_duration(3.3 * 60) == "3.3m"
