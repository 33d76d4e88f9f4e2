"""Kill `qkflow train` at random instants, resume it until it is finished, and compare it with an uninterrupted run.

    python benchmarks/kill_training.py --kills 1000

Every session gets SIGKILL at a random instant between its start and a little after its end. Some are started as new
processes, so that the kill may hit the interpreter, the imports and the build of the C kernels; the others are forked
from a process that has imported torch. The next session is `qkflow train --resume RUN` if the folder holds a run, and
the first command again otherwise. Every finished run must have the bits of the uninterrupted one: weights, losses of
the held-out documents, metrics without times, and the last checkpoint. `--seed` selects other instants.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import forked_commands
from fuzz_commands import TEXT, link_kernels

COMMON = {
    "context": 24,
    "batch": 4,
    "accumulate": 2,
    "evaluate_every": 4,
    "evaluate_tokens": 256,
    "final_tokens": 256,
    "checkpoint_every": 3,
    "log_every": 1,
    "device": "cpu",
}
MODEL = {"width": 16, "layers": 1, "heads": 2, "hidden": 32, "dropout": 0.1}
RUNS = {
    "standard": {"steps": 12, "model": MODEL, **COMMON},
    "qdelta, AdamW": {"steps": 9, "model": {**MODEL, "mechanism": "qdelta"}, "optimizer": "adamw", **COMMON},
    "BPE, checkpoints by time": {
        "steps": 12,
        "model": {**MODEL, "vocabulary": 300},
        **COMMON,
        "data": {"tokens": "bpe", "vocabulary": 300},
        "checkpoint_minutes": 0.0002,
    },
}
NEW_PROCESS = 0.1
"""The fraction of sessions that are started as new processes."""
TIMES = ("seconds", "evaluation_seconds")


def content(folder: Path) -> dict[str, Any]:
    """The content of a finished run without times."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = sorted((folder / "checkpoints").iterdir())[-1]
    return {
        "metrics": [{key: value for key, value in record.items() if key not in TIMES} for record in records],
        "names": sorted(path.name for path in folder.iterdir()),
        "last checkpoint": last.name,
        **{
            str(path.relative_to(folder)): path.read_bytes()
            for path in (
                *(folder / name for name in ("config.json", "tokenizer.json", "documents.npy", "weights.safetensors")),
                *(last / name for name in ("weights.safetensors", "optimizer.safetensors")),
            )
        },
    }


def command(config: str, folder: Path) -> list[str]:
    """What a user types next: the same command, or `--resume` once there is a run."""
    if (folder / "config.json").exists():
        return ["train", "--resume", folder.name]
    return ["train", "text.txt", "--config", config, "--out", folder.name]


def killed(pid: int, seconds: float) -> bool:
    """Kill a session after some time. Returns False if it has ended before, which must be with exit code 0."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0, f"a session ended with status {status}"
            return False
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def start(args: Sequence[str], root: Path, *, is_new_process: bool) -> int:
    """Start a session. Returns its process id."""
    with open(root / "output.txt", "wb") as output:
        if is_new_process:
            line = [sys.executable, "-m", "qkflow", *args]
            return subprocess.Popen(line, cwd=root, stdin=subprocess.DEVNULL, stdout=output, stderr=output).pid
        return forked_commands.start(args, root, output.fileno(), output.fileno())


def sessions(rng: random.Random, config: str, folder: Path, longest: dict[bool, float]) -> Iterator[str]:
    """Train in a folder until the run is finished. Yields what happened to each session."""
    while True:
        is_new_process = rng.random() < NEW_PROCESS
        args = command(config, folder)
        pid = start(args, folder.parent, is_new_process=is_new_process)
        if killed(pid, rng.uniform(0, 1.1 * longest[is_new_process])):
            yield f"{'new process' if is_new_process else 'fork'}, {'resumed' if '--resume' in args else 'first start'}"
        elif (folder / "weights.safetensors").exists():
            return


def duration(args: Sequence[str], root: Path, *, is_new_process: bool) -> float:
    begin = time.monotonic()
    assert not killed(start(args, root, is_new_process=is_new_process), 600), "not finished in ten minutes"
    return time.monotonic() - begin


def kill_runs(kills: int, seed: int, report: int = 50) -> tuple[list[str], Counter[str], int]:
    """Train again and again with kills. Returns the failures, the kills by kind and the number of finished runs."""
    rng, counts, failures, finished = random.Random(seed), Counter[str](), list[str](), 0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        os.environ["QKFLOW_CACHE"] = link_kernels(root)
        (root / "text.txt").write_text(TEXT)
        expected, longest = {}, {}
        for kind, config in RUNS.items():
            (root / f"{kind}.json").write_text(json.dumps(config))
            args = ["train", "text.txt", "--config", f"{kind}.json", "--out"]
            duration([*args, "expected"], root, is_new_process=True)  # also prepares the corpus
            expected[kind] = content(root / "expected")
            longest[kind] = {new: duration([*args, f"again-{new}"], root, is_new_process=new) for new in (False, True)}
            assert content(root / "again-False") == content(root / "again-True") == expected[kind]
            for folder in ("expected", "again-False", "again-True"):
                shutil.rmtree(root / folder)
        while counts.total() < kills:
            kind, folder = rng.choice([*RUNS]), root / "run"
            if rng.random() < 0.1:  # the kill may hit the preparation of the corpus
                shutil.rmtree(root / "cache" / "corpora", ignore_errors=True)
            try:
                for event in sessions(rng, f"{kind}.json", folder, longest[kind]):
                    counts[event] += 1
                    if counts.total() % report == 0:
                        print(f"{counts.total()} kills, {finished} finished runs, {len(failures)} failures", flush=True)
                different = [key for key, value in content(folder).items() if value != expected[kind].get(key)]
            except (AssertionError, OSError, ValueError) as error:
                different = [repr(error), (root / "output.txt").read_text(errors="replace")[-1000:]]
            finished += 1
            if different:
                failures.append(f"run {finished} ({kind}): {', '.join(different)} differ after {counts.total()} kills")
                print(failures[-1], flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    return failures, counts, finished


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="number of kills")
    parser.add_argument("--seed", type=int, default=0, help="seed of the instants")
    args = parser.parse_args()
    forked_commands.prepare()
    failures, counts, finished = kill_runs(args.kills, args.seed)
    print("\n".join(f"{kind}: {count} kills" for kind, count in sorted(counts.items())))
    print(f"{counts.total()} kills, {finished} finished runs, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
