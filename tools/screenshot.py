"""Save a screenshot of the top of a report, for the README: `python tools/screenshot.py STUDY/report.html report.png`.

Needs playwright and an installed chromium, chromium-browser or google-chrome.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright


def main() -> None:
    """Take the screenshot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=1000)
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    args = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        view = browser.new_page(
            viewport={"width": args.width, "height": args.height},
            device_scale_factor=2,
            color_scheme=args.theme,
            reduced_motion="reduce",
        )
        view.goto(args.page.resolve().as_uri())
        view.wait_for_selector("html[data-ready]", state="attached")
        view.screenshot(path=args.out)
        browser.close()


if __name__ == "__main__":
    main()
