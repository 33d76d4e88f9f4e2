"""torchrun restarts both processes of a run after one is killed, and the run resumes bit-for-bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qkflow.training import load_run

Numbers = Callable[[Path], dict[str, Any]]
SETTINGS = {
    "steps": 8,
    "context": 16,
    "batch": 4,
    "accumulate": 2,
    "evaluate_every": 5,
    "evaluate_tokens": 512,
    "checkpoint_every": 3,
    "log_every": 1,
    "threads": 1,
    "model": {"width": 16, "layers": 2, "heads": 2, "hidden": 24, "dropout": 0.1},
}


def test_a_run_survives_a_killed_process(tmp_path: Path, numbers: Numbers) -> None:
    lines = (f"line {number}: the quick brown fox number {number * number}\n" for number in range(400))
    (tmp_path / "text.txt").write_text("".join(lines))
    (tmp_path / "small.json").write_text(json.dumps(SETTINGS))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch += ["--max-restarts", "1", "--monitor-interval", "0.1", str(Path(__file__).with_name("kill_one_process.py"))]
    arguments = ["train", "text.txt", "--config", "small.json", "--device", "cpu", "--parallel", "fsdp"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    completed = subprocess.run(
        [*launch, "5", "interrupted", "uninterrupted", *arguments],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    interrupted, uninterrupted = tmp_path / "interrupted", tmp_path / "uninterrupted"
    assert numbers(interrupted) == numbers(uninterrupted)
    sessions = [
        len(json.loads((run / "environment.json").read_text())["resumed"]) for run in (interrupted, uninterrupted)
    ]
    assert sessions == [1, 0]
    assert completed.stdout.count("resumed after step 3") == 1
    assert completed.stdout.count("saved in uninterrupted") == 1  # only the first process prints
    assert load_run(interrupted).finished
