"""A picture of a page's first screen, for a README: `python -m qkflow.report.picture STUDY/report.html report.png`."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Literal

from qkflow.errors import UsageError
from qkflow.io import write_file


def picture(
    page: Path, out: Path, *, width: int = 1280, height: int = 1000, theme: Literal["light", "dark"] = "light"
) -> Path:
    """Open a page in chromium, through playwright, and save what a reader sees first, at twice the resolution."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise UsageError("a picture needs playwright: pip install playwright") from None
    if chromium is None:
        raise UsageError("a picture needs chromium, chromium-browser or google-chrome: install one of them")
    if not page.is_file():
        raise UsageError(f"{page} is not a file: give the report.html of a study")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        view = browser.new_page(
            viewport={"width": width, "height": height},
            device_scale_factor=2,
            color_scheme=theme,
            reduced_motion="reduce",
        )
        view.goto(page.resolve().as_uri())
        view.wait_for_selector("html[data-ready]", state="attached")
        content = view.screenshot()
        browser.close()
    write_file(out, content)
    return out


def main() -> None:
    """The command of the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=1000)
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    args = parser.parse_args()
    picture(args.page, args.out, width=args.width, height=args.height, theme=args.theme)


if __name__ == "__main__":
    main()
