"""Run the speed benchmarks, and write their results into docs/results/data/speed.json, docs/speed.md and README.md.

    python benchmarks/run_all.py [--quick] [--only NAME ...]
    python benchmarks/run_all.py --tables

`make bench` calls it. Each benchmark runs in a process of its own, one after the other. Results are stored after each
of them; those of benchmarks that do not run, or fail, are kept. `--tables` runs nothing and only fills in the tables.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tables import fill

BENCHMARKS = (
    "train",
    "generate",
    "attention",
    "delta_rule",
    "delta_family",
    "kuramoto",
    "coupled",
    "hf_wrapper",
    "import_time",
)
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results/data/speed.json"
PAGES = (ROOT / "docs/speed.md", ROOT / "README.md")


def run(name: str, quick: bool) -> dict[str, Any]:
    """Run one benchmark; return its rows with the machine, the date and the commit."""
    load, start = os.getloadavg()[0], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--json", str(path)]
        subprocess.run([*command, "--quick"] if quick else command, check=True)
        rows = json.loads(path.read_text())
    return {
        "quick": quick,
        "seconds": round(time.perf_counter() - start),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "machine": {**machine(), "load": round(load, 2)},
        "rows": [{key: rounded(value) for key, value in row.items()} for row in rows],
    }


def rounded(value: Any) -> Any:
    """Round floats to five significant digits, also in lists."""
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def machine() -> dict[str, Any]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        processor = platform.processor() or platform.machine()
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "versions": {name: version(name) for name in ("torch", "transformers", "x-transformers")},
    }


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def commit() -> str:
    """The commit, with a plus sign if the measured files have changes."""
    git = ("git", "-C", str(ROOT))
    try:
        name = subprocess.run([*git, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--", "src", "benchmarks"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.stdout.strip() + ("+" if changes.stdout else "")


def read() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"benchmarks": {}}


def store(name: str, results: dict[str, Any]) -> None:
    """Replace the stored results of a benchmark."""
    stored = {**read()["benchmarks"], name: results}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    ordered = {key: stored[key] for key in BENCHMARKS if key in stored}
    RESULTS.write_text(json.dumps({"benchmarks": ordered}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds: about five minutes")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS, help="run only these")
    parser.add_argument("--tables", action="store_true", help="only fill in the tables, from stored results")
    args = parser.parse_args()
    failed = []
    for name in () if args.tables else args.only:
        print(f"\n=== {name}", flush=True)
        try:
            store(name, run(name, args.quick))
        except subprocess.CalledProcessError as error:
            print(f"{name} failed with exit status {error.returncode}", file=sys.stderr)
            failed.append(name)
    results = read()
    for page in PAGES:
        page.write_text(fill(page.read_text(), results))
    if failed:
        print(f"\nfailed: {', '.join(failed)}; their stored results are unchanged", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
