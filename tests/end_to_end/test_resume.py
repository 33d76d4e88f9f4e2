"""Runs that are stopped or killed at any time resume bit-for-bit."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SERVER = Path(__file__).with_name("training_server.py")
MODEL = {"width": 16, "layers": 1, "heads": 2, "hidden": 32, "dropout": 0.1}
TIMES = ("seconds", "evaluation_seconds")
RECALL = {
    "data": {"source": "mqar:pairs=1+2,length=16,keys=6,values=3,train=60,validation=12,each=4"},
    "context": 16,
    "model": {**MODEL, "vocabulary": 16},
}
TASK = {
    "data": {"name": "agreement", "train": 60, "test": 12},
    "model": {"width": 16, "layers": 1, "heads": 2, "vocabulary": 500, "classes": 2, "dropout": 0.1},
    "optimizer": "sgd",
    "momentum": 0.9,
}


class Server:
    """Runs training sessions on request, each in its own process."""

    def __init__(self, cache: str) -> None:
        environment = {**os.environ, "QKFLOW_CACHE": cache, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __call__(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request, default=str) + "\n")
        self.process.stdin.flush()
        response = self.process.stdout.readline()
        assert response, "the server has exited"
        return json.loads(response)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus of small documents."""
    workspace = tmp_path_factory.mktemp("resume")
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 6))) for _ in range(50)]
    texts = [" ".join(generator.choices(words, k=generator.randint(20, 60))) for _ in range(80)]
    (workspace / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return workspace


@pytest.fixture(scope="module")
def server(session_cache: str) -> Iterator[Server]:
    server = Server(session_cache)
    yield server
    server.close()


def config(workspace: Path, **changes: Any) -> dict[str, Any]:
    """A short run with dropout, accumulation, and evaluations and checkpoints at different steps."""
    base = {
        "data": {"source": str(workspace / "corpus.jsonl")},
        "model": MODEL,
        "steps": 24,
        "context": 24,
        "batch": 4,
        "accumulate": 2,
        "evaluate_every": 7,
        "evaluate_tokens": 500,
        "checkpoint_every": 5,
        "log_every": 1,
        "device": "cpu",
    }
    return {**base, **changes}


def run_content(folder: Path) -> dict[str, Any]:
    """The content of a finished run without times; the metrics include a checksum of each batch."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = sorted((folder / "checkpoints").iterdir())[-1]
    if (folder / "metrics.csv").exists():
        with open(folder / "metrics.csv", newline="") as file:
            rows = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
        assert rows == [{key: str(value) for key, value in record.items()} for record in records]
    return {
        "metrics": [{key: value for key, value in record.items() if key not in TIMES} for record in records],
        "weights": (folder / "weights.safetensors").read_bytes(),
        "documents": (folder / "documents.npy").read_bytes(),
        "checkpoints": len(list((folder / "checkpoints").iterdir())),
        "last weights": (last / "weights.safetensors").read_bytes(),
        "last optimizer": (last / "optimizer.safetensors").read_bytes(),
        "names": sorted(path.name for path in folder.iterdir()),
    }


def finish(server: Server, **request: Any) -> None:
    response = server(**request)
    assert response["outcome"] == "finished", response


@pytest.mark.parametrize(
    ("kind", "times", "changes"),
    [
        (signal.SIGKILL, 10, {}),
        (signal.SIGKILL, 4, {"crossing": False, "checkpoint_minutes": 0.0005, "schedule": "stable"}),
        (signal.SIGKILL, 4, RECALL),
        (signal.SIGKILL, 4, TASK),
        (signal.SIGTERM, 4, {}),
        (signal.SIGINT, 4, {}),
    ],
    ids=["SIGKILL", "SIGKILL, checkpoints by time", "SIGKILL, recall", "SIGKILL, task", "SIGTERM", "Ctrl-C"],
)
def test_a_run_stopped_at_random_times_resumes_bit_for_bit(
    server: Server, workspace: Path, tmp_path: Path, kind: signal.Signals, times: int, changes: dict[str, Any]
) -> None:
    request = {"config": config(workspace, **changes), "log": not changes}
    finish(server, **request, folder=tmp_path / "uninterrupted")  # also prepares the corpus
    uninterrupted = run_content(tmp_path / "uninterrupted")
    repeated = server(**request, folder=tmp_path / "repeated")
    assert run_content(tmp_path / "repeated") == uninterrupted

    generator = random.Random(1)
    stops, run, interrupted = 0, 0, 0
    while stops < times:
        folder = tmp_path / f"run-{run}"
        response = server(**request, folder=folder, signal=kind, after=generator.uniform(0, repeated["seconds"]))
        if response["outcome"] == "finished":
            assert run_content(folder) == uninterrupted
            run += 1
            continue
        stops += 1
        if response["outcome"] == "Interrupted":
            interrupted += 1
            assert f"qkflow train --resume {folder}" in response["message"]
    finish(server, **request, folder=tmp_path / f"run-{run}")
    assert run_content(tmp_path / f"run-{run}") == uninterrupted
    assert (interrupted > 0) == (kind != signal.SIGKILL)


def test_a_run_killed_before_any_file_system_call_resumes_bit_for_bit(
    server: Server, workspace: Path, tmp_path: Path
) -> None:
    """Covers every call of a run of three steps with three checkpoints, the first of which is removed again."""
    request = {"config": config(workspace, steps=3, checkpoint_every=1, evaluate_every=2)}
    finish(server, **request, folder=tmp_path / "uninterrupted")
    uninterrupted = run_content(tmp_path / "uninterrupted")
    total = server(**request, folder=tmp_path / "repeated")["calls"]
    assert total > 40
    for call in range(1, total + 1):
        folder = tmp_path / f"call-{call}"
        assert server(**request, folder=folder, signal=signal.SIGKILL, call=call)["outcome"] == "killed"
        if call % 3 == 0:  # the resumed session is killed, too
            server(**request, folder=folder, signal=signal.SIGKILL, call=call)
        finish(server, **request, folder=folder)
        assert run_content(folder) == uninterrupted, f"killed before call {call}"
        shutil.rmtree(folder)


def test_sigterm_during_a_checkpoint_leaves_a_complete_one(server: Server, workspace: Path, tmp_path: Path) -> None:
    request = {"config": config(workspace, steps=3, checkpoint_every=1, evaluate_every=2)}
    finish(server, **request, folder=tmp_path / "uninterrupted")
    repeated = server(**request, folder=tmp_path / "repeated")
    for call in range(repeated["started"] + 1, repeated["calls"] + 1, 5):
        folder = tmp_path / f"call-{call}"
        response = server(**request, folder=folder, signal=signal.SIGTERM, call=call)
        assert response["outcome"] in ("Interrupted", "finished")
        finish(server, **request, folder=folder)
        assert run_content(folder) == run_content(tmp_path / "uninterrupted")


def test_a_full_disk_at_any_call_loses_no_checkpoint(server: Server, workspace: Path, tmp_path: Path) -> None:
    request = {"config": config(workspace, steps=3, checkpoint_every=1, evaluate_every=2)}
    finish(server, **request, folder=tmp_path / "uninterrupted")
    repeated = server(**request, folder=tmp_path / "repeated")
    for call in range(1, repeated["calls"] + 1, 3):
        folder = tmp_path / f"call-{call}"
        response = server(**request, folder=folder, full_from=call)
        assert response["outcome"] == "DiskError", response
        if call > repeated["started"]:
            assert f"free some space, then run `qkflow train --resume {folder}`" in response["message"]
        finish(server, **request, folder=folder)
        assert run_content(folder) == run_content(tmp_path / "uninterrupted"), f"full from call {call} on"


def test_a_checkpoint_over_the_file_size_limit_keeps_earlier_ones(
    server: Server, workspace: Path, tmp_path: Path
) -> None:
    request = {"config": config(workspace), "folder": tmp_path / "run"}
    assert server(**request, signal=signal.SIGKILL, step=12)["outcome"] == "killed"
    before = sorted((tmp_path / "run" / "checkpoints").iterdir())
    response = server(**request, max_file_bytes=20_000)
    assert response["outcome"] == "DiskError"
    assert "step-00000015" in response["message"]
    assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == before
    finish(server, **request)


def test_a_second_process_in_the_same_folder_is_refused(server: Server, workspace: Path, tmp_path: Path) -> None:
    request = {"config": config(workspace, steps=3), "folder": tmp_path / "run"}
    holder = server(**request, hold=True)
    assert holder["outcome"] == "holding"
    second = server(**request)
    assert second["outcome"] == "BusyError"
    assert f"(id {holder['pid']})" in second["message"]
    server(release=holder["pid"])
    finish(server, **request)


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(
    server: Server, workspace: Path, tmp_path: Path
) -> None:
    request = {"config": config(workspace)}
    finish(server, **request, folder=tmp_path / "uninterrupted")
    folder = tmp_path / "run"
    assert server(**request, folder=folder, signal=signal.SIGKILL, step=18)["outcome"] == "killed"
    newest = folder / "checkpoints" / "step-00000015"
    file = newest / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    response = server(**request, folder=folder)
    assert response["outcome"] == "finished"
    assert any(str(file) in notice for notice in response["notices"])
    shutil.rmtree(newest.with_name("refused-step-00000015"))
    assert run_content(folder) == run_content(tmp_path / "uninterrupted")
