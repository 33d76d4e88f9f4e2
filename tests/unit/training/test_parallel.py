"""Two processes train the same model as one, and an event in one of them affects both."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qkflow.config import from_dict, to_dict
from qkflow.data import CorpusConfig, open_corpus
from qkflow.errors import Interrupted
from qkflow.io import locked
from qkflow.models import DecoderConfig
from qkflow.training import Callback, TrainConfig, checkpoint, load_run, read_metrics, read_recall, train
from qkflow.training.tensors import load_tensors

Numbers = Callable[[Path], dict[str, Any]]
KINDS = ("ddp", "fsdp")
TASK = "mqar:pairs=1+4,length=16,keys=6,values=3,train=60,validation=12,each=6"
CASES: dict[str, dict[str, Any]] = {
    "float32": {"steps": 16, "accumulate": 2, "batch": 8},
    "standard": {"steps": 16, "qk_ratio": 3.0, "evaluate_batch": 3},
    "qdelta": {"mechanism": "qdelta"},
    "kuramoto": {"mechanism": "kuramoto"},
    "coupled": {"mechanism": "coupled:sharing=layers", "crossing": False},
    "task": {"source": TASK, "accumulate": 4},
}
"""Configs for which two processes are compared with one; all but the first in float64."""
STOPPED = {"steps": 6, "dropout": 0.1, "checkpoint_every": 2, "evaluate_every": 2}
NO_DROPOUT = {**STOPPED, "dropout": 0.0}


def config(texts: Path, **changes: Any) -> dict[str, Any]:
    """Return the config of a small run; changes of the model are recognized by name."""
    corpus = CorpusConfig(source=str(changes.pop("source", texts)))
    data = open_corpus(corpus)
    shape = {"width": 16, "layers": 2, "heads": 2, "hidden": 24, "vocabulary": data.vocabulary}
    shape |= {name: changes.pop(name) for name in ("mechanism", "dropout") if name in changes}
    small = {"steps": 4, "context": data.context or 16, "batch": 4, "log_every": 1, "evaluate_tokens": 300}
    return to_dict(
        TrainConfig(data=corpus, model=DecoderConfig(**shape), device="cpu", threads=1, **{**small, **changes})
    )


def jobs(folder: Path, texts: Path) -> list[dict[str, Any]]:
    """Return all jobs of the two processes. The last one breaks their connection."""
    job_list: list[dict[str, Any]] = []

    def add(name: str, parallel: str | None = None, *, run: str = "", **job: Any) -> None:
        path = str(folder / (run or name))
        job_list.append({"name": name, "parallel": parallel, "folder": path, "config": config(texts), **job})

    for kind in KINDS:
        for name, changes in CASES.items():
            add(f"{name}-{kind}", kind, config=config(texts, **changes), double=name != "float32")
        stop = {"rank": 1, "step": 4, "kind": "stop"}
        stopped, no_dropout = config(texts, **STOPPED), config(texts, **NO_DROPOUT)
        add(f"uninterrupted-{kind}", kind, config=stopped)
        add(f"stopped-{kind}", kind, config=stopped, event=stop)
        add(f"resumed-{kind}", kind, run=f"stopped-{kind}", resume=True)
        add(f"two-to-one-{kind}", kind, config=no_dropout, event=stop)
        add(f"one-to-two-{kind}", kind, resume=True)
        diverging = config(texts, **{**NO_DROPOUT, "checkpoint_every": None, "evaluate_every": 9})
        add(f"diverging-{kind}", kind, config=diverging, event={"rank": 1, "step": 2, "kind": "nan"})
        add(f"indivisible-{kind}", kind, config=config(texts, batch=3))
        add(f"budget-{kind}", kind, budget=0.2)
    add("full-disk", "fsdp", config=config(texts, **STOPPED), event={"rank": 1, "step": 3, "kind": "full disk"})
    add("full-disk-resumed", "fsdp", run="full-disk", resume=True)
    add("stopped-early", "fsdp", config=config(texts, **STOPPED), event={"rank": 1, "step": 0, "kind": "stop"})
    add("stopped-early-resumed", "fsdp", run="stopped-early", resume=True)
    add(
        "fsdp-to-ddp-stopped",
        "fsdp",
        run="fsdp-to-ddp",
        config=config(texts, **NO_DROPOUT),
        event={"rank": 0, "step": 4, "kind": "stop"},
    )
    add("fsdp-to-ddp", "ddp", resume=True)
    command = ["train", str(texts), "--steps", "2", "--size", "100k", "--context", "16"]
    add("printed", command=[*command, "--batch", "4", "--out", str(folder / "printed")])
    budget = ["--size", "100k", "--context", "16", "--batch", "4", "--budget", "5s", "--out", str(folder / "printed")]
    add("restarted-budget", command=["train", str(texts), *budget], restarts=[0, 1])
    add(
        "restarted-stopped",
        "ddp",
        run="restarted",
        config=config(texts, **NO_DROPOUT),
        event={"rank": 0, "step": 4, "kind": "stop"},
    )
    add("restarted", "ddp", config=config(texts, **NO_DROPOUT), restarts=[0, 1])
    add("restarted-fsdp", "fsdp", run="restarted", resume=True)
    add("zero-budget", command=["train", str(texts), *budget[:-3], "0s", "--out", str(folder / "zero-budget")])
    add("refused", command=[*command, "--batch", "5", "--out", str(folder / "refused")])
    add("no-out", command=command)
    add("one-fails", "ddp", config=config(texts, **NO_DROPOUT), event={"rank": 1, "step": 3, "kind": "raise"})
    return job_list


@dataclass(frozen=True)
class Pair:
    """The results of two processes."""

    folder: Path
    texts: Path

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        """Return the result of a job for each process."""
        return [json.loads((self.folder / "results" / f"{name}.{rank}.json").read_text()) for rank in (0, 1)]

    def outcomes(self, name: str) -> list[Any]:
        return [result["outcome"] for result in self[name]]

    def single(self, name: str, changes: dict[str, Any], *, double: bool = False) -> Path:
        """Return the same run in one process."""
        folder = self.folder / f"single-{name}-{os.getpid()}"
        if not folder.exists():
            torch.set_default_dtype(torch.float64 if double else torch.float32)
            try:
                train(from_dict(TrainConfig, config(self.texts, **changes)), folder)
            finally:
                torch.set_default_dtype(torch.float32)
        return folder


class Stopper(Callback):
    def on_step(self, record: Any) -> None:
        if record["step"] == 4:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="session")
def suite_cache() -> str:
    """The cache of the test suite, with compiled kernels."""
    return os.environ["QKFLOW_CACHE"]


@pytest.fixture
def pair(suite_cache: str, texts: Path, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Pair:
    """Two processes that run all jobs once and are shared by all tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "pair"
    copied_texts = folder.with_name("pair-texts")
    with locked(folder.with_name("pair.lock"), wait=True):
        if not folder.exists():
            shutil.copytree(texts, copied_texts)
            run_jobs(folder, copied_texts, suite_cache)
    return Pair(folder, copied_texts)


