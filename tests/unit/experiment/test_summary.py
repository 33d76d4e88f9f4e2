"""The result of a study, read from its folder."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkflow.config import to_dict
from qkflow.data import CorpusConfig, open_corpus
from qkflow.errors import UsageError
from qkflow.experiment.run_status import update_status
from qkflow.experiment.runner import run_experiment
from qkflow.experiment.spec import ExperimentSpec
from qkflow.experiment.study_dir import read_design
from qkflow.experiment.summary import example_runs, read_result
from qkflow.models import DecoderConfig
from qkflow.report import export_json
from qkflow.training import read_metrics


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, new_cache: Callable[[Path], str]) -> Path:
    """A finished study of two arms, two seeds and two learning rates."""
    place = tmp_path_factory.mktemp("study")
    text = place / "text.txt"
    text.write_text("".join(f"line {i}: the quick brown fox number {i * i}\n" for i in range(2000)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QKFLOW_CACHE", new_cache(place / "cache"))
        run_experiment(
            ExperimentSpec(
                data=CorpusConfig(source=str(text)),
                arms=("standard", "differential"),
                model=DecoderConfig(width=16, layers=1, heads=2, hidden=600),
                tokens=20 * 4 * 16,
                seeds=2,
                context=16,
                batch=4,
                learning_rates=(1e-3, 3e-3),
            ),
            place / "study",
            command=("qkflow", "compare"),
        )
    return place / "study"


@pytest.fixture
def study(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def documents(study: Path, arm: str, seed: int) -> np.ndarray:
    return np.load(study / "runs" / arm / f"seed-{seed}" / "documents.npy")


def test_the_difference_is_that_of_documents_npy(study: Path) -> None:
    result = read_result(study)
    difference = result.comparisons[0].difference
    assert difference is not None

    def loss(arm: str, seed: int) -> float:
        rows = documents(study, arm, seed)
        return float(rows["nats"].sum() / math.log(2) / rows["bytes"].sum())

    by_hand = [loss("differential", seed) - loss("standard", seed) for seed in (0, 1)]
    assert difference.by_seed == pytest.approx(by_hand, abs=1e-12)
    assert [arm.losses for arm in result.arms] == [
        pytest.approx([loss(arm, seed) for seed in (0, 1)]) for arm in ("standard", "differential")
    ]
    assert result.comparisons[0].p_adjusted == result.verdicts[0].p_adjusted == pytest.approx(difference.p)
    assert difference.level == pytest.approx(1 - result.error_rate)
    assert result.margin == pytest.approx(0.005 * sum(result.arms[0].losses) / 2)


def test_every_arm_has_cost_curves_and_tuning(study: Path) -> None:
    result = read_result(study)
    assert (result.finished, result.runs) == (8, 8)
    for arm in result.arms:
        assert abs(arm.parameters_off) <= 0.005
        assert arm.tokens == 20 * 4 * 16
        assert [len(curve.tokens) for curve in arm.curves] == [21, 21]
        assert {rate for rate, _ in arm.tuning} == {1e-3, 3e-3}
        assert arm.learning_rate == min(arm.tuning, key=lambda tuning_losses: tuning_losses[1] or math.inf)[0]
        assert arm.tokens_per_second is not None
        assert arm.peak_bytes is not None
        assert arm.failures == ()
    assert [note.name for note in result.notes][:2] == ["size", "compressibility"]
    assert result.remarks == ()
    assert result.command == ("qkflow", "compare")
    assert result.environment["threads"] >= 1


def test_a_result_survives_json(study: Path, tmp_path: Path) -> None:
    result = read_result(study)
    record = json.loads(export_json(result, tmp_path / "results.json").read_text())
    assert record == json.loads(json.dumps(to_dict(result)))


def not_judged(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of a study that was killed before it recorded a finished run."""
    return [record for record in records if record["kind"] not in ("run", "verdicts", "end")]


