"""Measure the time and size of the report of a large study: 8 arms x 10 seeds, attention maps of 4 layers x 4 heads.

The study is synthetic (`tests/unit/report/synthetic.py`) and its models have random weights. With chromium and
playwright, the benchmark also measures how long the page takes to open, and fails if the browser logs anything.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from qkflow.report import write_report

from timing import parse_arguments

ARMS = tuple(f"arm-{n}" for n in range(8))
SEEDS = 10
MAX_SECONDS, MAX_BYTES = 20.0, 8_000_000


def load_synthetic() -> ModuleType:
    path = Path(__file__).parents[1] / "tests" / "unit" / "report" / "synthetic.py"
    spec = importlib.util.spec_from_file_location("synthetic", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def open_in_browser(path: Path) -> dict[str, Any]:
    """Return the seconds until every figure is drawn and the console messages; empty without a browser."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None or importlib.util.find_spec("playwright") is None:
        return {}
    from playwright.sync_api import sync_playwright

    messages: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        start = time.perf_counter()
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        seconds = time.perf_counter() - start
        browser.close()
    return {"seconds to open and draw": round(seconds, 2), "console": messages}


def main() -> None:
    args = parse_arguments(__doc__ or "")
    synthetic = load_synthetic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        study = replace(synthetic.study(ARMS, seeds=SEEDS), folder=name)
        runs = synthetic.folder(folder, ARMS, layers=4, heads=4, width=128)
        times = []
        for _ in range(1 if args.quick else 5):
            start = time.perf_counter()
            page = write_report(study, folder / "report.html", runs=runs)
            times.append(time.perf_counter() - start)
        size = page.stat().st_size
        result = {"seconds": round(statistics.median(times), 2), "longest": round(max(times), 2), "bytes": size}
        result |= open_in_browser(page)
    print(f"page of {len(ARMS)} arms x {SEEDS} seeds, maps of 4 x 4 heads, 3 excerpts of 64 tokens")
    for key, value in result.items():
        print(f"  {key}: {value}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    if max(times) > MAX_SECONDS or size > MAX_BYTES or result.get("console"):
        raise SystemExit(f"expected at most {MAX_SECONDS:.0f} s, {MAX_BYTES:,} bytes and no console messages")


if __name__ == "__main__":
    main()
