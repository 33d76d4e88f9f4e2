"""Two processes are one: the same batches, the same numbers, and whatever happens to one of them happens to both."""

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
"""What both kinds of sharing are held to one process with: in float64, where rounding hides nothing, but one."""
STOPPED = {"steps": 6, "dropout": 0.1, "checkpoint_every": 2, "evaluate_every": 2}
STEADY = {**STOPPED, "dropout": 0.0}


def config(texts: Path, **changes: Any) -> dict[str, Any]:
    """A small run; what belongs to its model is sorted out."""
    corpus = CorpusConfig(source=str(changes.pop("source", texts)))
    validate_input = open_corpus(corpus)
    shape = {"width": 16, "layers": 2, "heads": 2, "hidden": 24, "vocabulary": validate_input.vocabulary}
    shape |= {name: changes.pop(name) for name in ("mechanism", "dropout") if name in changes}
    small = {"steps": 4, "context": validate_input.context or 16, "batch": 4, "log_every": 1, "evaluate_tokens": 300}
    return to_dict(
        TrainConfig(data=corpus, model=DecoderConfig(**shape), device="cpu", threads=1, **{**small, **changes})
    )


def orders(place: Path, texts: Path) -> list[dict[str, Any]]:
    """Everything that the two processes are to do. What breaks their bond comes last."""
    made: list[dict[str, Any]] = []

    def add(name: str, parallel: str | None = None, *, folder: str = "", **order: Any) -> None:
        run = str(place / (folder or name))
        made.append({"name": name, "parallel": parallel, "folder": run, "config": config(texts), **order})

    for kind in KINDS:
        for name, changes in CASES.items():
            add(f"{name}-{kind}", kind, config=config(texts, **changes), double=name != "float32")
        stop = {"rank": 1, "step": 4, "what": "stop"}
        stopped, steady = config(texts, **STOPPED), config(texts, **STEADY)
        add(f"whole-{kind}", kind, config=stopped)
        add(f"stopped-{kind}", kind, config=stopped, act=stop)
        add(f"resumed-{kind}", kind, folder=f"stopped-{kind}", resume=True)
        add(f"fewer-{kind}", kind, config=steady, act=stop)
        add(f"more-{kind}", kind, resume=True)
        spoilt = config(texts, **{**STEADY, "checkpoint_every": None, "evaluate_every": 9})
        add(f"spoilt-{kind}", kind, config=spoilt, act={"rank": 1, "step": 2, "what": "nan"})
        add(f"uneven-{kind}", kind, config=config(texts, batch=3))
        add(f"budget-{kind}", kind, budget=0.2)
    add("full", "fsdp", config=config(texts, **STOPPED), act={"rank": 1, "step": 3, "what": "room"})
    add("emptied", "fsdp", folder="full", resume=True)
    add("early", "fsdp", config=config(texts, **STOPPED), act={"rank": 1, "step": 0, "what": "stop"})
    add("late", "fsdp", folder="early", resume=True)
    add("begun", "fsdp", folder="crossed", config=config(texts, **STEADY), act={"rank": 0, "step": 4, "what": "stop"})
    add("crossed", "ddp", resume=True)
    run = ["train", str(texts), "--steps", "2", "--size", "100k", "--context", "16"]
    add("spoken", command=[*run, "--batch", "4", "--out", str(place / "spoken")])
    timed = ["--size", "100k", "--context", "16", "--batch", "4", "--budget", "5s", "--out", str(place / "spoken")]
    add("timed", command=["train", str(texts), *timed], restarts=[0, 1])
    add("cut", "ddp", folder="again", config=config(texts, **STEADY), act={"rank": 0, "step": 4, "what": "stop"})
    add("again", "ddp", config=config(texts, **STEADY), restarts=[0, 1])
    add("changed", "fsdp", folder="again", resume=True)
    add("worthless", command=["train", str(texts), *timed[:-3], "0s", "--out", str(place / "worthless")])
    add("refused", command=[*run, "--batch", "5", "--out", str(place / "refused")])
    add("homeless", command=run)
    add("alone", "ddp", config=config(texts, **STEADY), act={"rank": 1, "step": 3, "what": "raise"})
    return made


@dataclass(frozen=True)
class Pair:
    """What two processes did."""

    place: Path
    texts: Path

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        """How an order went, for each process."""
        return [json.loads((self.place / "answers" / f"{name}.{rank}.json").read_text()) for rank in (0, 1)]

    def outcomes(self, name: str) -> list[Any]:
        return [answer["outcome"] for answer in self[name]]

    def single(self, name: str, changes: dict[str, Any], *, double: bool = False) -> Path:
        """The same run in one process."""
        folder = self.place / f"single-{name}-{os.getpid()}"
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
    """Where kernels may have been built already."""
    return os.environ["QKFLOW_CACHE"]


