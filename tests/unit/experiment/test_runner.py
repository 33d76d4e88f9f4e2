"""Running, stopping and resuming a study."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkflow.data import CorpusConfig
from qkflow.errors import BusyError, DiskError, DivergenceError, Interrupted, UsageError
from qkflow.experiment import worker
from qkflow.experiment.decisions import Decisions
from qkflow.experiment.design import TUNING_SEED
from qkflow.experiment.planner import make_design
from qkflow.experiment.run_status import read_status
from qkflow.experiment.runner import run_experiment
from qkflow.experiment.spec import ExperimentSpec
from qkflow.experiment.study_dir import read_design, write_design
from qkflow.experiment.summary import read_result
from qkflow.io import checksum, locked
from qkflow.training import read_metrics
from qkflow.training.run_dir import finished

Ask = Callable[..., ExperimentSpec]


def losses(study: Path) -> dict[str, float]:
    """The last evaluation of every run."""
    found = {}
    for folder in sorted(path.parent for path in study.glob("*/*/*/config.json")):
        result = finished(folder)
        if result is not None:
            found[str(folder.relative_to(study))] = result.metrics["bits_per_byte"]
    return found


def broken(monkeypatch: pytest.MonkeyPatch, error: Exception, *, where: str, times: int = 10**9) -> list[str]:
    """Training raises in folders whose path holds `where`, so many times; the folders it was begun in."""
    begun: list[str] = []
    real = worker.train

    def train(config: Any, out: Path, **options: Any) -> Any:
        begun.append("/".join(out.parts[-3:]))
        if where in str(out) and sum(where in path for path in begun) <= times:
            raise error
        return real(config, out, **options)

    monkeypatch.setattr(worker, "train", train)
    return begun


def test_a_study_is_a_folder_of_finished_runs_and_its_design(
    ask: Ask, inline: Any, watcher: Any, tmp_path: Path
) -> None:
    study, executor = tmp_path / "study", inline()
    digests: set[str] = set()
    executor.before = lambda order: digests.add(checksum(study / "design.json"))
    result = run_experiment(ask(), study, executor=executor, observer=watcher, command=("qkflow", "compare"))
    assert result == read_result(study)
    assert [verdict.arm for verdict in result.verdicts] == ["differential"]
    design = read_design(study)
    assert digests == {checksum(study / "design.json")}  # there before the first run, and as it was after the last
    assert read_design(study) == design == watcher.designs[0]
    assert len(losses(study)) == 4
    names = {path.name for path in (study / "runs" / "differential" / "seed-1").iterdir()}
    assert names == {
        "attempt.json",
        "checksums.json",
        "config.json",
        "documents.npy",
        "environment.json",
        "lock",
        "metrics.jsonl",
        "tokenizer.json",
        "weights.safetensors",
    }
    record = read_status(study / "runs" / "standard" / "seed-0")
    assert (record.attempts, record.failed, record.failed_for_good) == (1, None, False)
    assert record.peak_bytes is not None
    assert set(json.loads((study / "corpus.json").read_text())) == {"notes", "excerpts"}
    last = watcher.progress[-1]
    assert (last.finished, last.failed, last.runs) == (4, 0, 4)
    assert last.items == last.all_items == 4 * 20 * 64
    assert last.running == ()
    assert not watcher.failures


def test_arms_of_one_seed_see_the_same_batches(inline: Any, finish_study: Any, tmp_path: Path) -> None:
    finish_study(tmp_path / "study")

    def batches(arm: str, seed: int) -> list[str]:
        records = read_metrics(tmp_path / "study" / "runs" / arm / f"seed-{seed}" / "metrics.jsonl")
        return [record["batch"] for record in records if record["kind"] == "train"]

    assert len(batches("standard", 0)) == 20
    assert batches("standard", 0) == batches("differential", 0) != batches("standard", 1)


def test_a_finished_study_is_not_changed(ask: Ask, inline: Any, finish_study: Any, tmp_path: Path) -> None:
    study = tmp_path / "study"
    finish_study(study)
    before = {path: path.stat().st_mtime_ns for path in study.rglob("*") if path.is_file() and path.name != "lock"}
    for spec in (None, ask()):
        again = inline()
        run_experiment(spec, study, executor=again)
        assert not again.calls
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_another_spec_for_the_same_folder_is_refused_with_the_differences(
    ask: Ask, inline: Any, tmp_path: Path
) -> None:
    run_experiment(ask(seeds=1), tmp_path / "study", executor=inline())
    with pytest.raises(UsageError, match="holds a different study") as caught:
        run_experiment(ask(seeds=3, arms=("standard", "standard:window=8")), tmp_path / "study", executor=inline())
    assert str(caught.value).splitlines()[1:] == [
        "  arms: standard,differential in the study, standard,standard:window=8 requested",
        "  seeds: 1 in the study, 3 requested",
    ]


def test_other_folders_are_refused_and_not_changed(ask: Ask, inline: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match=r"is not empty \(thesis.tex\)"):
        run_experiment(ask(), other, executor=inline())
    with pytest.raises(UsageError, match="is a file"):
        run_experiment(ask(), other / "thesis.tex", executor=inline())
    with pytest.raises(UsageError, match="holds no study to resume"):
        run_experiment(None, tmp_path / "none", executor=inline())
    assert sorted(tmp_path.iterdir()) == [other]
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]


def test_a_failed_design_leaves_no_folder(ask: Ask, inline: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'differential'"):
        run_experiment(ask(arms=("standard", "diferential")), tmp_path / "study", executor=inline())
    assert not list(tmp_path.iterdir())


def test_leftovers_of_a_killed_design_are_removed(ask: Ask, inline: Any, tmp_path: Path) -> None:
    study = tmp_path / "study"
    study.mkdir()
    for name in ("lock", ".design.json.123.tmp"):
        (study / name).write_text("1")
    run_experiment(ask(seeds=1), study, executor=inline())
    assert len(losses(study)) == 2
    assert not list(study.glob(".*.tmp"))


def test_a_study_locked_by_another_process_is_refused(ask: Ask, inline: Any, tmp_path: Path) -> None:
    with locked(tmp_path / "study" / "lock"), pytest.raises(BusyError, match="in use by another process"):
        run_experiment(ask(), tmp_path / "study", executor=inline())
    assert (tmp_path / "study" / "lock").exists()  # it is the other's


def test_a_changed_corpus_is_refused(ask: Ask, inline: Any, tmp_path: Path, texts: Path) -> None:
    copy = tmp_path / "texts.jsonl"
    shutil.copy(texts, copy)
    spec = ask(data=CorpusConfig(source=str(copy)), seeds=1)
    run_experiment(spec, tmp_path / "study", executor=inline())
    copy.write_text(texts.read_text() + json.dumps({"text": "other words"}) + "\n")
    with pytest.raises(UsageError, match=r"has changed since .* was started"):
        run_experiment(None, tmp_path / "study", executor=inline())


def test_a_run_that_crashes_is_tried_three_times_and_does_not_stop_the_others(
    ask: Ask, inline: Any, watcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = tmp_path / "study"
    with monkeypatch.context() as patch:
        begun = broken(patch, RuntimeError("no\nmemory"), where="differential/seed-0")
        run_experiment(ask(), study, executor=inline(), observer=watcher)
    assert begun.count("runs/differential/seed-0") == 3
    assert watcher.failures == [("differential seed 0", "RuntimeError: no memory")]
    assert [note for note in watcher.notices if "crashed" in note] == [
        f"differential seed 0 crashed (RuntimeError: no memory): attempt {number} of 3 follows" for number in (2, 3)
    ]
    assert len(losses(study)) == 3
    record = read_status(study / "runs" / "differential" / "seed-0")
    assert (record.failed, record.failed_for_good) == ("RuntimeError: no memory", False)
    assert watcher.progress[-1].failed == 1

    run_experiment(None, study, executor=inline())  # now nothing is broken
    assert len(losses(study)) == 4
    assert read_status(study / "runs" / "differential" / "seed-0").failed is None


def test_a_run_that_crashes_once_is_retried_in_the_same_session(
    ask: Ask, inline: Any, watcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch, OSError(5, "the network went away"), where="standard/seed-1", times=1)
    run_experiment(ask(), tmp_path / "study", executor=inline(), observer=watcher)
    assert not watcher.failures
    assert len(losses(tmp_path / "study")) == 4


def test_a_run_that_diverges_is_tried_once_and_never_again(
    ask: Ask, inline: Any, watcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, error = tmp_path / "study", DivergenceError("the loss of step 3 is not finite: all. Use a lower --lr")
    begun = broken(monkeypatch, error, where="differential")
    run_experiment(ask(), study, executor=inline(), observer=watcher)
    assert sum("differential" in path for path in begun) == 2
    assert watcher.failures == [(f"differential seed {n}", "the loss of step 3 is not finite: all") for n in (0, 1)]
    assert read_status(study / "runs" / "differential" / "seed-0").failed_for_good
    run_experiment(None, study, executor=inline(), observer=watcher)
    assert sum("differential" in path for path in begun) == 2
    assert len(watcher.failures) == 4  # told again


def test_a_full_disk_stops_the_study_with_advice(
    ask: Ask, inline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = tmp_path / "study"
    with monkeypatch.context() as patch:
        begun = broken(patch, DiskError(28, "could not write x (No space left on device)"), where="seed-0")
        with pytest.raises(DiskError) as caught:
            run_experiment(ask(), study, executor=inline())
    assert caught.value.errno == 28
    assert caught.value.strerror == (
        "could not write x (No space left on device): free some space, then resume with "
        f"`qkflow compare --resume {study}`"
    )
    assert len(begun) == 1
    run_experiment(None, study, executor=inline())
    assert len(losses(study)) == 4


def test_a_stopped_study_prints_the_resume_command_and_resumes(
    ask: Ask, inline: Any, finish_study: Any, tmp_path: Path
) -> None:
    study, executor = tmp_path / "a study", inline()
    finish_study(tmp_path / "whole")
    executor.before = lambda order: os.kill(os.getpid(), signal.SIGTERM) if len(executor.calls) == 2 else None
    with pytest.raises(
        Interrupted, match=r"stopped with \d of 4 runs finished: resume with `qkflow compare --resume '"
    ) as caught:
        run_experiment(ask(), study, executor=executor)
    assert caught.value.signal == signal.SIGTERM
    assert len(losses(study)) < 4
    run_experiment(None, study, executor=inline())
    assert losses(study) == losses(tmp_path / "whole")


def test_every_arm_uses_its_best_learning_rate(ask: Ask, inline: Any, watcher: Any, tmp_path: Path) -> None:
    study = tmp_path / "study"
    spec = ask(learning_rates=(1e-5, 1e-2, 1e-4), seeds=1, tokens=80 * 64)
    run_experiment(spec, study, executor=inline(), observer=watcher)
    record = json.loads((study / "tuning.json").read_text())
    for arm in ("standard", "differential"):
        assert record[arm]["chosen"] == 1e-2
        bits = {row["lr"]: row["loss"] for row in record[arm]["tried"]}
        assert bits[1e-2] == min(bits.values())
        assert len(set(bits.values())) == 3
        config = json.loads((study / "runs" / arm / "seed-0" / "config.json").read_text())
        assert (config["lr"], config["steps"], config["seed"]) == (1e-2, 80, 0)
        tuning = json.loads((study / "tuning" / arm / "lr-1e-05" / "config.json").read_text())
        assert (tuning["lr"], tuning["steps"], tuning["seed"]) == (1e-5, 20, TUNING_SEED)
    assert watcher.progress[-1].runs == 8
    again = inline()
    run_experiment(None, study, executor=again)
    assert not again.calls


def test_failed_rates_are_skipped_and_an_arm_without_any_is_reported(
    ask: Ask, inline: Any, watcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = tmp_path / "study"
    with monkeypatch.context() as patch:
        real = worker.train

        def train(config: Any, out: Path, **options: Any) -> Any:
            if "tuning/differential" in str(out):
                raise RuntimeError("it broke")
            if "lr-0.01" in str(out):
                raise DivergenceError("too fast")
            return real(config, out, **options)

        patch.setattr(worker, "train", train)
        arms = ("standard", "differential", "standard:window=8")
        spec = ask(arms=arms, learning_rates=(1e-2, 1e-4), seeds=1)
        result = run_experiment(spec, study, executor=inline(), observer=watcher)
    config = json.loads((study / "runs" / "standard" / "seed-0" / "config.json").read_text())
    assert config["lr"] == 1e-4
    assert "differential is not compared: every learning-rate trial failed" in watcher.notices
    assert result.arms[1].failures == ("every learning-rate trial failed",)
    assert [verdict.kind for verdict in result.verdicts] == ["undecided", "undecided"]
    assert [arm.seeds for arm in result.arms] == [(0,), (), (0,)]
    assert ("standard lr-0.01", "too fast") in watcher.failures
    again = inline()
    run_experiment(None, study, executor=again)  # the choice stands, though nothing is broken any more
    assert not again.calls


def test_an_unfinished_run_of_another_config_is_refused_and_the_others_finish(
    inline: Any, finish_study: Any, edit_decisions: Any, watcher: Any, tmp_path: Path
) -> None:
    study = tmp_path / "study"
    finish_study(study)
    edit_decisions(study, lambda records: [record for record in records if record["kind"] in ("design", "round")])
    folder = study / "runs" / "standard" / "seed-0"
    (folder / "weights.safetensors").unlink()
    shutil.rmtree(study / "runs" / "differential" / "seed-1")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "lr": 1.0}))
    run_experiment(None, study, executor=inline(), observer=watcher)
    assert [name for name, _ in watcher.failures] == ["standard seed 0"]
    assert "the config differs from" in watcher.failures[0][1]
    assert len(losses(study)) == 3


def test_a_run_with_damaged_weights_is_trained_again(inline: Any, finish_study: Any, tmp_path: Path) -> None:
    study = tmp_path / "study"
    finish_study(study)
    weights = study / "runs" / "standard" / "seed-0" / "weights.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    run_experiment(None, study, executor=inline())
    assert weights.read_bytes() == content


def test_all_arms_score_the_same_documents(inline: Any, finish_study: Any, tmp_path: Path) -> None:
    study = tmp_path / "study"
    finish_study(study)
    found = [np.load(path) for path in sorted(study.glob("runs/*/*/documents.npy"))]
    assert len(found) == 4
    assert len(found[0]) >= 2
    assert all((one["bytes"] == found[0]["bytes"]).all() for one in found)


def test_a_run_fails_if_its_lock_stays_held(ask: Ask, inline: Any, watcher: Any, tmp_path: Path) -> None:
    study = tmp_path / "study"
    with locked(study / "runs" / "standard" / "seed-0" / "lock"):
        design = make_design(ask(seeds=1), inline(), notice=lambda text: None)
        write_design(study, design)
        Decisions(study).append("design", {"sha256_design": checksum(study / "design.json")})
        run_experiment(None, study, executor=inline(), observer=watcher)
    assert [name for name, _ in watcher.failures] == ["standard seed 0"]
    assert "in use by another process" in watcher.failures[0][1]
    assert not read_status(study / "runs" / "standard" / "seed-0").failed_for_good
    run_experiment(None, study, executor=inline())
    assert len(losses(study)) == 2
    assert replace(design, command=()) == read_design(study)
