"""How long the page of a large study takes to make, and how large it is: 8 arms x 10 seeds, maps of 4 layers x 4 heads.

The study is made up (`tests/unit/report/synthetic.py`), its models are real ones with random weights. Where there is a
chromium and playwright, also: how long it takes to open and draw, and that the browser has nothing to complain about.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from qkflow.report import write_report

from side_by_side import arguments

ARMS = tuple(f"arm-{n}" for n in range(8))
SEEDS = 10
MOST_SECONDS, MOST_BYTES = 20.0, 8_000_000


def synthetic() -> ModuleType:
    path = Path(__file__).parents[1] / "tests" / "unit" / "report" / "synthetic.py"
    spec = importlib.util.spec_from_file_location("synthetic", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def validate_input(path: Path) -> dict[str, Any]:
    """Seconds until everything is drawn, and what the console said; nothing where there is no browser."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None or importlib.util.find_spec("playwright") is None:
        return {}
    from playwright.sync_api import sync_playwright

    said: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        begin = time.perf_counter()
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        seconds = time.perf_counter() - begin
        browser.close()
    return {"seconds to open and draw": round(seconds, 2), "console": said}


def main() -> None:
    args = arguments(__doc__ or "")
    made = synthetic()
    summary = made.study(ARMS, seeds=SEEDS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = made.folder(folder, ARMS, layers=4, heads=4, width=128)
        times = []
        for _ in range(1 if args.quick else 5):
            begin = time.perf_counter()
            page = write_report(summary, folder, folder / "report.html", runs=runs)
            times.append(time.perf_counter() - begin)
        size = page.stat().st_size
        result = {"seconds": round(statistics.median(times), 2), "longest": round(max(times), 2), "bytes": size}
        result |= validate_input(page)
    print(f"page of {len(ARMS)} arms x {SEEDS} seeds, maps of 4 x 4 heads, 3 excerpts of 64 tokens")
    for key, value in result.items():
        print(f"  {key}: {value}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    if max(times) > MOST_SECONDS or size > MOST_BYTES or result.get("console"):
        raise SystemExit(f"expected at most {MOST_SECONDS:.0f} s, {MOST_BYTES:,} bytes and a silent console")


if __name__ == "__main__":
    main()
