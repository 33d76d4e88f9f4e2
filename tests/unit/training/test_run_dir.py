"""The run folder: starting, resuming, loading, and errors."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qkflow.data import CorpusConfig
from qkflow.errors import BusyError, CheckpointError, UsageError
from qkflow.io import locked
from qkflow.training import load_run, train
from qkflow.training.evaluate import DOCUMENT
from qkflow.training.run_dir import read_documents, write_documents


def test_a_folder_in_use_is_refused(configure: Any, tmp_path: Path) -> None:
    with locked(tmp_path / "run" / "lock"), pytest.raises(BusyError, match="in use by another process"):
        train(configure(), tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["lock"]


def test_a_folder_that_holds_a_run_is_refused(configure: Any, tmp_path: Path, stopped_run: Any) -> None:
    stopped_run(configure(), tmp_path / "run", 1)
    with pytest.raises(UsageError, match="already holds a run: use `qkflow train --resume"):
        train(configure(), tmp_path / "run")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        train(configure(), tmp_path / "file")


def test_resuming_needs_a_run_and_starting_needs_a_config(configure: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        train(None, tmp_path / "none", resume=True)
    assert not (tmp_path / "none").exists()
    with pytest.raises(UsageError, match="holds no run"):
        train(None, tmp_path, resume=True)
    with pytest.raises(UsageError, match="a new run needs a config"):
        train(None, tmp_path / "none")


def test_another_config_is_refused(configure: Any, tmp_path: Path, stopped_run: Any) -> None:
    folder = stopped_run(configure(), tmp_path / "run", 1)
    with pytest.raises(UsageError, match="the config differs from that of"):
        train(configure(lr=1e-4), folder, resume=True)
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, "lr": 1e-4}))
    with pytest.raises(UsageError, match="is not the config of step-00000001"):
        train(None, folder, resume=True)
    (folder / "config.json").write_text(json.dumps({**data, "speed": 1}))
    with pytest.raises(UsageError, match="unknown config key 'speed'"):
        train(None, folder, resume=True)
    (folder / "config.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read as JSON"):
        train(None, folder, resume=True)


def test_changed_data_is_refused(configure: Any, texts: Path, tmp_path: Path, stopped_run: Any) -> None:
    shutil.copytree(texts, tmp_path / "texts")
    config = dataclasses.replace(configure(), data=CorpusConfig(source=str(tmp_path / "texts")))
    folder = stopped_run(config, tmp_path / "run", 1)
    (tmp_path / "texts" / "1.txt").write_text("something else " * 30)
    with pytest.raises(UsageError, match=r"has changed since"):
        train(None, folder, resume=True)


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"model": {"vocabulary": 100}}, "vocabulary of 100, but the corpus texts has 257"),
        ({"batch": 10_000}, "10000 is too large"),
        ({"context": 10**6}, "lower --context"),
    ],
)
def test_settings_that_do_not_fit_the_corpus_are_refused_without_creating_a_folder(
    configure: Any, tmp_path: Path, changes: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(UsageError, match=fragment):
        train(configure(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_load_run_reads_final_weights_or_the_latest_checkpoint(
    configure: Any, tmp_path: Path, stopped_run: Any
) -> None:
    folder = stopped_run(configure(), tmp_path / "run", 2)
    loaded = load_run(folder)
    assert (loaded.step, loaded.finished, loaded.notices, loaded.model.training) == (2, False, (), False)
    train(None, folder, resume=True)
    loaded = load_run(folder)
    assert (loaded.step, loaded.finished, loaded.config) == (4, True, configure())
    (folder / "weights.safetensors").write_bytes(b"nonsense")
    loaded = load_run(folder)
    assert (loaded.step, loaded.finished, len(loaded.notices)) == (4, False, 1)


def test_load_run_refuses_other_files(configure: Any, tmp_path: Path, stopped_run: Any) -> None:
    torch.save({"a": torch.zeros(3)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="can run code when it is opened"):
        load_run(tmp_path / "model.pt")
    with pytest.raises(UsageError, match="holds no run"):
        load_run(tmp_path)
    folder = stopped_run(configure(), tmp_path / "run", 1)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        load_run(folder)


def test_pickled_documents_are_refused(configure: Any, tmp_path: Path) -> None:
    train(configure(), tmp_path / "run")
    file = tmp_path / "run" / "documents.npy"
    whole = file.read_bytes()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert not train(None, tmp_path / "run", resume=True).was_finished
    assert file.read_bytes() == whole


def test_temporary_files_of_a_killed_process_are_removed(configure: Any, tmp_path: Path, stopped_run: Any) -> None:
    folder = stopped_run(configure(), tmp_path / "run", 1)
    (folder / "checkpoints" / ".step-00000002.77.tmp").mkdir()
    (folder / ".weights.safetensors.77.tmp").touch()
    train(None, folder, resume=True)
    assert not list(folder.rglob(".*"))


def test_a_finished_run_is_not_changed(configure: Any, tmp_path: Path, watcher: Any) -> None:
    train(configure(), tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    recorder = watcher()
    result = train(None, tmp_path / "run", resume=True, callbacks=[recorder])
    assert result.was_finished
    assert result.step == 4
    assert recorder.events == [("notice", f"{tmp_path / 'run'} is finished (4 steps): nothing to do")]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


@pytest.mark.parametrize("name", ["weights.safetensors", "documents.npy"])
def test_damaged_result_files_of_a_finished_run_are_restored(configure: Any, tmp_path: Path, name: str) -> None:
    train(configure(), tmp_path / "run")
    file = tmp_path / "run" / name
    whole = file.read_bytes()
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    file.write_bytes(whole[:-3])
    assert not train(None, tmp_path / "run", resume=True).was_finished
    assert file.read_bytes() == whole
    file.unlink()
    assert not train(None, tmp_path / "run", resume=True).was_finished
    assert file.read_bytes() == whole
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics


def test_document_losses_with_a_damaged_header_are_none(tmp_path: Path) -> None:
    path = tmp_path / "documents.npy"
    write_documents(path, np.zeros(3, DOCUMENT))
    content = path.read_bytes()
    assert read_documents(path) is not None
    for damaged in (content.replace(b"}", b" "), content[:-1], b""):
        path.write_bytes(damaged)
        assert read_documents(path) is None
