"""Runs that another study has finished with the same config are copied; studies that are judged once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qkflow.errors import UsageError
from qkflow.experiment.decisions import Decisions
from qkflow.experiment.runner import run_experiment
from qkflow.experiment.spec import ExperimentSpec
from qkflow.experiment.study_dir import read_design
from qkflow.io import checksum, write_json
from qkflow.training.run_dir import read_json

Ask = Callable[..., ExperimentSpec]
RUN = Path("runs/standard/seed-0")


@pytest.fixture
def studies(
    ask: Ask, inline: Any, finish_study: Any, tmp_path: Path
) -> Callable[[Callable[[Path], None] | None], list[str]]:
    """Run a study, change it, and run a second one with another arm that may copy from it; the folders it trained."""

    def run(change: Callable[[Path], None] | None = None) -> list[str]:
        first, second, executor = finish_study(tmp_path / "first"), tmp_path / "second", inline()
        if change is not None:
            change(first)
        spec = replace(ask(), arms=("standard", "standard:qk_norm=True"))
        result = run_experiment(spec, second, executor=executor, reuse=[first, tmp_path / "no study"])
        assert all(len(arm.seeds) == 2 for arm in result.arms)
        return [Path(call.folder).relative_to(second).parts[1] for call in executor.calls]

    return run


def test_only_the_runs_of_new_arms_are_trained(studies: Any, tmp_path: Path) -> None:
    assert set(studies()) == {"standard_qk_norm=True"}
    for name in ("weights.safetensors", "documents.npy", "metrics.jsonl"):
        assert checksum(tmp_path / "first" / RUN / name) == checksum(tmp_path / "second" / RUN / name)
    assert Decisions(tmp_path / "second").is_recorded(RUN)


def test_a_run_whose_files_have_changed_is_not_copied(studies: Any) -> None:
    def change(study: Path) -> None:
        path = study / RUN / "documents.npy"
        path.write_bytes(path.read_bytes() + b"\0")

    assert sorted(studies(change)) == ["standard", "standard_qk_norm=True", "standard_qk_norm=True"]


@pytest.mark.parametrize("field", ["cpu", "kernels", "data"])
def test_a_run_of_another_machine_or_of_other_data_is_not_copied(studies: Any, field: str) -> None:
    def change(study: Path) -> None:
        path = study / RUN / "environment.json"
        other = {"name": "other", "digest": "0"} if field == "data" else "another"
        write_json(path, {**read_json(path), field: other})

    assert "standard" in studies(change)


def test_a_study_that_is_not_adaptive_trains_all_seeds_and_is_judged_once(
    ask: Ask, inline: Any, fake_training: Any, tmp_path: Path
) -> None:
    result = run_experiment(replace(ask(), adaptive=False, seeds=7), tmp_path / "study", executor=inline())
    design, decisions = read_design(tmp_path / "study"), Decisions(tmp_path / "study")
    assert design.rule.seeds_by_round == (7,)
    assert design.rule.alpha(1) == pytest.approx(0.05)
    assert [len(arm.seeds) for arm in result.arms] == [7, 7]
    assert len(decisions.of_kind("verdicts")) == 1


def test_a_study_that_is_not_adaptive_needs_a_number_of_seeds(ask: Ask) -> None:
    with pytest.raises(UsageError, match="needs a number of seeds"):
        replace(ask(), adaptive=False, seeds=None)
