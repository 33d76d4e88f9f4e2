"""Measure the time that `import qkflow` adds to `import torch`, measured in alternating fresh processes.

python benchmarks/import_time.py [--quick] [--json FILE]
"""

from __future__ import annotations

import subprocess
import sys

from timing import (
    Comparison,
    compare_first,
    parse_arguments,
    print_comparisons,
    quartiles,
    relative_spread,
    time_alternately,
)

MAX_SECONDS = 0.3
PROGRAM = "import time; import torch; start = time.perf_counter(); import qkflow; print(time.perf_counter() - start)"

if __name__ == "__main__":
    args = parse_arguments(__doc__)
    added: list[float] = []

    def torch_and_qkflow() -> None:
        out = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
        added.append(float(out.stdout))

    def torch_only() -> None:
        subprocess.run([sys.executable, "-c", "import torch"], check=True)

    times = time_alternately(
        {"torch and qkflow": torch_and_qkflow, "torch": torch_only}, rounds=4 if args.quick else 10
    )
    low, median, high = quartiles(added)
    limit = Comparison(
        name="import qkflow after torch, against the limit of 0.3 s",
        ratio=MAX_SECONDS / median,
        quartiles=(MAX_SECONDS / high, MAX_SECONDS / low),
        control=relative_spread(times["control"]),
        ours=median,
        peer=MAX_SECONDS,
        unit="s",
    )
    print_comparisons([*compare_first("import", times, amount=1.0, unit="imports/s"), limit], args.json)
