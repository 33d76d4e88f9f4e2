"""Arms with learning-rate ratios."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qkflow.circuits import RatioSchedule
from qkflow.errors import UsageError
from qkflow.experiment.budget import match_arms, refuse_duplicate_arms
from qkflow.experiment.design import Design
from qkflow.experiment.planner import make_design
from qkflow.experiment.spec import ExperimentSpec, parse_arm
from qkflow.experiment.study_dir import read_design, write_design

Ask = Callable[..., ExperimentSpec]


@pytest.mark.parametrize(
    ("name", "spec", "ratio"),
    [
        ("standard", "standard", RatioSchedule()),
        ("standard:r=20", "standard", RatioSchedule(start=20.0)),
        ("standard:window=8,r=.5", "standard:window=8", RatioSchedule(start=0.5)),
        ("standard:r=20,window=8", "standard:window=8", RatioSchedule(start=20.0)),
        ("qdelta+affine: growth = 40", "qdelta+affine", RatioSchedule(end=40.0)),
        ("standard:growth=1e1,r=10", "standard", RatioSchedule(start=10.0)),
    ],
)
def test_an_arm_is_a_mechanism_and_a_ratio(name: str, spec: str, ratio: RatioSchedule) -> None:
    assert parse_arm(name) == (spec, ratio, 1.0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("standard:r=0", "the arm 'standard:r=0': r must be a finite number above 0, got '0'"),
        ("standard:r=-3", "r must be a finite number above 0, got '-3'"),
        ("standard:r=x", "the arm 'standard:r=x': r must be a finite number above 0, got 'x'"),
        ("standard:r", "r must be a finite number above 0, got ''"),
        ("standard:growth=inf", "growth must be a finite number above 0, got 'inf'"),
        ("standard:r=2,r=3", "gives r twice"),
    ],
)
def test_an_invalid_ratio_is_refused_on_one_line(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse_arm(name)
    assert "\n" not in str(caught.value)


def test_arms_with_equal_ratios_are_duplicates() -> None:
    refuse_duplicate_arms(["standard", "standard:r=20", "standard:growth=20", "standard:r=20,growth=40"])
    for twin in ("standard:r=1", "standard:r=1,growth=1"):
        with pytest.raises(UsageError, match=f"'standard' and '{twin}' are the same"):
            refuse_duplicate_arms(["standard", twin])


def test_a_ratio_costs_neither_parameters_nor_flops(ask: Ask) -> None:
    matched = match_arms(ask(arms=("standard:r=2", "standard", "standard:r=5,growth=40")), "own", 257)
    assert len({(arm.model, arm.parameters, arm.flops_per_token, arm.state_bytes) for arm in matched.arms}) == 1
    assert [arm.name for arm in matched.arms] == ["standard:r=2", "standard", "standard:r=5,growth=40"]
    assert matched.arms[0].model.mechanism == "standard"


def designed(spec: ExperimentSpec, executor: Any) -> Design:
    return make_design(spec, executor, notice=lambda text: None, command=("qkflow", "compare"))


def test_every_run_of_an_arm_including_tuning_has_its_ratio(ask: Ask, inline: Any, planned_runs: Any) -> None:
    arms = ("standard", "standard:r=20", "differential:r=5,growth=40")
    design = designed(ask(arms=arms, learning_rates=(1e-3, 3e-3)), inline())
    ratios = {"standard": (1.0, None), "standard:r=20": (20.0, None), "differential:r=5,growth=40": (5.0, 40.0)}
    planned = planned_runs(design, dict.fromkeys(arms, 1e-3))
    assert {job.kind for job in planned} == {"tuning", "main"}
    for job in planned:
        assert job.config is not None
        assert (job.config.qk_ratio, job.config.qk_growth) == ratios[job.arm]
        assert job.config.model.mechanism == job.arm.partition(":")[0]
    assert [arm.folder for arm in design.arms] == ["standard", "standard_r=20", "differential_r=5,growth=40"]


def test_a_design_without_ratios_is_read(ask: Ask, inline: Any, planned_runs: Any, tmp_path: Path) -> None:
    design = designed(ask(), inline())
    write_design(tmp_path, design)
    file = tmp_path / "design.json"
    data = json.loads(file.read_text())
    del data["base"]["qk_ratio"], data["base"]["qk_growth"]
    file.write_text(json.dumps(data))
    assert planned_runs(read_design(tmp_path)) == planned_runs(design)
