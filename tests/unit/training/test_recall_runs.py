"""Runs on recall tasks: training, files and resuming."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from qkflow.data import get_batch
from qkflow.errors import Interrupted, UsageError
from qkflow.models import Decoder
from qkflow.training import budget, by_cell, load_run, read_metrics, read_recall, steps_for_budget, train
from qkflow.training.evaluate import evaluate
from qkflow.training.losses import open_objective
from qkflow.training.step import Learner

FILES = ("weights.safetensors", "documents.npy", "recall.json")


def learner_of(config: Any) -> Learner:
    return Learner(config, open_objective(config), torch.device("cpu"))


def figures(folder: Path) -> list[dict[str, Any]]:
    records = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in record.items() if "seconds" not in name} for record in records]


@pytest.mark.parametrize("accumulate", [2, 4])
def test_micro_batches_with_unequal_numbers_of_answers_sum_to_the_whole_batch(
    task_configure: Any, accumulate: int
) -> None:
    whole, parts = (learner_of(task_configure(accumulate=n, batch=8, clip=None)) for n in (1, accumulate))
    batch = get_batch(whole.objective.corpus.train, seed=0, step=0, batch_size=8, context=16)
    assert batch.scored is not None
    assert len({int(mask.sum()) for mask in np.split(batch.scored, accumulate)}) > 1
    one, other = whole.train_step(lambda: False), parts.train_step(lambda: False)
    assert one["batch"] == other["batch"]
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_a_delta_memory_learns_to_recall(task_configure: Any) -> None:
    spec = "mqar:pairs=2,length=8,keys=4,values=4,train=2000,validation=64,each=1"
    shape = {"width": 32, "layers": 1, "mechanism": "deltanet"}
    learner = learner_of(task_configure(spec=spec, model=shape, steps=80, batch=32, lr=0.02))
    for _ in range(80):
        learner.train_step(lambda: False)
    accuracy = learner.evaluate(learner.objective.validation(None), lambda: False).accuracy
    assert accuracy is not None
    assert accuracy > 0.85  # chance is 0.25; guessing one of the two values of an instance gives 0.63


@pytest.mark.parametrize("changes", [{}, {"crossing": False}, {"compile": True}])
def test_the_loss_is_the_mean_over_answers(
    task_configure: Any, changes: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "compile", lambda self, **options: None)
    learner = learner_of(task_configure(**changes))
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.normal_(std=0.3)
    batch = get_batch(learner.objective.corpus.train, seed=0, step=0, batch_size=4, context=16)
    tokens, scored = torch.from_numpy(batch.tokens), torch.from_numpy(batch.scored)
    with torch.no_grad():
        logits = learner.model(tokens[:, :-1])[0]
        expected = F.cross_entropy(logits[scored], tokens[:, 1:][scored])
        examples = learner.objective.batch(0)
        torch.testing.assert_close(learner.objective.loss(learner.module, examples), expected, rtol=1e-5, atol=1e-6)


def test_a_recall_run_evaluates_its_test_grid(task_configure: Any, tmp_path: Path, watcher: Any) -> None:
    config, recorder = task_configure(steps=3, evaluate_every=2), watcher()
    result = train(config, tmp_path / "run", callbacks=[recorder])
    assert len(recorder.notices) == 1  # answering is slow
    assert recorder.notices[0].startswith("evaluating the 12 test instances of mqar")
    records = [record for record in figures(tmp_path / "run") if record["kind"] == "eval"]
    assert [record["step"] for record in records] == [0, 2, 3]
    assert all(0 <= record["accuracy"] <= 1 for record in records)
    assert records[-1]["questions"] == records[-1]["scored_tokens"] == result.documents["tokens"].sum()
    recall, corpus = read_recall(tmp_path / "run"), open_objective(config).corpus
    assert recall is not None
    assert (recall.task, recall.split, recall.step) == (corpus.task, "test", 3)
    assert [(cell.pairs, cell.length, cell.instances) for cell in recall.cells] == [(1, 16, 6), (4, 16, 6)]
    loaded = load_run(tmp_path / "run")
    assert recall.cells == by_cell(evaluate(loaded.model, corpus.test, context=16))


def test_a_stopped_recall_run_resumes_bit_for_bit(task_configure: Any, tmp_path: Path, stopped_run: Any) -> None:
    config = task_configure(steps=6, evaluate_every=2, model={"dropout": 0.2, "layers": 1})
    train(config, tmp_path / "whole")
    train(None, stopped_run(config, tmp_path / "run", 3), resume=True)
    for name in FILES:
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")


def test_a_stop_during_the_test_evaluation_repeats_it_once(
    task_configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = task_configure(evaluate_batch=1)
    train(config, tmp_path / "whole")
    evaluate = Learner.evaluate

    def interrupted(learner: Learner, held_out: Any, *args: Any) -> Any:
        if learner.step == 4 and len(held_out.sizes) == 12 and not validated:
            validated.append(held_out)
        elif learner.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(learner, held_out, *args)

    validated: list[Any] = []

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "evaluate", interrupted)
        with pytest.raises(Interrupted, match="after step 4 of 4"):
            train(config, tmp_path / "run")
    assert read_recall(tmp_path / "run") is None
    train(None, tmp_path / "run", resume=True)
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    assert (tmp_path / "run" / "recall.json").read_bytes() == (tmp_path / "whole" / "recall.json").read_bytes()


@pytest.mark.parametrize("name", ["recall.json", "documents.npy"])
def test_missing_result_files_of_a_finished_run_are_restored(
    task_configure: Any, tmp_path: Path, watcher: Any, name: str
) -> None:
    folder = tmp_path / "run"
    train(task_configure(), folder)
    before, metrics = [(folder / file).read_bytes() for file in FILES], (folder / "metrics.jsonl").read_bytes()
    assert train(None, folder, resume=True).was_finished
    for damage in (b"{", None):
        (folder / name).write_bytes(damage) if damage else (folder / name).unlink()
        recorder = watcher()
        assert not train(None, folder, resume=True, callbacks=[recorder]).was_finished
        assert [event for event in recorder.events if event[0] != "notice"] == [
            ("start", 4),
            ("evaluate", 4),
            ("end", 4),
        ]
        assert len(recorder.notices) == (name == "recall.json")  # only then are questions graded again
        assert [(folder / file).read_bytes() for file in FILES] == before
    assert (folder / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"context": 15}, "have 16 tokens, got a context length of 15: use --context 16"),
        ({"stride": 4}, "read whole: omit stride"),
        ({"batch": 64}, "64 is too large"),
        ({"model": {"vocabulary": 5}}, "the model has a vocabulary of 5"),
    ],
)
def test_settings_that_do_not_fit_the_task_are_refused_without_creating_a_folder(
    task_configure: Any, tmp_path: Path, changes: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(UsageError, match=fragment):
        train(task_configure(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_budget_includes_the_test_evaluation(task_configure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = task_configure(evaluate_every=10, evaluate_tokens=16)
    monkeypatch.setattr(
        budget, "measure_speed", lambda *args, **options: budget.Speed(step=0.5, token=0.01, answer=0.02)
    )
    once, last = 0.01 * 16, 0.01 * 16 * 12 + 0.02 * 16 * 2 * 6
    assert steps_for_budget(config, 100.0) == int((100 - once - last) / (0.5 + once / 10))
    with pytest.raises(UsageError, match=r"the 12 test instances of mqar.* about 4 s, .* 3 s: .*longer --budget"):
        steps_for_budget(config, 3.0)


def test_test_speed_is_measured_on_instances_of_every_length(
    task_configure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, clock = [], [0.0]

    class Timed(Learner):
        """Evaluating a validation instance takes one second, a test instance a hundred."""

        def evaluate(self, held_out: Any, should_stop: Any) -> Any:
            is_test = held_out.split is self.objective.corpus.test  # type: ignore[attr-defined]
            clock[0] += 100 if is_test else 1
            if is_test:
                calls.append({window.length for window in held_out.windows})

    monkeypatch.setattr(budget, "Learner", Timed)
    monkeypatch.setattr(budget.time, "perf_counter", lambda: clock[0])
    spec = "s-niah-1:length=64,lengths=64+512,depths=0+100,train=40,validation=8,each=4"
    speed = budget.measure_speed(task_configure(spec=spec, evaluate_batch=2, batch=4), 0.0)
    assert calls == [{64, 512}]
    assert (speed.token, speed.answer) == (1 / 128, 100 / 576)
