"""Experiments on tasks with rationales: what is measured on a run, and what the result says of it."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qkflow.data.tasks import Instance, Task, TaskConfig
from qkflow.errors import CheckpointError, Interrupted, UsageError
from qkflow.experiment.metrics import measurement
from qkflow.experiment.metrics.measurement import RationaleMeasurement, example_instances
from qkflow.experiment.metrics.rationale import RationaleSummary
from qkflow.experiment.runner import run_experiment
from qkflow.experiment.spec import ExperimentSpec, RationaleSpec
from qkflow.experiment.study_dir import read_design
from qkflow.experiment.summary import read_result
from qkflow.probes.attention import confidence, confidence_curve
from qkflow.probes.faithfulness import evaluate_faithfulness
from qkflow.training.run_dir import finished as finished_run
from qkflow.training.tensors import load_tensors

SpecOf = Callable[..., ExperimentSpec]
Finished = Callable[[Path], ExperimentSpec]
UseTask = Callable[[Task], None]


def rationale_of(study: Path) -> RationaleSummary:
    summary = read_result(study).rationale
    assert summary is not None
    return summary


def contents(study: Path) -> dict[str, bytes]:
    """The files that hold results, without times."""
    names = ("weights.safetensors", "instances.safetensors", "examples.json", "documents.npy", "config.json")
    return {str(path.relative_to(study)): path.read_bytes() for name in names for path in study.rglob(name)}


def test_every_arm_uses_the_learning_rate_with_the_lowest_validation_loss(tmp_path: Path, finished: Finished) -> None:
    finished(tmp_path)
    for arm, folder in zip(rationale_of(tmp_path).arms, ("standard_r=1", "standard_r=20"), strict=True):
        results = {rate: finished_run(tmp_path / f"tuning/{folder}/lr-{rate}") for rate in (0.01, 0.02)}
        losses = {rate: result.metrics["loss"] for rate, result in results.items() if result is not None}
        assert arm.tried == pytest.approx(losses)
        assert arm.lr == min(losses, key=lambda rate: losses[rate])
        assert json.loads((tmp_path / f"runs/{folder}/seed-0/config.json").read_text())["lr"] == arm.lr
        assert not (tmp_path / f"tuning/{folder}/lr-0.01/instances.safetensors").exists()


def test_a_second_session_runs_nothing(tmp_path: Path, inline: Any, finished: Finished) -> None:
    spec = finished(tmp_path)
    before, executor = contents(tmp_path), inline()
    result = run_experiment(spec, tmp_path, executor=executor)
    assert executor.calls == []
    assert contents(tmp_path) == before
    assert (result.finished, result.runs, result.comparisons, result.verdicts) == (8, 8, (), ())


def test_a_stopped_study_resumes_bit_for_bit(tmp_path: Path, inline: Any, finished: Finished) -> None:
    whole, cut, executor = tmp_path / "whole", tmp_path / "cut off", inline()
    spec = finished(whole)

    def interrupt(run: Any) -> None:
        if len(executor.calls) == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    executor.before = interrupt
    with pytest.raises(Interrupted, match=r"runs finished: resume with `qkflow compare --resume '.*/cut off'`"):
        run_experiment(spec, cut, executor=executor)
    run_experiment(None, cut, executor=inline())
    assert contents(cut) == contents(whole)
    assert rationale_of(cut).arms == rationale_of(whole).arms


def test_metrics_are_those_of_the_instances(
    task: Task, tmp_path: Path, finished: Finished, edit_decisions: Any
) -> None:
    finished(tmp_path)
    design = json.loads((tmp_path / "design.json").read_text())
    design["spec"]["rationale"]["tau"] = 0.2
    (tmp_path / "design.json").write_text(json.dumps(design))
    edit_decisions(tmp_path)
    summary = rationale_of(tmp_path)
    assert (summary.instances, summary.with_rationale, summary.finished, summary.runs) == (12, 10, 4, 4)
    for arm, folder in zip(summary.arms, ("standard_r=1", "standard_r=20"), strict=True):
        runs = [load_tensors(tmp_path / f"runs/{folder}/seed-{seed}/instances.safetensors") for seed in (0, 1)]
        mass = np.stack([run["mass"].numpy() for run in runs])
        assert np.isnan(mass).sum() == 4  # instances without a rationale have none
        assert arm.readings["mass"].by_seed == pytest.approx(np.nanmean(mass, 1).tolist())
        assert arm.readings["mass"].mean == pytest.approx(np.nanmean(mass))
        assert 100 * (arm.readings["confident"].mean or 0) == pytest.approx(confidence(mass.ravel(), 0.2))
        taus = [tau for tau, _ in arm.curve]
        assert [100 * y for _, y in arm.curve] == pytest.approx(confidence_curve(mass.ravel(), taus).tolist())
        performance = np.stack([run["performance"].numpy() for run in runs])
        long = np.array([instance.kind == "long" for instance in task.test])
        assert arm.by_kind["long"]["performance"] == pytest.approx(performance[:, long].mean())
        steps = RationaleMeasurement(data=TaskConfig(), rationale=RationaleSpec()).steps(read_design(tmp_path).base)
        assert [point.step for point in arm.paths[0]] == sorted(steps)
    change = summary.change("r = 20", "mass")
    baseline, arm = (arm.readings["mass"].mean or 0 for arm in summary.arms)
    assert change is not None
    assert change.mean == pytest.approx(arm - baseline)
    assert len(summary.examples) == 6
    assert all(len(example.attention["before training"]) == len(example.words) for example in summary.examples)
    assert summary.examples[0].attention.keys() == {"before training", "r = 1", "r = 20"}


def test_measurements_cover_the_run_and_examples_every_kind(task: Task, spec_of: SpecOf) -> None:
    base = spec_of(steps=100).base
    assert base is not None
    steps = sorted(RationaleMeasurement(data=TaskConfig(), rationale=RationaleSpec()).steps(base))
    assert (steps[0], steps[-1]) == (0, 100)
    examples = [task.test[index] for index in example_instances(task)]
    assert {example.kind for example in examples} == {"short", "long"}
    assert len(examples) == 6
    assert all(example.rationale for example in examples)
    assert example_instances(replace(task, is_quotable=False)) == ()


def test_a_diverged_run_is_recorded_and_not_tried_again(spec_of: SpecOf, tmp_path: Path, inline: Any) -> None:
    spec = spec_of(rates=(1e36,))
    run_experiment(spec, tmp_path, executor=inline())
    executor = inline()
    summary = run_experiment(spec, tmp_path, executor=executor).rationale
    assert executor.calls == []
    assert summary is not None
    assert (summary.finished, summary.changes, summary.equal_loss, summary.examples) == (0, (), None, ())
    assert "not finite" in summary.arms[0].failures[0]
    assert "has no finished pair of runs" in summary.answer
    assert summary.arms[0].readings["mass"].mean is None


def test_an_arm_whose_tuning_runs_all_fail_is_remarked_on(spec_of: SpecOf, tmp_path: Path, inline: Any) -> None:
    summary = run_experiment(spec_of(rates=(1e35, 1e36), seeds=1), tmp_path, executor=inline()).rationale
    assert summary is not None
    assert "r = 20: every learning-rate trial failed." in summary.remarks


def test_an_arm_without_runs_does_not_remove_the_examples_of_the_others(tmp_path: Path, finished: Finished) -> None:
    finished(tmp_path)
    for seed in (0, 1):
        (tmp_path / f"runs/standard_r=20/seed-{seed}/weights.safetensors").unlink()
    summary = rationale_of(tmp_path)
    assert "r = 20: only 0 of 2 runs are finished." in summary.remarks
    assert summary.examples
    assert all(set(example.attention) == {"before training", "r = 1"} for example in summary.examples)


@pytest.mark.parametrize("content", ["truncated", None])
def test_a_damaged_measurement_is_named_with_what_to_do(
    tmp_path: Path, finished: Finished, inline: Any, edit_decisions: Any, content: str | None
) -> None:
    finished(tmp_path)
    path = tmp_path / "runs/standard_r=20/seed-0/instances.safetensors"
    measured = path.read_bytes()
    path.unlink() if content is None else path.write_text(content)
    assert rationale_of(tmp_path).arms[1].failures == (f"seed-0: {path} was changed after the run had finished",)
    run_experiment(None, tmp_path, executor=inline())
    assert path.read_bytes() == measured
    path.unlink() if content is None else path.write_text(content)
    edit_decisions(tmp_path, lambda records: [record for record in records if record["kind"] != "run"])
    with pytest.raises(CheckpointError, match=r"standard_r=20/seed-0 cannot be read \(.*\): delete it, and") as caught:
        read_result(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mechanism", "says"),
    [("standart", "did you mean 'standard'"), ("standard:windov=3", "windov"), ("standard:key_heads=3", "key_heads")],
)
def test_a_mechanism_that_cannot_be_built_is_refused_before_there_is_a_folder(
    spec_of: SpecOf, tmp_path: Path, inline: Any, mechanism: str, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        run_experiment(spec_of(mechanism=mechanism), tmp_path / "study", executor=inline())
    assert not (tmp_path / "study").exists()


def test_changed_data_is_refused(
    task: Task, use_task: UseTask, tmp_path: Path, inline: Any, finished: Finished
) -> None:
    spec = finished(tmp_path)
    use_task(replace(task, train=task.train[1:]))
    with pytest.raises(UsageError, match="has changed since"):
        run_experiment(spec, tmp_path, executor=inline())


def test_a_study_of_rationales_cannot_be_extended(tmp_path: Path, inline: Any, finished: Finished) -> None:
    finished(tmp_path / "study")
    with pytest.raises(UsageError, match="more time would change nothing"):
        run_experiment(None, tmp_path / "study", executor=inline(), more=60.0)


def test_texts_that_may_not_be_quoted_appear_nowhere(
    spec_of: SpecOf, task: Task, use_task: UseTask, tmp_path: Path, inline: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert any(2 in instance.tokens for instance in task.test)
    use_task(replace(task, is_quotable=False))
    result = run_experiment(spec_of(rates=(0.01, 1e36), seeds=1), tmp_path, executor=inline())
    assert result.rationale is not None
    assert result.rationale.examples == ()
    files = [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    for text in (repr(result), *capfd.readouterr(), *files):
        assert not [word for word in task.words if len(word) > 1 and word in text]


def test_generated_answers_are_scored_by_their_overlap(
    spec_of: SpecOf, use_task: UseTask, tmp_path: Path, inline: Any
) -> None:
    words = ("<pad>", "<ask>", *"abcd", "<end>")
    texts = tuple(
        Instance(tokens=(a, b, 1), label=a, rationale=(0,), answer=(a, 6), protected=(2,))
        for a in (2, 3)
        for b in (4, 5)
    )
    use_task(
        Task(name="copies", kind="generation", words=words, classes=words, train=texts, validation=texts, test=texts)
    )
    spec = spec_of(TaskConfig(name="squad", data="x"), steps=1, seeds=1)
    summary = run_experiment(spec, tmp_path, executor=inline()).rationale
    assert summary is not None
    assert summary.metrics[0].title == "F1"
    assert summary.change("r = 20", "performance") is not None
    assert set(summary.examples[0].predicted) == {"r = 1", "r = 20"}


def test_measurements_use_one_thread_and_a_fixed_sample_of_the_validation_instances(
    spec_of: SpecOf, task: Task, use_task: UseTask, tmp_path: Path, inline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered = tuple(replace(one, label=int(number > 300)) for number, one in enumerate(task.validation * 100))
    use_task(replace(task, validation=ordered))
    threads, labels = set(), list[list[int]]()

    def spy(reader: Any, instances: Any, **options: Any) -> Any:
        threads.add(torch.get_num_threads())
        labels.append([instance.label for instance in instances])
        return evaluate_faithfulness(reader, instances, **options)

    monkeypatch.setattr(measurement, "evaluate_faithfulness", spy)
    torch.set_num_threads(2)
    run_experiment(spec_of(seeds=1), tmp_path, executor=inline())
    assert threads == {1}
    assert torch.get_num_threads() == 2
    monitored = [sample for sample in labels if len(sample) == 256]
    assert monitored
    assert all(sample == monitored[0] for sample in monitored)
    assert 100 < sum(monitored[0]) < 156  # files may be sorted by class


def test_an_arm_that_has_hardly_learned_is_remarked_on(spec_of: SpecOf, tmp_path: Path, inline: Any) -> None:
    summary = run_experiment(spec_of(rates=(1e-9,), seeds=1), tmp_path, executor=inline()).rationale
    assert summary is not None
    assert sum("1 of 1 runs have hardly learned" in remark for remark in summary.remarks) == 2
    assert not any(math.isnan(point.loss) for arm in summary.arms for path in arm.paths for point in path)
