"""The site: it builds without a warning, every link leads somewhere, and nothing is asked for from outside."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "docs").rglob("*.md"))
BUILD = (sys.executable, "-m", "zensical", "build", "--clean", "--strict")
"""What `make docs` runs."""
LOADED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
"""What a browser asks for by itself, and where an element says so."""
SET_APART = ("code", "math", "script", "style")
"""What is not running text."""


class Page(HTMLParser):
    """What a page holds: anchors, where its links lead, what it loads, and its text outside of code and formulas."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.formulas: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.open += [tag] if tag in SET_APART else []
        self.anchors |= {value for name in ("id", "name") if (value := given.get(name))}
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        if tag in LOADED and given.get(LOADED[tag]):
            self.loaded.append(str(given[LOADED[tag]]))

    def handle_endtag(self, tag: str) -> None:
        if tag in SET_APART:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if not self.open:
            self.words.append(data)
        elif "math" in self.open:
            self.formulas.append(data)


def test_the_site_is_whole(tmp_path: Path) -> None:
    """One test, since the site is built once for it."""
    site = built(tmp_path)
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    every_source_is_a_page_in_the_navigation(site, pages)
    links_lead_to_pages_and_anchors(site, pages)
    nothing_is_loaded_from_outside(site, pages)
    mathematics_is_drawn_by_the_browser(site, pages)
    the_reference_comes_from_docstrings(site, pages)


def built(place: Path) -> Path:
    """The site, built in a copy: it must lie inside of its project."""
    shutil.copy(ROOT / "mkdocs.yml", place)
    shutil.copytree(ROOT / "docs", place / "docs")
    (place / "src").symlink_to(ROOT / "src")
    made = subprocess.run(BUILD, cwd=place, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
    told = re.sub(r"\x1b\[[\d;]*m", "", made.stdout + made.stderr)
    assert made.returncode == 0, told
    assert "No issues found" in told, told
    assert len(told.splitlines()) <= 3, told  # anything besides is a remark that someone should see
    return place / "site"


def every_source_is_a_page_in_the_navigation(site: Path, pages: dict[Path, Page]) -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for path in SOURCES:
        name = path.relative_to(ROOT / "docs")
        assert re.search(rf"[ :]{re.escape(str(name))}$", navigation, re.MULTILINE), f"{name} is not in mkdocs.yml"
        assert site / name.with_suffix(".html") in pages
    assert not list(site.rglob("*.py*"))


def links_lead_to_pages_and_anchors(site: Path, pages: dict[Path, Page]) -> None:
    lost = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            anchor = unquote(parts.fragment)
            if not target.is_relative_to(site) or not target.exists():
                lost.append(f"{path.relative_to(site)}: {link}")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                lost.append(f"{path.relative_to(site)}: {link} (no such anchor)")
    assert not lost, "\n".join(lost)


def nothing_is_loaded_from_outside(site: Path, pages: dict[Path, Page]) -> None:
    outside = [f"{path.name}: {what}" for path, page in pages.items() for what in page.loaded if "//" in what]
    for sheet in site.rglob("*.css"):
        outside += [
            f"{sheet.name}: {what}"
            for what in re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*", sheet.read_text())
        ]
    assert not outside, "\n".join(outside)
    for path, page in pages.items():
        for what in page.loaded:
            assert what.startswith("data:") or (path.parent / unquote(urlsplit(what).path)).exists(), f"{path}: {what}"


def mathematics_is_drawn_by_the_browser(site: Path, pages: dict[Path, Page]) -> None:
    formulas = 0
    for path in SOURCES:
        count = len(re.findall(r"^\$\$", path.read_text(), re.MULTILINE))
        page = pages[site / path.relative_to(ROOT / "docs").with_suffix(".html")]
        assert page.tags.count("math") >= count
        formulas += count
    assert formulas
    for path, page in pages.items():
        left = re.search(r".{0,20}\$|\\[a-z]{2,}", " ".join(page.words))
        assert left is None, f"{path.name}: {left}"
        assert not any("\\" in part for part in page.formulas), f"{path.name}: a command that no one knows is left"


def the_reference_comes_from_docstrings(site: Path, pages: dict[Path, Page]) -> None:
    for path in (site / "reference").glob("*.html"):
        assert path.read_text().count('class="doc doc-object') > 3, path.name
        assert "blockquote" not in pages[path].tags, f"{path.name} has doctests that were taken for quotations"
    told = {
        anchor.rpartition(".")[2]
        for path, page in pages.items()
        if "reference" in path.parts
        for anchor in page.anchors
    }
    for package in ("", "hf", "hub", "harness"):
        source = (ROOT / "src/qkflow" / package / "__init__.py").read_text()
        (names,) = re.findall(r"^__all__ = (\[.*?\])$", source, re.DOTALL | re.MULTILINE)
        assert not {*ast.literal_eval(names)} - told, (
            f"not in the reference: {sorted({*ast.literal_eval(names)} - told)}"
        )


def test_relative_links_work_in_the_repository_too() -> None:
    for path in (ROOT / "README.md", *SOURCES):
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for found in re.findall(r"\]\(([^)\s]+)\)|(?:href|src)=\"([^\"]+)\"", text):
            parts = urlsplit(found[0] or found[1])
            assert parts.scheme or not parts.path or (path.parent / parts.path).exists(), f"{path.name}: {found}"
