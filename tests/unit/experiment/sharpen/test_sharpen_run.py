"""A study from its request to its numbers, with an engine that makes the runs in this process."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qkflow.data.tasks import Instance, Task, TaskConfig
from qkflow.errors import CheckpointError, DiskError, DivergenceError, Interrupted, UsageError
from qkflow.experiment.sharpen import worker
from qkflow.experiment.sharpen.design import SharpenDesign
from qkflow.experiment.sharpen.request import RationaleRequest
from qkflow.experiment.sharpen.run import chosen_rates, run_sharpen
from qkflow.experiment.sharpen.summarise import read_result
from qkflow.experiment.sharpen.worker import RunOutcome
from qkflow.probes.attention import confidence, confidence_curve
from qkflow.probes.faithfulness import evaluate_faithfulness
from qkflow.training.tensors import load_tensors

Ask = Callable[..., RationaleRequest]
Finished = Callable[[Path], SharpenDesign]
Capture = pytest.CaptureFixture[str]
Left = Callable[[Path], dict[str, bytes]]
FILES = {"config.json", "path.json", "instances.safetensors", "examples.json", "weights.safetensors"}


def test_the_design_is_on_record_before_the_first_run(ask: Ask, task: Task, tmp_path: Path, inline: Any) -> None:
    engine, seen = inline(), []
    engine.before = lambda order: seen.append({path.name for path in tmp_path.iterdir()})
    run_sharpen(ask(seeds=1, steps=1), task, tmp_path, engine=engine)
    assert seen[0] >= {"design.json", "environment.json"}
    assert "runs" not in seen[0]


def test_every_arm_is_tuned_over_the_same_rates_and_the_lowest_loss_is_taken(
    task: Task, tmp_path: Path, finished: Finished
) -> None:
    made = finished(tmp_path)
    found = read_result(tmp_path, made, task)
    for arm, slug in zip(found.arms, ("r1", "r20"), strict=True):
        losses = {
            rate: json.loads((tmp_path / f"tuning/{slug}-lr{rate:g}/path.json").read_text())[-1]["loss"]
            for rate in (0.01, 0.02)
        }
        assert arm.tried == losses
        assert chosen_rates(tmp_path, made)[arm.name] == arm.lr == min(losses, key=lambda rate: losses[rate])
        assert json.loads((tmp_path / f"runs/{slug}-seed0/config.json").read_text())["lr"] == arm.lr
    assert {path.name for path in (tmp_path / "tuning/r1-lr0.01").iterdir()} == {"config.json", "path.json"}


@pytest.mark.parametrize(("losses", "chosen"), [((0.5, 0.4), 0.02), ((0.4, 0.5), 0.01), ((0.4, 0.4), 0.01)])
@pytest.mark.parametrize("wrong", [None, math.nan])
def test_the_lower_loss_is_taken_and_the_smaller_rate_of_two_and_never_what_is_no_number(
    tmp_path: Path, finished: Finished, losses: tuple[float, float], chosen: float, wrong: float | None
) -> None:
    made = finished(tmp_path)
    for rate, loss in zip((0.01, 0.02), losses, strict=True):
        seen = loss if wrong is None or rate == chosen else wrong
        point = {"step": 3, "loss": seen, "mass": 0.0, "performance": 0.0}
        (tmp_path / f"tuning/r20-lr{rate:g}/path.json").write_text(json.dumps([point]))
    assert chosen_rates(tmp_path, made)["r = 20"] == chosen


def test_run_folders_are_whole_and_a_second_session_makes_nothing_new(
    ask: Ask, task: Task, tmp_path: Path, inline: Any, left: Left, finished: Finished
) -> None:
    made = finished(tmp_path)
    folders = list((tmp_path / "runs").iterdir())
    assert {folder.name for folder in folders} == {f"r{r}-seed{seed}" for r in (1, 20) for seed in (0, 1)}
    assert all({path.name for path in folder.iterdir()} == FILES for folder in folders)
    before, found, again = left(tmp_path), read_result(tmp_path, made, task), inline()
    told: list[tuple[int, int]] = []
    request = ask(rates=(0.01, 0.02), jobs=2)
    run_sharpen(request, task, tmp_path, engine=again, progress=lambda done, every: told.append((done, every)))
    assert again.calls == []
    assert told[-1] == (8, 8)
    assert left(tmp_path) == before
    assert read_result(tmp_path, made, task) == found


def test_a_study_that_was_stopped_comes_to_the_same_bits(
    ask: Ask, task: Task, tmp_path: Path, inline: Any, left: Left, finished: Finished
) -> None:
    request = ask(rates=(0.01, 0.02))
    whole, cut, engine = tmp_path / "whole", tmp_path / "cut off", inline()
    made = finished(whole)

    def interrupt(order: Any) -> None:
        if len(engine.calls) == 6:  # two of the four runs that count
            os.kill(os.getpid(), signal.SIGTERM)

    engine.before = interrupt
    with pytest.raises(
        Interrupted, match=r"stopped with 6 of 8 runs finished: .* --out '.*/cut off' goes on"
    ) as caught:
        run_sharpen(request, task, cut, engine=engine)
    assert caught.value.signal == signal.SIGTERM
    (cut / "runs/.r20-seed1.123.tmp").mkdir()
    (cut / ".design.json.123.tmp").write_text("{")
    rest = inline()
    run_sharpen(request, task, cut, engine=rest)
    assert len(rest.calls) == 2
    one, other = left(whole), left(cut)
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name] and name != "environment.json"] == []
    assert read_result(cut, made, task).arms == read_result(whole, made, task).arms


def test_a_run_that_crashed_is_tried_again_and_a_tuning_run_given_up_stays_so(
    ask: Ask, task: Task, tmp_path: Path, inline: Any
) -> None:
    engine, notices = inline(), list[str]()

    def crash(order: Any) -> None:
        if order.tuning and order.config.lr == 0.02 and order.config.qk_ratio == 1:
            raise RuntimeError("no memory")

    engine.before = crash
    request = ask(rates=(0.01, 0.02), seeds=1, steps=1)
    made = run_sharpen(request, task, tmp_path, engine=engine, notice=notices.append)
    assert notices == [
        "r1-lr0.02 crashed (RuntimeError: no memory): it is tried again",
        "failed: r1-lr0.02: RuntimeError: no memory",
    ]
    again = inline()
    run_sharpen(request, task, tmp_path, engine=again)
    assert again.calls == []  # a rate found later would not be the one that the runs were made with
    arm = read_result(tmp_path, made, task).arms[0]
    assert (arm.lr, arm.tried[0.02], arm.failures) == (0.01, None, ("r1-lr0.02: RuntimeError: no memory",))


def test_a_run_that_counts_and_was_given_up_is_made_by_the_next_session(
    ask: Ask, task: Task, tmp_path: Path, inline: Any
) -> None:
    engine, request = inline(), ask(steps=1)

    def crash(order: Any) -> None:
        if "r20-seed1" in order.folder:
            raise RuntimeError("no memory")

    engine.before = crash
    made = run_sharpen(request, task, tmp_path, engine=engine)
    found = read_result(tmp_path, made, task)
    assert (found.finished, found.runs, found.arms[1].seeds) == (3, 4, (0,))
    assert "r = 20: 1 of 2 runs came to an end: its numbers rest on those." in found.remarks
    run_sharpen(request, task, tmp_path, engine=inline())
    assert read_result(tmp_path, made, task).finished == 4


def test_a_diverged_run_is_on_record_and_not_tried_again(ask: Ask, task: Task, tmp_path: Path, inline: Any) -> None:
    request = ask(rates=(1e36,))
    made = run_sharpen(request, task, tmp_path, engine=inline())
    assert all({path.name for path in folder.iterdir()} == {"failed.json"} for folder in tmp_path.glob("runs/*"))
    again = inline()
    run_sharpen(request, task, tmp_path, engine=again)
    assert again.calls == []
    found = read_result(tmp_path, made, task)
    assert (found.finished, found.changes, found.equal_loss, found.examples) == (0, (), None, ())
    assert "not finite: choose a lower learning rate or r" in found.arms[0].failures[0]
    assert "has no finished pair of runs" in found.answer
    assert found.arms[0].readings["mass"].mean is None


def test_an_arm_none_of_whose_rates_came_to_an_end_is_said_to_be_so(
    ask: Ask, task: Task, tmp_path: Path, inline: Any
) -> None:
    made = run_sharpen(ask(rates=(1e35, 1e36), seeds=1), task, tmp_path, engine=inline())
    found = read_result(tmp_path, made, task)
    assert not (tmp_path / "runs").exists()
    assert "r = 20: none of its learning rates came to an end." in found.remarks


def test_an_arm_without_runs_does_not_take_the_examples_from_the_others(
    task: Task, tmp_path: Path, finished: Finished
) -> None:
    made = finished(tmp_path)
    for job in made.tuning_jobs():
        if job.arm == "r = 20":
            shutil.rmtree(tmp_path / job.folder)
            worker.record_failure(tmp_path / job.folder, "no")
    found = read_result(tmp_path, made, task)
    assert found.examples
    assert all(set(one.attention) == {"before training", "r = 1"} for one in found.examples)


def test_a_loss_that_breaks_only_when_looked_at_is_no_result(
    ask: Ask, task: Task, tmp_path: Path, inline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = worker._point
    monkeypatch.setattr(worker, "_point", lambda step, seen: replace(point(step, seen), loss=math.nan))
    run_sharpen(ask(seeds=1, steps=1), task, tmp_path, engine=inline())
    assert "not finite" in json.loads((tmp_path / "runs/r1-seed0/failed.json").read_text())["reason"]


def test_a_full_disk_ends_the_study_and_leaves_no_half_of_a_run(
    ask: Ask, task: Task, tmp_path: Path, inline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, tensors: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(worker, "save_tensors", full)
    with pytest.raises(DiskError, match=r"No space left on device.*: free some space, then run the same command again"):
        run_sharpen(ask(), task, tmp_path, engine=inline())
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mechanism": "standart"}, "did you mean 'standard'"),
        ({"mechanism": "standard:windov=3"}, "windov"),
        ({"mechanism": "standard:key_heads=3"}, "key_heads"),
    ],
)
def test_what_no_run_could_learn_is_refused_before_there_is_a_folder(
    ask: Ask, task: Task, tmp_path: Path, inline: Any, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        run_sharpen(ask(**changes), task, tmp_path / "study", engine=inline())
    assert not (tmp_path / "study").exists()


def test_another_design_or_a_foreign_folder_is_refused_and_left_as_it_was(
    ask: Ask, task: Task, tmp_path: Path, inline: Any, left: Left, finished: Finished
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds other things"):
        run_sharpen(ask(), task, tmp_path, engine=inline())
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    finished(tmp_path / "study")
    before = left(tmp_path)
    with pytest.raises(UsageError, match="another design"):
        run_sharpen(ask(seeds=3), task, tmp_path / "study", engine=inline())
    assert left(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("path.json", "[{"),
        ("path.json", "[]"),
        ("path.json", '[{"step": 0}]'),
        ("instances.safetensors", "torn"),
        ("instances.safetensors", None),
        ("config.json", "{}"),
        ("examples.json", ""),
    ],
)
def test_a_damaged_run_is_named_with_what_to_do(
    task: Task, tmp_path: Path, finished: Finished, name: str, content: str | None
) -> None:
    made = finished(tmp_path)
    path = tmp_path / "runs/r20-seed0" / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(CheckpointError, match=r"runs/r20-seed0 cannot be read \(.*\): delete it, and") as caught:
        read_result(tmp_path, made, task)
    assert "\n" not in str(caught.value)


def test_a_damaged_tuning_run_is_named_with_what_to_do(
    ask: Ask, task: Task, tmp_path: Path, inline: Any, finished: Finished
) -> None:
    finished(tmp_path)
    (tmp_path / "tuning/r1-lr0.01/path.json").write_text("[{")
    with pytest.raises(CheckpointError, match=r"tuning/r1-lr0.01 cannot be read"):
        run_sharpen(ask(rates=(0.01, 0.02)), task, tmp_path, engine=inline())


def test_a_damaged_record_of_the_machine_costs_no_run(task: Task, tmp_path: Path, finished: Finished) -> None:
    made = finished(tmp_path)
    (tmp_path / "environment.json").write_text("{")
    with pytest.raises(
        CheckpointError, match=r"environment.json cannot be read \(.*\): delete it, and the same command"
    ):
        read_result(tmp_path, made, task)


def test_a_run_made_with_another_rate_than_the_one_chosen_is_not_read(
    task: Task, tmp_path: Path, finished: Finished
) -> None:
    made = finished(tmp_path)
    path = tmp_path / "runs/r1-seed1/config.json"
    path.write_text(path.read_text().replace('"lr": 0.0', '"lr": 0.9'))
    with pytest.raises(CheckpointError, match=r"r1-seed1 cannot be read .*another learning rate was chosen since"):
        read_result(tmp_path, made, task)


def test_numbers_are_those_of_the_instances(task: Task, tmp_path: Path, finished: Finished) -> None:
    made = finished(tmp_path)
    made = replace(made, request=replace(made.request, tau=0.2))
    found = read_result(tmp_path, made, task)
    assert (found.instances, found.with_rationale, found.finished, found.runs) == (12, 10, 4, 4)
    for arm, slug in zip(found.arms, ("r1", "r20"), strict=True):
        runs = [load_tensors(tmp_path / f"runs/{slug}-seed{seed}/instances.safetensors") for seed in (0, 1)]
        mass = np.stack([run["mass"].numpy() for run in runs])
        assert np.isnan(mass).sum() == 4  # instances without a rationale have none
        assert arm.readings["mass"].by_seed == pytest.approx(np.nanmean(mass, 1).tolist())
        assert arm.readings["mass"].mean == pytest.approx(np.nanmean(mass))
        assert 100 * (arm.readings["confident"].mean or 0) == pytest.approx(confidence(mass.ravel(), 0.2))
        taus = [tau for tau, _ in arm.curve]
        assert [100 * y for _, y in arm.curve] == pytest.approx(confidence_curve(mass.ravel(), taus).tolist())
        right = np.stack([run["performance"].numpy() for run in runs])
        long = np.array([one.kind == "long" for one in task.test])
        assert arm.by_kind["long"]["performance"] == pytest.approx(right[:, long].mean())
        assert [point.step for point in arm.paths[0]] == list(made.moments)
    change = found.change("r = 20", "mass")
    first, second = found.arms[0].readings["mass"], found.arms[1].readings["mass"]
    assert change is not None
    assert change.mean == pytest.approx((second.mean or 0) - (first.mean or 0))
    assert len(found.examples) == 6
    assert {len(one.attention["before training"]) == len(one.words) for one in found.examples} == {True}
    assert found.examples[0].attention.keys() == {"before training", "r = 1", "r = 20"}


def test_texts_that_may_not_be_shown_appear_nowhere(
    ask: Ask, task: Task, tmp_path: Path, inline: Any, left: Left, finished: Finished, capfd: Capture
) -> None:
    assert any(2 in one.tokens for one in task.test)
    hidden, told = replace(task, is_quotable=False), list[str]()
    request = ask(rates=(0.01, 1e36), seeds=1)
    made = run_sharpen(request, hidden, tmp_path, engine=inline(), notice=told.append)
    found = read_result(tmp_path, made, hidden)
    assert found.examples == ()
    said = [
        *told,
        repr(found),
        *capfd.readouterr(),
        *(content.decode("latin-1") for content in left(tmp_path).values()),
    ]
    for word in (w for w in task.words if len(w) > 1):
        assert not [text for text in said if word in text]
    once_shown = finished(tmp_path / "shown")
    assert "xyzzyword" in repr(read_result(tmp_path / "shown", once_shown, task))
    assert "xyzzyword" not in repr(read_result(tmp_path / "shown", once_shown, hidden))


def test_a_task_of_writing_is_measured_by_what_is_written(ask: Ask, tmp_path: Path, inline: Any) -> None:
    words = ("<pad>", "<ask>", *"abcd", "<end>")
    texts = tuple(
        Instance(tokens=(a, b, 1), label=a, rationale=(0,), answer=(a, 6), protected=(2,))
        for a in (2, 3)
        for b in (4, 5)
    )
    task = Task(name="copies", kind="generation", words=words, classes=words, train=texts, validation=texts, test=texts)
    request = ask(task=TaskConfig(name="squad", data="x"), steps=1, seeds=1)
    found = read_result(tmp_path, run_sharpen(request, task, tmp_path, engine=inline()), task)
    assert found.metrics[0].title == "F1"
    assert found.change("r = 20", "performance") is not None
    assert set(found.examples[0].predicted) == {"r = 1", "r = 20"}


def test_a_run_has_the_bits_of_one_thread_wherever_it_is_made(
    ask: Ask, task: Task, tmp_path: Path, inline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, evaluate_faithfulness = [], worker.evaluate_faithfulness

    def counting(*args: Any, **options: Any) -> Any:
        seen.append(torch.get_num_threads())
        return evaluate_faithfulness(*args, **options)

    monkeypatch.setattr(worker, "evaluate_faithfulness", counting)
    torch.set_num_threads(2)
    run_sharpen(ask(seeds=1, steps=1), task, tmp_path, engine=inline())
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2


def test_whatever_goes_wrong_in_a_run_comes_back_as_an_ending(
    ask: Ask, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: Any
) -> None:
    engine = inline()
    run_sharpen(ask(seeds=1, steps=1), task, tmp_path / "study", engine=engine)
    order = replace(engine.calls[0], folder=str(tmp_path / "run"))
    for error, kind in (
        (RuntimeError("strange"), "crashed"),
        (Interrupted("stopped in step 1"), "stopped"),
        (DivergenceError("not finite"), "diverged"),
    ):

        def learn(*args: Any, error: Exception = error, **options: Any) -> None:
            raise error

        monkeypatch.setattr(worker, "learn", learn)
        ending = worker.make_run(order)
        assert isinstance(ending, RunOutcome)
        assert ending.kind == kind
        assert (tmp_path / "run").exists() == (kind == "diverged")


def test_what_is_watched_along_training_is_of_every_kind_though_files_have_them_in_a_row(
    ask: Ask, task: Task, tmp_path: Path, inline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = tuple(replace(one, label=int(number > 300)) for number, one in enumerate(task.validation * 100))
    seen: list[list[int]] = []

    def spy(reader: Any, instances: Any, **options: Any) -> Any:
        seen.append([one.label for one in instances])
        return evaluate_faithfulness(reader, instances, **options)

    monkeypatch.setattr(worker, "evaluate_faithfulness", spy)
    run_sharpen(ask(seeds=1), replace(task, validation=row), tmp_path / "study", engine=inline())
    watched = [labels for labels in seen if len(labels) == 256]
    assert watched
    assert all(labels == watched[0] for labels in watched)
    assert 100 < sum(watched[0]) < 156


def test_an_arm_that_has_hardly_learned_is_said_to_have(ask: Ask, task: Task, tmp_path: Path, inline: Any) -> None:
    asked = ask(rates=(1e-9,), seeds=1)
    made = run_sharpen(asked, task, tmp_path / "study", engine=inline())
    remarks = read_result(tmp_path / "study", made, task).remarks
    assert sum("1 of 1 runs have hardly learned" in remark for remark in remarks) == 2
