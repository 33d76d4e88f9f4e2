"""Measure the processor time that `import qkflow` adds to `import torch`, in fresh processes.

    python benchmarks/import_time.py [--quick] [--json FILE]

torch's FLOP counter is imported first: qkflow needs it, and it imports triton if that is installed.
"""

from __future__ import annotations

import subprocess
import sys

from tables import Row
from timing import main, quartiles, relative_spread, time_alternately

MAX_SECONDS = 0.3
PROGRAM = """
import time, torch, torch.utils.flop_counter
start = time.process_time()
import qkflow
print(time.process_time() - start)
"""


def measure(quick: bool) -> list[Row]:
    seconds: list[float] = []

    def torch_and_qkflow() -> None:
        out = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
        seconds.append(float(out.stdout))

    rounds, warmup = 4 if quick else 15, 1
    times = time_alternately({"import": torch_and_qkflow}, rounds=rounds, warmup=warmup)
    low, median, high = quartiles([value / MAX_SECONDS for value in seconds[warmup:]])
    return [
        Row(
            table="import",
            work="`import qkflow` after `import torch`",
            against=f"a limit of {MAX_SECONDS} s",
            kind="time",
            ratio=median,
            quartiles=(low, high),
            ours=median * MAX_SECONDS,
            peer=MAX_SECONDS,
            unit="s",
            at_most=1.0,
            control=relative_spread(times["control"]),
            rounds=rounds,
            threads=1,
        )
    ]


if __name__ == "__main__":
    main(__doc__, measure)
