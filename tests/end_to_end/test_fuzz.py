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


def test_odd_command_lines_and_damaged_files_end_as_documented() -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT], cwd=BENCHMARKS, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "[]\n[]\n"), result.stdout + result.stderr
