"""Short versions of `benchmarks/fuzz_commands.py` and `benchmarks/fuzz_files.py`, in one process that forks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = """
import forked_commands, fuzz_commands, fuzz_files

forked_commands.prepare()
print(fuzz_commands.fuzz(0, 40, fuzz_commands.FAST, seconds=60)[0])
print(fuzz_files.fuzz(0, 40, fuzz_files.TARGETS, seconds=60)[0])
"""

HANGS = """
import subprocess, sys, time
from pathlib import Path
import forked_commands, fuzz_commands

def spin():
    end = time.monotonic() + 30
    while time.monotonic() < end:
        pass

BUSY_CHILD = [sys.executable, "-c", "while True: pass"]
for main in (lambda: time.sleep(30), spin, lambda: subprocess.run(BUSY_CHILD, start_new_session=True, timeout=30)):
    forked_commands.main = main
    for args in (["train", "--steps=9"], ["compare"], ["eval"]):
        outcome = forked_commands.run(args, Path("."), seconds=1)
        print(fuzz_commands.hangs(args, outcome, 1), end=" ")
"""


def test_odd_command_lines_and_damaged_files_end_as_documented() -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT], cwd=BENCHMARKS, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "[]\n[]\n"), result.stdout + result.stderr


def test_a_command_that_waits_counts_as_a_hang_and_one_that_works_does_not() -> None:
    """`eval` has no reason to work that long, so it always counts."""
    result = subprocess.run([sys.executable, "-c", HANGS], cwd=BENCHMARKS, capture_output=True, text=True)
    expected = [True, True, True, False, False, True, False, False, True]
    assert result.stdout.split() == list(map(str, expected)), result.stdout + result.stderr