def test_a_failed_run_does_not_affect_other_pairs(study: Path, inline: Any, edit_decisions: Any) -> None:
    lost = study / "runs" / "differential" / "seed-1"
    shutil.rmtree(lost)
    lost.mkdir()
    update_status(lost, attempts=1, failed="the loss went away", failed_for_good=True)
    edit_decisions(study, not_judged)
    result = run_experiment(None, study, executor=inline())
    difference = result.comparisons[0].difference
    assert difference is not None
    assert (difference.seeds, difference.low) == (1, None)
    assert result.arms[1].failures == ("seed 1: the loss went away",)
    assert "1 of 8 runs are not finished (1 failed)" in result.remarks[0]
    assert result.verdicts[0].kind == "undecided"


def test_an_arm_without_any_run_is_undecided_and_not_an_error(study: Path, inline: Any, edit_decisions: Any) -> None:
    shutil.rmtree(study / "runs" / "differential")
    for seed in (0, 1):
        (study / f"runs/differential/seed-{seed}").mkdir(parents=True)
        update_status(study / f"runs/differential/seed-{seed}", failed="no loss", failed_for_good=True)
    edit_decisions(study, not_judged)
    assert read_result(study).verdicts[0].sentence == "no round has finished"
    result = run_experiment(None, study, executor=inline())
    assert result.comparisons[0].difference is None
    assert result.verdicts[0].kind == "undecided"
    assert result.arms[1].mean is None


def test_a_study_without_runs_has_a_result(study: Path) -> None:
    shutil.rmtree(study / "runs")
    shutil.rmtree(study / "tuning")
    (study / "corpus.json").unlink()
    (study / "decisions.jsonl").unlink()
    result = read_result(study)
    assert result.finished == 0
    assert result.arms[0].learning_rate is None


def test_runs_that_scored_other_documents_are_not_compared(study: Path, inline: Any, edit_decisions: Any) -> None:
    path = study / "runs" / "differential" / "seed-0" / "documents.npy"
    rows = np.load(path)
    rows["bytes"][0] += 1
    np.save(path, rows)
    result = read_result(study)
    assert f"{path} was changed after the run had finished: the run is left out" in result.remarks
    assert [arm.seeds for arm in result.arms] == [(0, 1), (1,)]
    edit_decisions(study, not_judged)  # without its checksum it cannot be known to be changed
    with pytest.raises(UsageError, match=r"documents\.npy scores other documents than the other runs"):
        run_experiment(None, study, executor=inline())


def test_runs_from_different_machines_are_remarked_on(study: Path) -> None:
    path = study / "runs" / "standard" / "seed-0" / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "cpu": "another"}))
    assert any("different machines" in remark for remark in read_result(study).remarks)


def test_example_runs_are_the_first_finished_ones(study: Path) -> None:
    (study / "runs" / "standard" / "seed-0" / "weights.safetensors").unlink()
    folders = example_runs(study)
    assert folders["standard"].name == "seed-1"
    assert folders["differential"].name == "seed-0"


def test_short_runs_that_do_not_match_are_remarked_on(study: Path, edit_decisions: Any) -> None:
    path = study / "design.json"
    design = json.loads(path.read_text())
    design["spec"]["match"] = "flops"
    design["arms"][1]["flops_per_token"] = round(1.1 * design["arms"][0]["flops_per_token"])
    path.write_text(json.dumps(design))
    edit_decisions(study)
    assert any("from the baseline's by up to 10%" in remark for remark in read_result(study).remarks)


def test_tuning_never_scored_the_test_documents_and_verdicts_did(study: Path) -> None:
    corpus = open_corpus(read_design(study).base.data)
    assert not np.array_equal(corpus.validation.sizes, corpus.test.sizes)

    def scored(folder: Path) -> tuple[int, set[str]]:
        kinds = {record["kind"] for record in read_metrics(folder / "metrics.jsonl")}
        return len(np.load(folder / "documents.npy")), kinds

    for folder in study.glob("tuning/*/*"):
        assert scored(folder) == (len(corpus.validation.sizes), {"train", "eval"})
    for folder in study.glob("runs/*/*"):
        assert scored(folder) == (len(corpus.test.sizes), {"train", "eval", "test"})
