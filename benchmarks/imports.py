"""Time that `import qkflow` adds to `import torch`, measured in alternating fresh processes.

python benchmarks/imports.py [--quick] [--json FILE]
"""

from __future__ import annotations

import subprocess
import sys

from side_by_side import Row, arguments, quartiles, race, report, rows

ALLOWED = 0.3
PROGRAM = "import time; import torch; begin = time.perf_counter(); import qkflow; print(time.perf_counter() - begin)"

if __name__ == "__main__":
    args = arguments(__doc__)
    added: list[float] = []

    def both() -> None:
        out = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
        added.append(float(out.stdout))

    def torch_alone() -> None:
        subprocess.run([sys.executable, "-c", "import torch"], check=True)

    times = race({"torch and qkflow": both, "torch": torch_alone}, rounds=4 if args.quick else 10)
    low, middle, high = quartiles(added)
    steadiness = quartiles(times["control"])
    allowed = Row(
        name="import qkflow after torch, against the 0.3 s allowed",
        ratio=ALLOWED / middle,
        spread=(ALLOWED / high, ALLOWED / low),
        control=(steadiness[2] - steadiness[0]) / steadiness[1],
        ours=middle,
        peer=ALLOWED,
        unit="s",
    )
    report([*rows("import", times, amount=1.0, unit="imports/s"), allowed], args.json)
