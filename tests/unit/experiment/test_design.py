"""Designs: matched arms, shared seeds, and the file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from qkflow.data import CorpusConfig, open_corpus, windows
from qkflow.errors import UsageError
from qkflow.experiment import planner
from qkflow.experiment.budget import evaluation_tokens, match_arms, round_steps, steps_per_arm
from qkflow.experiment.design import TUNING_SEED, Design
from qkflow.experiment.planned_runs import round_runs, tuning_runs
from qkflow.experiment.planner import RECALL_RATE, allocate_cores, folder_names, make_design
from qkflow.experiment.spec import ExperimentSpec
from qkflow.experiment.study_dir import read_design, write_design
from qkflow.mechanisms import StandardAttention, StandardConfig, register
from qkflow.models import Decoder, DecoderConfig, parameters
from qkflow.training.budget import Speed
from qkflow.training.optim import lr_multiplier
from qkflow.training.regime import default_regime

Ask = Callable[..., ExperimentSpec]
ARMS = ("standard", "differential", "standard:key_heads=1", "standard:window=16")
CONTROLS = ("nonlinear-query", "standard:key_shift=True", "differential:conv=4", "coupled:conv=4,qk_norm=before")


def designed(spec: ExperimentSpec, executor: Any) -> Design:
    return make_design(spec, executor, notice=lambda text: None, command=("qkflow", "compare"))


@dataclass(frozen=True, kw_only=True)
class LargerConfig(StandardConfig):
    """Standard attention with parameters that do nothing."""

    more: int = 1000

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> StandardAttention:
        layer_module = super().__call__(width, heads, layer, layers)
        layer_module.idle = nn.Parameter(torch.empty(self.more))
        return layer_module


@pytest.mark.parametrize("size", ["100k", "500k", "1m", "5m"])
def test_arms_have_the_baselines_parameters(ask: Ask, size: str) -> None:
    matched = match_arms(ask(arms=(*ARMS, *CONTROLS), model=None, size=size), size, 257)
    for arm in matched.arms:
        assert arm.parameters == parameters(arm.model)
        assert abs(arm.parameters / matched.parameters - 1) <= 0.005
        assert arm.model.mechanism == arm.name


def test_an_arm_too_large_to_be_matched_is_refused_with_the_reason(ask: Ask) -> None:
    register("larger", LargerConfig)
    with pytest.raises(UsageError, match=r"cannot match the arm 'larger:more=100000': .* larger size"):
        match_arms(ask(arms=("standard", "larger:more=100000")), "own", 257)


def test_an_arm_beyond_the_tolerance_is_refused_with_the_difference(ask: Ask) -> None:
    register("larger", LargerConfig)
    coarse = DecoderConfig(width=8, layers=4, heads=2, hidden=8)  # a unit of hidden width is 3 % of all parameters
    with pytest.raises(UsageError, match=r"cannot match the arm 'larger:more=12': .*-1\.2%.* 0\.5%"):
        match_arms(ask(arms=("standard", "larger:more=12"), model=coarse), "own", 257)


def test_two_spellings_of_one_mechanism_are_duplicates(ask: Ask) -> None:
    with pytest.raises(UsageError, match="'standard' and 'standard:window=None' are the same"):
        match_arms(ask(arms=("standard", "standard:window=None")), "own", 257)


def test_an_unknown_arm_suggests_the_nearest_name(ask: Ask) -> None:
    with pytest.raises(UsageError, match="unknown mechanism 'diferential': did you mean 'differential'"):
        match_arms(ask(arms=("standard", "diferential")), "own", 257)


def test_declared_flops_equal_those_counted_by_torch(ask: Ask) -> None:
    """On the maths path, whose squares are full: causal attention declares half of them."""
    matched = match_arms(ask(arms=ARMS, model=None, size="100k", context=None), "100k", 257)
    t = matched.context
    for arm in matched.arms:
        model = Decoder(arm.model)
        cost = model.cost(t)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, t, dtype=torch.int64))
        assert counter.get_total_flops() == cost.linear_flops + cost.pair_flops * t * t
        assert arm.flops_per_token == round((cost.linear_flops + cost.pair_flops * cost.pairs) / t)
        if "window" not in arm.name:
            assert abs(cost.pairs - t * t / 2) <= t


def test_equal_flops_give_a_costlier_arm_fewer_steps(ask: Ask) -> None:
    matched = match_arms(ask(arms=("standard", "differential"), model=None, size="100k"), "100k", 257)
    steps = steps_per_arm(matched, 10_000, "flops")
    spent = [n * arm.flops_per_token for n, arm in zip(steps, matched.arms, strict=True)]
    assert abs(spent[1] / spent[0] - 1) < 0.002
    assert steps != steps_per_arm(matched, 10_000, "tokens") == (10_000, 10_000)


@given(steps=st.floats(0, 1e7))
@settings(deadline=None, max_examples=25)
def test_an_evaluation_is_at_the_end_of_the_plateau(steps: float) -> None:
    rounded = round_steps(steps)
    assert rounded >= 20
    assert rounded % 20 == 0
    assert abs(rounded - steps) <= 10 or rounded == 20


def test_the_learning_rate_is_constant_until_an_evaluation(ask: Ask, inline: Any, planned_runs: Any) -> None:
    config = planned_runs(designed(ask(tokens=200 * 64), inline()))[0].config
    assert config is not None
    plateau = round(config.steps * (1 - config.decay))
    assert 0 < plateau < config.steps
    assert plateau % config.evaluate_every == 0
    assert config.steps // config.evaluate_every == 20
    assert [lr_multiplier(config, plateau), lr_multiplier(config, plateau + 1) < 1] == [1.0, True]


def test_run_i_of_every_arm_has_seed_i_and_data_seed_i(ask: Ask, inline: Any, planned_runs: Any) -> None:
    design = designed(ask(seeds=3), inline())
    planned = planned_runs(design)
    assert {(job.arm, job.seed) for job in planned} == {(arm, seed) for arm in design.spec.arms for seed in range(3)}
    for job in planned:
        assert job.config is not None
        assert (job.config.seed, job.config.data_seed) == (job.seed, job.seed)
        assert job.config.model == design.arm(job.arm).model
        assert job.folder == Path("runs", design.arm(job.arm).folder, f"seed-{job.seed}")
    assert len({job.folder for job in planned}) == 6
    assert [job.seed for job in planned] == [0, 0, 1, 1, 2, 2]  # pairs come early: half a study can be read


def test_runs_differ_only_in_arm_seed_and_rate(ask: Ask, inline: Any, planned_runs: Any) -> None:
    design = designed(ask(), inline())
    for job in planned_runs(design):
        assert job.config is not None
        assert (job.config.lr,) == design.arm(job.arm).rates
        same = replace(job.config, model=design.base.model, seed=0, data_seed=0, lr=design.base.lr)
        assert same == design.base


def test_tuning_runs_have_their_own_seed_and_equal_length(ask: Ask, inline: Any, planned_runs: Any) -> None:
    design = designed(ask(learning_rates=(1e-3, 3e-3, 1e-2), tokens=400 * 64), inline())
    planned = planned_runs(design)
    tuning = [job for job in planned if job.kind == "tuning"]
    assert {(job.arm, job.config.lr) for job in tuning if job.config} == {
        (arm, rate) for arm in design.spec.arms for rate in (1e-3, 3e-3, 1e-2)
    }
    assert {(job.seed, job.steps) for job in tuning} == {(TUNING_SEED, 100)}
    assert all(job.config and job.config.data_seed == TUNING_SEED for job in tuning)
    assert all(job.config is None for job in planned if job.kind == "main")
    chosen = planned_runs(design, {"standard": 1e-2})
    assert {(job.arm, job.config and job.config.lr) for job in chosen if job.kind == "main"} == {
        ("standard", 1e-2),
        ("differential", None),
    }


def test_a_design_survives_json(ask: Ask, inline: Any, tmp_path: Path) -> None:
    design = designed(ask(arms=ARMS[:3], learning_rates=(1e-3, 3e-3)), inline())
    write_design(tmp_path, design)
    assert read_design(tmp_path) == design
    record = json.loads((tmp_path / "design.json").read_text())
    assert record["digest"] == design.digest
    assert record["command"] == ["qkflow", "compare"]
    assert (record["rule"]["error_rate"], record["rule"]["seeds_by_round"]) == (0.05, [2])
    del record["unit"]  # as designs were before there were tasks
    (tmp_path / "design.json").write_text(json.dumps(record))
    assert read_design(tmp_path) == design


def test_the_context_of_a_recall_task_is_its_instance_length(ask: Ask, inline: Any) -> None:
    task = CorpusConfig(source="mqar:pairs=2,length=16,keys=4,values=4,train=200,validation=8,each=2")
    asked = ask(data=task, model=None, size="100k", context=None, batch=None, tokens=20 * 128 * 16, passes=99.0)
    design = designed(asked, inline())
    assert (design.unit, design.base.context, design.base.batch) == ("answer token", 16, 128)
    assert design.arms[0].model.vocabulary >= 10
    assert designed(replace(asked, context=16, batch=4), inline()).base.batch == 4
    with pytest.raises(UsageError, match="have 16 tokens, got a context length of 32"):
        designed(replace(asked, context=32), inline())


def test_a_folder_without_a_design_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a study"):
        read_design(tmp_path)
    (tmp_path / "design.json").write_text('{"format": 99}')
    with pytest.raises(UsageError, match="has format 99, expected 3"):
        read_design(tmp_path)


@given(names=st.lists(st.text(max_size=120), max_size=8))
@settings(deadline=None, max_examples=25)
def test_folder_names_are_distinct(names: list[str]) -> None:
    folders = folder_names(names)
    assert len(folders) == len(names)
    assert len({name.casefold() for name in folders}) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9=+,_-][A-Za-z0-9=+,._-]{0,99}", name) for name in folders)


@given(
    cores=st.lists(st.integers(1, 64), min_size=1, max_size=4),
    seeds=st.none() | st.integers(1, 40),
    jobs=st.none() | st.integers(1, 8),
    threads=st.none() | st.integers(1, 8),
)
@settings(deadline=None, max_examples=50)
def test_runs_never_use_more_threads_than_cores(
    cores: list[int], seeds: int | None, jobs: int | None, threads: int | None, request: pytest.FixtureRequest
) -> None:
    ask = request.getfixturevalue("ask")
    workers, each = allocate_cores(ask(seeds=seeds, jobs=jobs, threads=threads), cores, on_cpu=True)
    assert (workers, each) == (jobs or workers, threads or each)
    assert workers >= 1
    assert 1 <= each <= max(*cores, threads or 1)
    if jobs is None and each <= max(cores):
        assert workers <= sum(machine // each for machine in cores)
    if jobs is None and threads is None and seeds is not None and 2 * seeds >= sum(cores):
        assert (workers, each) == (sum(cores), 1)


def budgeted(ask: Ask, inline: Any, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Design:
    """A design for a time budget, on a machine of known speed."""
    speed = Speed(step=0.01, token=1e-6)
    monkeypatch.setattr(planner, "measure_speeds", lambda *args: (speed,) * len(args[2].arms))
    return designed(ask(**{"tokens": None, "passes": 1e9, "seeds": None, **changes}), inline())


@pytest.mark.parametrize(("budget", "trials"), [(300.0, 1), (1799.0, 1), (1800.0, 3), (7200.0, 3)])
def test_every_arm_tunes_three_rates_from_30_minutes_on(
    ask: Ask, inline: Any, monkeypatch: pytest.MonkeyPatch, budget: float, trials: int
) -> None:
    design = budgeted(ask, inline, monkeypatch, budget=budget, arms=ARMS)
    assert [len(arm.rates) for arm in design.arms] == [trials] * len(ARMS)
    tuning = tuning_runs(design)
    assert design.tuned == (trials > 1)
    assert len(tuning) == (len(ARMS) * trials if trials > 1 else 0)
    for arm in design.arms:
        default = default_regime(
            parameters=arm.parameters, batch=4, context=16, mechanism=arm.model.mechanism, optimizer="muon"
        )
        factors = (1.0,) if trials == 1 else (0.5, 1.0, 2.0)
        assert arm.rates == pytest.approx([factor * default.lr for factor in factors], rel=0.01)
        assert {run.steps for run in tuning if run.arm == arm.name} <= {arm.tuning_steps}
        assert arm.tuning_steps == (0 if trials == 1 else round_steps(arm.steps / 4))
    assert design.expected_seconds is not None
    assert 0.85 * budget <= design.expected_seconds <= budget
    assert design.budget == budget


def test_given_rates_are_neither_changed_nor_tuned_by_a_long_budget(
    ask: Ask, inline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    design = budgeted(ask, inline, monkeypatch, budget=7200.0, learning_rates=(2e-3,))
    assert [arm.rates for arm in design.arms] == [(2e-3,), (2e-3,)]
    assert not tuning_runs(design)


def test_tuning_reads_validation_documents_and_verdicts_test_documents(
    ask: Ask, inline: Any, planned_runs: Any
) -> None:
    design = designed(ask(learning_rates=(1e-3, 3e-3)), inline())
    splits = {
        (run.kind, run.config.final_split) for run in planned_runs(design, {"standard": 1e-3, "differential": 1e-3})
    }
    assert splits == {("tuning", "validation"), ("main", "test")}


def test_tuning_on_a_recall_task_has_its_own_instances(ask: Ask, inline: Any) -> None:
    task = CorpusConfig(source="mqar:pairs=2,length=16,keys=4,values=4,train=200,validation=8,each=2")
    spec = ask(
        data=task, model=None, size="100k", context=None, tokens=20 * 64, passes=99.0, learning_rates=(1e-3, 3e-3)
    )
    design = designed(spec, inline())
    main = round_runs(design, design.round(1, spec.arms, 0), {"standard": 1e-3, "differential": 1e-3})
    own, verdicts = ({run.config.data.source for run in runs} for runs in (tuning_runs(design), main))
    assert len(own) == len(verdicts) == 1
    assert own.isdisjoint(verdicts)
    tuned, judged = (open_corpus(CorpusConfig(source=source)) for (source,) in (own, verdicts))
    assert tuned.vocabulary == judged.vocabulary
    assert not np.array_equal(tuned.validation.tokens, judged.validation.tokens)


def test_tokens_without_a_budget_have_no_time_limit(ask: Ask, inline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for match in ("tokens", "seconds"):
        assert budgeted(ask, inline, monkeypatch, tokens=20 * 64, match=match).budget is None
    assert budgeted(ask, inline, monkeypatch, passes=1e9).budget == 600.0


def test_muon_is_the_default_for_text_and_adamw_for_recall_tasks(ask: Ask, inline: Any) -> None:
    assert designed(ask(), inline()).base.optimizer == "muon"
    assert designed(ask(optimizer="adamw"), inline()).base.optimizer == "adamw"
    task = CorpusConfig(source="mqar:pairs=2,length=16,keys=4,values=4,train=200,validation=8,each=2")
    recall = designed(ask(data=task, model=None, size="100k", context=None, passes=99.0), inline())
    assert recall.base.optimizer == "adamw"
    assert {arm.rates for arm in recall.arms} == {(RECALL_RATE,)}


def test_a_verdict_on_the_default_corpus_rests_on_100_documents() -> None:
    corpus = open_corpus(CorpusConfig())
    _, limit = evaluation_tokens(800 * 4 * 128, 128, len(corpus.test.tokens))
    assert len({window.document for window in windows(corpus.test, context=128, limit=limit)}) >= 100