def run_jobs(folder: Path, texts: Path, cache: str) -> None:
    (folder / "results").mkdir(parents=True)
    (folder / "jobs.json").write_text(json.dumps(jobs(folder, texts)))
    for kind in KINDS:  # started by one process, resumed by two
        with pytest.raises(Interrupted):
            train(
                from_dict(TrainConfig, config(texts, **NO_DROPOUT)),
                folder / f"one-to-two-{kind}",
                callbacks=[Stopper()],
            )
    environment = {**os.environ, "CORPORA": os.environ["QKFLOW_CACHE"], "QKFLOW_CACHE": cache, "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("two_process_worker.py")
    processes = [
        subprocess.Popen([sys.executable, "-W", "error", str(script), str(rank), str(folder)], env=environment)
        for rank in (0, 1)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]


def largest_differences(run: Path, other: Path) -> dict[str, float]:
    """Return the largest relative difference of each metric of two runs with the same batches."""
    differences: dict[str, float] = {}
    for a, b in zip(read_metrics(run / "metrics.jsonl"), read_metrics(other / "metrics.jsonl"), strict=True):
        assert (a["kind"], a["step"], a.get("batch")) == (b["kind"], b["step"], b.get("batch"))
        for name in ("loss", "grad_norm", "bits_per_byte", "accuracy"):
            if a.get(name):
                key = f"held-out {name}" if a["kind"] == "eval" else name
                differences[key] = max(differences.get(key, 0.0), abs(a[name] - b[name]) / abs(a[name]))
    return differences


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_the_same_model_as_one(pair: Pair, name: str, kind: str) -> None:
    assert pair.outcomes(f"{name}-{kind}") == ["finished", "finished"]
    double = name != "float32"
    one, two = pair.single(name, CASES[name], double=double), pair.folder / f"{name}-{kind}"
    differences = largest_differences(one, two)
    assert len(differences) >= 4
    assert max(differences.values()) < (1e-12 if double else 1e-6)
    weights, weights_of_two = load_tensors(one / "weights.safetensors"), load_tensors(two / "weights.safetensors")
    for key, tensor in weights.items():
        torch.testing.assert_close(weights_of_two[key], tensor, rtol=0, atol=1e-12 if double else 1e-5)
    documents = [np.load(folder / "documents.npy", allow_pickle=False) for folder in (one, two)]
    assert np.array_equal(documents[0]["tokens"], documents[1]["tokens"])
    np.testing.assert_allclose(documents[0]["nats"], documents[1]["nats"], rtol=1e-12 if double else 1e-5)
    assert read_recall(one) == read_recall(two)


@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_to_one_process_stops_both_and_the_run_resumes_bit_for_bit(
    pair: Pair, kind: str, numbers: Numbers
) -> None:
    """The processes draw different dropout masks, and the same ones after resuming."""
    assert pair.outcomes(f"stopped-{kind}") == ["Interrupted", "Interrupted"]
    assert "stopped after step 4 of 6" in pair[f"stopped-{kind}"][0]["message"]
    assert pair.outcomes(f"resumed-{kind}") == ["finished", "finished"]
    assert pair[f"resumed-{kind}"][0]["notices"] == []
    assert numbers(pair.folder / f"stopped-{kind}") == numbers(pair.folder / f"uninterrupted-{kind}")


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_resumes_a_run_of_two(pair: Pair, tmp_path: Path, watcher: Any, kind: str) -> None:
    folder, recorder = tmp_path / "run", watcher()
    shutil.copytree(pair.folder / f"two-to-one-{kind}", folder)
    before = load_run(folder)
    assert (before.step, before.finished) == (4, False)
    train(None, folder, resume=True, callbacks=[recorder])
    assert ("start", 4) in recorder.events
    assert any("processes was 2 when the run started and is 1 now" in notice for notice in recorder.notices)
    assert max(largest_differences(pair.single("no-dropout", NO_DROPOUT), folder).values()) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_resume_a_run_of_one(pair: Pair, kind: str) -> None:
    assert pair.outcomes(f"one-to-two-{kind}") == ["finished", "finished"]
    assert (
        max(largest_differences(pair.single("no-dropout", NO_DROPOUT), pair.folder / f"one-to-two-{kind}").values())
        < 1e-6
    )
    record = json.loads((pair.folder / f"one-to-two-{kind}" / "environment.json").read_text())
    assert (record["processes"], record["parallel"]) == (1, None)
    assert [(session["processes"], session["parallel"]) for session in record["resumed"]] == [(2, kind)]


def test_a_stop_before_the_first_step_writes_a_checkpoint(pair: Pair, numbers: Numbers) -> None:
    assert pair.outcomes("stopped-early") == ["Interrupted", "Interrupted"]
    assert "stopped after step 0 of 6, checkpoint written" in pair["stopped-early"][0]["message"]
    assert pair.outcomes("stopped-early-resumed") == ["finished", "finished"]
    assert numbers(pair.folder / "stopped-early") == numbers(pair.folder / "uninterrupted-fsdp")


def test_ddp_resumes_a_run_of_fsdp(pair: Pair) -> None:
    assert pair.outcomes("fsdp-to-ddp") == ["finished", "finished"]
    assert max(largest_differences(pair.single("no-dropout", NO_DROPOUT), pair.folder / "fsdp-to-ddp").values()) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_on_one_rank_stops_both(pair: Pair, kind: str) -> None:
    for result in pair[f"diverging-{kind}"]:
        assert result["outcome"] == "DivergenceError"
        assert "the loss of step 3 is not finite" in result["message"]
        assert "blocks.1.mechanism.value" in result["message"]


def test_a_full_disk_on_one_rank_stops_both_and_loses_nothing(pair: Pair, numbers: Numbers) -> None:
    for result in pair["full-disk"]:
        assert result["outcome"] == "DiskError"
        assert "process 1 could not write" in result["message"]
        assert "free some space, then run" in result["message"]
    assert pair.outcomes("full-disk-resumed") == ["finished", "finished"]
    assert numbers(pair.folder / "full-disk") == numbers(pair.folder / "uninterrupted-fsdp")
    assert not list((pair.folder / "full-disk" / "checkpoints").glob(".*"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_indivisible_batch_is_refused_on_both_ranks(pair: Pair, kind: str) -> None:
    message = "a batch of 3 sequences is not divisible among 2 processes: use --batch 2 or 4, or use 3 processes"
    assert [(result["outcome"], result["message"]) for result in pair[f"indivisible-{kind}"]] == [
        ("UsageError", message)
    ] * 2
    assert not (pair.folder / f"indivisible-{kind}").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_both_ranks_compute_the_same_number_of_steps_for_a_budget(pair: Pair, kind: str) -> None:
    first, second = pair.outcomes(f"budget-{kind}")
    assert first == second >= 1


def test_only_rank_0_prints(pair: Pair) -> None:
    first, second = pair["printed"]
    assert (first["outcome"], second["outcome"]) == (0, 0)
    assert "on 2 processes (ddp)" in first["stdout"]
    first, refused = pair["refused"]
    assert first["outcome"] == 2
    assert first["stderr"].count("is not divisible among 2 processes") == 1
    assert refused["outcome"] != 0
    assert "use --out RUN" in pair["no-out"][0]["stderr"]
    for silent in (second, refused, pair["no-out"][1]):
        assert (silent["stdout"], silent["stderr"]) == ("", "")


def test_a_restart_counted_by_one_machine_resumes_on_all(pair: Pair) -> None:
    assert pair.outcomes("restarted-stopped") == ["Interrupted", "Interrupted"]
    assert pair.outcomes("restarted") == ["finished", "finished"]
    assert max(largest_differences(pair.single("no-dropout", NO_DROPOUT), pair.folder / "restarted").values()) < 1e-6
    assert pair.outcomes("restarted-budget") == [0, 0]  # neither process measures the budget again
    assert "printed is finished (2 steps)" in " ".join(pair["restarted-budget"][0]["stdout"].split())


def test_a_zero_budget_is_refused_on_both_ranks_and_printed_once(pair: Pair) -> None:
    first, second = pair["zero-budget"]
    assert (first["outcome"], second["outcome"] != 0) == (2, True)
    assert first["stderr"].count("--budget must be a number and a unit") == 1
    assert (second["stdout"], second["stderr"]) == ("", "")


def test_a_process_that_fails_alone_does_not_block_the_other(pair: Pair) -> None:
    other, failed = pair["one-fails"]
    assert failed["message"] == "an error in one process"
    assert other["outcome"] == "LostProcessError"
    assert "another process of this run has exited" in other["message"]


def test_torch_reads_sharded_checkpoints_without_pickle(pair: Pair) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    path = checkpoint.find(pair.folder / "two-to-one-fsdp")[-1]
    loaded = checkpoint.load(path)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    assert len(list(path.iterdir())) == 5
    tensors = {f"weights.{name}": torch.zeros_like(tensor) for name, tensor in loaded.weights.items()}
    with pytest.warns(UserWarning, match="single process"):
        load(tensors, storage_reader=HuggingFaceStorageReader(path=str(path)), no_dist=True)
    assert len(tensors) > 10
    for name, tensor in loaded.weights.items():
        assert torch.equal(tensors[f"weights.{name}"], tensor)


@pytest.mark.parametrize("damage", ["flipped", "missing", "pickle", "unexpected"])
def test_a_damaged_shard_is_detected_and_the_previous_checkpoint_is_used(
    pair: Pair, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(pair.folder / "two-to-one-fsdp", folder)
    before, newest = checkpoint.find(folder)
    shard = newest / "shard-00002-model-00001-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    if damage == "missing":
        shard.unlink()
    elif damage == "unexpected":
        shard = newest / "shard-00003-model-00001-of-00002.safetensors"
        shard.write_bytes(content)
    else:
        content[len(content) // 2] ^= 1
        shard.write_bytes(b"\x80\x04\x95" + content if damage == "pickle" else content)
    loaded = load_run(folder)
    assert loaded.step == int(before.name[5:]) == 2
    assert str(shard) in loaded.notices[0]