@pytest.fixture
def pair(suite_cache: str, texts: Path, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Pair:
    """The two processes, which all who test share: they run once."""
    base = tmp_path_factory.getbasetemp()
    place = (base if worker_id == "master" else base.parent) / "pair"
    with locked(place.with_name("pair.lock"), wait=True):
        if not place.exists():
            here = place.with_name("pair-texts")
            shutil.copytree(texts, here)
            start(place, here, suite_cache)
    return Pair(place, place.with_name("pair-texts"))


def start(place: Path, texts: Path, cache: str) -> None:
    (place / "answers").mkdir(parents=True)
    (place / "orders.json").write_text(json.dumps(orders(place, texts)))
    for kind in KINDS:  # what one process began and both go on with
        with pytest.raises(Interrupted):
            train(from_dict(TrainConfig, config(texts, **STEADY)), place / f"more-{kind}", callbacks=[Stopper()])
    environment = {**os.environ, "CORPORA": os.environ["QKFLOW_CACHE"], "QKFLOW_CACHE": cache, "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("pair.py")
    both = [
        subprocess.Popen([sys.executable, "-W", "error", str(script), str(rank), str(place)], env=environment)
        for rank in (0, 1)
    ]
    assert [process.wait(timeout=300) for process in both] == [0, 0]


def drift(one: Path, other: Path) -> dict[str, float]:
    """How far two runs are apart at most, relatively; the batches have to be the same."""
    found: dict[str, float] = {}
    for a, b in zip(read_metrics(one / "metrics.jsonl"), read_metrics(other / "metrics.jsonl"), strict=True):
        assert (a["kind"], a["step"], a.get("batch")) == (b["kind"], b["step"], b.get("batch"))
        for name in ("loss", "grad_norm", "bits_per_byte", "accuracy"):
            if a.get(name):
                key = f"held-out {name}" if a["kind"] == "eval" else name
                found[key] = max(found.get(key, 0.0), abs(a[name] - b[name]) / abs(a[name]))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_the_same_model_as_one(pair: Pair, name: str, kind: str) -> None:
    assert pair.outcomes(f"{name}-{kind}") == ["finished", "finished"]
    double = name != "float32"
    one, two = pair.single(name, CASES[name], double=double), pair.place / f"{name}-{kind}"
    apart = drift(one, two)
    assert len(apart) >= 4
    assert max(apart.values()) < (1e-12 if double else 1e-6)
    weights, others = load_tensors(one / "weights.safetensors"), load_tensors(two / "weights.safetensors")
    for key, tensor in weights.items():
        torch.testing.assert_close(others[key], tensor, rtol=0, atol=1e-12 if double else 1e-5)
    documents = [np.load(folder / "documents.npy", allow_pickle=False) for folder in (one, two)]
    assert np.array_equal(documents[0]["tokens"], documents[1]["tokens"])
    np.testing.assert_allclose(documents[0]["nats"], documents[1]["nats"], rtol=1e-12 if double else 1e-5)
    assert read_recall(one) == read_recall(two)


@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_to_one_process_stops_both_and_the_run_resumes_bit_for_bit(
    pair: Pair, kind: str, numbers: Numbers
) -> None:
    """With dropout: the processes draw masks of their own, and draw them again."""
    assert pair.outcomes(f"stopped-{kind}") == ["Interrupted", "Interrupted"]
    assert "stopped after step 4 of 6" in pair[f"stopped-{kind}"][0]["message"]
    assert pair.outcomes(f"resumed-{kind}") == ["finished", "finished"]
    assert pair[f"resumed-{kind}"][0]["notices"] == []
    assert numbers(pair.place / f"stopped-{kind}") == numbers(pair.place / f"whole-{kind}")


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_resumes_a_run_of_two(pair: Pair, tmp_path: Path, watcher: Any, kind: str) -> None:
    folder, recorder = tmp_path / "run", watcher()
    shutil.copytree(pair.place / f"fewer-{kind}", folder)
    before = load_run(folder)
    assert (before.step, before.finished) == (4, False)
    train(None, folder, resume=True, callbacks=[recorder])
    assert ("start", 4) in recorder.events
    assert any("processes was 2 when the run started and is 1 now" in notice for notice in recorder.notices)
    assert max(drift(pair.single("steady", STEADY), folder).values()) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_resume_a_run_of_one(pair: Pair, kind: str) -> None:
    assert pair.outcomes(f"more-{kind}") == ["finished", "finished"]
    assert max(drift(pair.single("steady", STEADY), pair.place / f"more-{kind}").values()) < 1e-6
    record = json.loads((pair.place / f"more-{kind}" / "environment.json").read_text())
    assert (record["processes"], record["parallel"]) == (1, None)
    assert [(session["processes"], session["parallel"]) for session in record["resumed"]] == [(2, kind)]


def test_a_stop_before_the_first_step_writes_a_checkpoint(pair: Pair, numbers: Numbers) -> None:
    assert pair.outcomes("early") == ["Interrupted", "Interrupted"]
    assert "stopped after step 0 of 6, checkpoint written" in pair["early"][0]["message"]
    assert pair.outcomes("late") == ["finished", "finished"]
    assert numbers(pair.place / "early") == numbers(pair.place / "whole-fsdp")


def test_ddp_resumes_a_run_of_fsdp(pair: Pair) -> None:
    assert pair.outcomes("crossed") == ["finished", "finished"]
    assert max(drift(pair.single("steady", STEADY), pair.place / "crossed").values()) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_on_one_rank_stops_both(pair: Pair, kind: str) -> None:
    for answer in pair[f"spoilt-{kind}"]:
        assert answer["outcome"] == "DivergenceError"
        assert "the loss of step 3 is not finite" in answer["message"]
        assert "blocks.1.mechanism.value" in answer["message"]


def test_a_full_disk_on_one_rank_stops_both_and_loses_nothing(pair: Pair, numbers: Numbers) -> None:
    for answer in pair["full"]:
        assert answer["outcome"] == "DiskError"
        assert "process 1 could not write" in answer["message"]
        assert "free some space, then run" in answer["message"]
    assert pair.outcomes("emptied") == ["finished", "finished"]
    assert numbers(pair.place / "full") == numbers(pair.place / "whole-fsdp")
    assert not list((pair.place / "full" / "checkpoints").glob(".*"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_indivisible_batch_is_refused_on_both_ranks(pair: Pair, kind: str) -> None:
    message = "a batch of 3 sequences is not divisible among 2 processes: use --batch 2 or 4, or use 3 processes"
    assert [(answer["outcome"], answer["message"]) for answer in pair[f"uneven-{kind}"]] == [
        ("UsageError", message)
    ] * 2
    assert not (pair.place / f"uneven-{kind}").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_both_ranks_compute_the_same_number_of_steps_for_a_budget(pair: Pair, kind: str) -> None:
    first, second = pair.outcomes(f"budget-{kind}")
    assert first == second >= 1


def test_only_rank_0_prints(pair: Pair) -> None:
    first, second = pair["spoken"]
    assert (first["outcome"], second["outcome"]) == (0, 0)
    assert "on 2 processes (ddp)" in first["said"]
    first, refused = pair["refused"]
    assert first["outcome"] == 2
    assert first["complained"].count("is not divisible among 2 processes") == 1
    assert refused["outcome"] != 0
    assert "use --out RUN" in pair["homeless"][0]["complained"]
    for silent in (second, refused, pair["homeless"][1]):
        assert (silent["said"], silent["complained"]) == ("", "")


def test_a_restart_counted_by_one_machine_resumes_on_all(pair: Pair) -> None:
    assert pair.outcomes("cut") == ["Interrupted", "Interrupted"]
    assert pair.outcomes("again") == ["finished", "finished"]
    assert max(drift(pair.single("steady", STEADY), pair.place / "again").values()) < 1e-6
    assert pair.outcomes("timed") == [0, 0]  # and neither measures a budget anew, which takes both
    assert "spoken is finished (2 steps)" in " ".join(pair["timed"][0]["said"].split())


def test_a_zero_budget_is_refused_on_both_ranks_and_printed_once(pair: Pair) -> None:
    first, second = pair["worthless"]
    assert (first["outcome"], second["outcome"] != 0) == (2, True)
    assert first["complained"].count("--budget must be a number and a unit") == 1
    assert (second["said"], second["complained"]) == ("", "")


def test_a_process_that_fails_alone_does_not_block_the_other(pair: Pair) -> None:
    other, failed = pair["alone"]
    assert failed["message"] == "a process on its own"
    assert other["outcome"] == "LostProcessError"
    assert "another process of this run has exited" in other["message"]


def test_torch_reads_sharded_checkpoints_without_pickle(pair: Pair) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    path = checkpoint.find(pair.place / "fewer-fsdp")[-1]
    found = checkpoint.load(path)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    assert len(list(path.iterdir())) == 5
    theirs = {f"weights.{name}": torch.zeros_like(tensor) for name, tensor in found.weights.items()}
    with pytest.warns(UserWarning, match="single process"):
        load(theirs, storage_reader=HuggingFaceStorageReader(path=str(path)), no_dist=True)
    assert len(theirs) > 10
    for name, tensor in found.weights.items():
        assert torch.equal(theirs[f"weights.{name}"], tensor)


@pytest.mark.parametrize("damage", ["flipped", "missing", "pickle", "stranger"])
def test_a_damaged_shard_is_detected_and_the_previous_checkpoint_is_used(
    pair: Pair, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(pair.place / "fewer-fsdp", folder)
    before, newest = checkpoint.find(folder)
    piece = newest / "shard-00002-model-00001-of-00002.safetensors"
    content = bytearray(piece.read_bytes())
    if damage == "missing":
        piece.unlink()
    elif damage == "stranger":
        piece = newest / "shard-00003-model-00001-of-00002.safetensors"
        piece.write_bytes(content)
    else:
        content[len(content) // 2] ^= 1
        piece.write_bytes(b"\x80\x04\x95" + content if damage == "pickle" else content)
    loaded = load_run(folder)
    assert loaded.step == int(before.name[5:]) == 2
    assert str(piece) in loaded.notices[0]
