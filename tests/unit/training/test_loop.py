"""Runs: files, callbacks, stopping and resuming."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qkflow.data import Corpus
from qkflow.errors import Interrupted, UsageError
from qkflow.models import Decoder
from qkflow.training import evaluate, load_run, loop, read_metrics, steps_for_budget, train
from qkflow.training.step import Learner


def test_a_finished_run_has_a_complete_folder(configure: Any, tmp_path: Path) -> None:
    config = configure(steps=6, evaluate_every=2, checkpoint_every=4)
    result = train(config, tmp_path / "run", command=["qkflow", "train"])
    names = {path.name for path in (tmp_path / "run").iterdir()}
    files = {
        "config.json",
        "environment.json",
        "checksums.json",
        "tokenizer.json",
        "metrics.jsonl",
        "documents.npy",
        "weights.safetensors",
    }
    assert names == files | {"checkpoints", "lock"}
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in records if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records if r["kind"] == "eval"] == [0, 2, 4, 6]
    assert result.metrics == records[-1]
    assert records[-1]["bits_per_byte"] < records[0]["bits_per_byte"]
    assert records[-2]["tokens"] == config.tokens
    documents = np.load(tmp_path / "run" / "documents.npy", allow_pickle=False)
    assert np.array_equal(documents, result.documents)
    assert documents["nats"].sum() / documents["tokens"].sum() == pytest.approx(records[-1]["loss"])
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["threads"] == 1
    assert environment["command"] == ["qkflow", "train"]
    assert environment["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("spec", ["standart", "standard:key_heads=3"])
def test_a_model_that_cannot_be_built_creates_no_folder(configure: Any, tmp_path: Path, spec: str) -> None:
    config = configure(steps=1)
    with pytest.raises(UsageError):
        train(replace(config, model=replace(config.model, mechanism=spec)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_callbacks_are_called_in_order(configure: Any, tmp_path: Path, watcher: Any) -> None:
    recorder = watcher()
    train(configure(steps=3, evaluate_every=2, checkpoint_every=2), tmp_path / "run", callbacks=[recorder])
    assert recorder.events == [
        ("start", 0), ("evaluate", 0), ("step", 1), ("step", 2), ("evaluate", 2), ("checkpoint", 2),
        ("step", 3), ("evaluate", 3), ("checkpoint", 3), ("end", 3),
    ]  # fmt: skip
    assert isinstance(recorder.model, Decoder)


def test_a_sample_of_the_held_out_tokens_is_stated_without_flags(configure: Any, tmp_path: Path, watcher: Any) -> None:
    recorder = watcher()
    train(configure(steps=1, final_tokens=64), tmp_path / "run", callbacks=[recorder])
    assert [text.partition(" of ")[0] for text in recorder.notices] == ["evaluating a sample"]
    assert "--" not in recorder.notices[0]


def test_training_depends_on_the_config_only(configure: Any, tmp_path: Path) -> None:
    def weights(name: str, **changes: Any) -> bytes:
        train(configure(**{"model": {"dropout": 0.2}, **changes}), tmp_path / name)
        return (tmp_path / name / "weights.safetensors").read_bytes()

    first = weights("a")
    torch.manual_seed(123)
    assert weights("b") == first
    assert weights("c", seed=1) != first
    assert weights("d", data_seed=1) != first
    assert weights("e", evaluate_every=1, checkpoint_every=1, log_every=3) == first


def test_global_generators_and_threads_are_restored(configure: Any, tmp_path: Path) -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    train(configure(threads=2, steps=1), tmp_path / "run")
    assert steps_for_budget(configure(), 0.5) >= 1
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_sigterm_writes_a_checkpoint_and_prints_the_resume_command(
    configure: Any, tmp_path: Path, stop_at: Any, watcher: Any
) -> None:
    folder = tmp_path / "my run"
    with pytest.raises(Interrupted, match=r"stopped after step 2 of 4.*`qkflow train --resume '.*my run'`"):
        train(configure(), folder, callbacks=[stop_at(2)])
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000002"]
    recorder = watcher()
    assert train(None, folder, resume=True, callbacks=[recorder]).was_finished is False
    assert recorder.events[0] == ("start", 2)
    assert len(json.loads((folder / "environment.json").read_text())["resumed"]) == 1


def test_a_stop_during_an_evaluation_repeats_it_once(
    configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(evaluate_every=2, evaluate_batch=1)
    whole = train(config, tmp_path / "whole")
    evaluate, calls = Learner.evaluate, []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # the checkpoint after step 2
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*args, **options)

    monkeypatch.setattr(Learner, "evaluate", interrupted)
    with pytest.raises(Interrupted, match="after step 2"):
        train(config, tmp_path / "run")
    result = train(config, tmp_path / "run", resume=True)
    assert result.documents.tobytes() == whole.documents.tobytes()
    steps = [r["step"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "eval"]
    assert steps == [0, 2, 4]


def test_the_last_evaluation_can_use_test_documents(configure: Any, corpus: Corpus, tmp_path: Path) -> None:
    result = train(configure(final_split="test", evaluate_every=2), tmp_path / "run")
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    final = next(record for record in records if record["kind"] == "test")
    run = load_run(tmp_path / "run")
    on_test = evaluate(run.model, corpus.test, context=16)
    assert result.documents.tobytes() == on_test.documents.tobytes()
    assert result.metrics["bits_per_byte"] == final["bits_per_byte"] == on_test.bits_per_byte
    on_validation = evaluate(run.model, corpus.validation, context=16, limit=300)
    assert [r for r in records if r["kind"] == "eval"][-1]["bits_per_byte"] == on_validation.bits_per_byte


def test_a_resumed_run_evaluates_its_test_documents_once(
    configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(final_split="test", evaluate_every=2)
    whole = train(config, tmp_path / "whole")

    def stop(*_: object) -> None:
        raise Interrupted("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "write_documents", stop)
        with pytest.raises(Interrupted):
            train(config, tmp_path / "run")
    result = train(None, tmp_path / "run", resume=True)
    assert result.documents.tobytes() == whole.documents.tobytes()
    kinds = [record["kind"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert kinds.count("test") == 1


def test_a_recorded_evaluation_is_not_repeated(configure: Any, tmp_path: Path, watcher: Any) -> None:
    folder = tmp_path / "run"

    class Late(watcher):
        def on_evaluate(self, record: Mapping[str, Any]) -> None:
            if record["step"] == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="after step 2"):
        train(configure(evaluate_every=2), folder, callbacks=[Late()])
    recorder = watcher()
    train(None, folder, resume=True, callbacks=[recorder])
    assert recorder.events[:3] == [("start", 2), ("step", 3), ("step", 4)]


def test_metrics_are_synced_before_each_checkpoint(
    configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: [order.append(name), call(*args)][1]

    monkeypatch.setattr(loop.Metrics, "sync", noted("metrics", loop.Metrics.sync))
    monkeypatch.setattr(loop.checkpoint, "save", noted("checkpoint", loop.checkpoint.save))
    train(configure(checkpoint_every=2), tmp_path / "run")
    assert order == ["metrics", "checkpoint"] * 2


def test_a_resumed_run_uses_its_original_number_of_threads(
    configure: Any, tmp_path: Path, stopped_run: Any, stop_at: Any, at: Any
) -> None:
    folder = stopped_run(configure(), tmp_path / "run", 1)
    thread_counts: list[int] = []
    torch.set_num_threads(2)
    recorder = at(2, lambda model: thread_counts.append(torch.get_num_threads()))
    stopper = stop_at(2)
    with pytest.raises(Interrupted):
        train(None, folder, resume=True, callbacks=[recorder, stopper])
    assert thread_counts == [1]
    assert any("threads=2, the run was started with 1: using 1" in notice for notice in recorder.notices)
    recorder = at(3, lambda model: thread_counts.append(torch.get_num_threads()))
    train(None, folder, resume=True, callbacks=[recorder], cpu_threads=2)
    assert thread_counts == [1, 2]
    assert any("threads was 1 when the run started and is 2 now" in notice for notice in recorder.notices)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # from torch.compile
def test_a_compiled_run_keeps_parameter_names_and_resumes_bit_for_bit(
    configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_run: Any
) -> None:
    compile_model = Decoder.compile
    monkeypatch.setattr(Decoder, "compile", lambda self, **options: compile_model(self, backend="eager", **options))
    config = configure(compile=True, evaluate_every=2, model={"layers": 1})
    train(config, tmp_path / "whole")
    stopped_run(config, tmp_path / "run", 2)
    train(None, tmp_path / "run", resume=True)
    weights = [(tmp_path / name / "weights.safetensors").read_bytes() for name in ("whole", "run")]
    assert weights[0] == weights[1]
    assert load_run(tmp_path / "run").finished
