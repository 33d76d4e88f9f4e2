"""The documentation site builds without warnings, its links resolve, and it makes no network requests."""

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

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "docs").rglob("*.md"))
BUILD_COMMAND = (sys.executable, "-m", "zensical", "build", "--clean", "--strict")
"""The command of `make docs`."""
RESOURCE_ATTRIBUTES = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
"""Elements that a browser loads, with the attribute that holds the address."""
PUBLIC_PACKAGES = ("", "circuits", "experiment", "hf", "hub", "lm_eval", "mechanisms", "models", "training")
"""Packages whose names in `__all__` are in the reference."""
NOT_PROSE = ("code", "math", "script", "style")

Pages = dict[Path, "Page"]


class Page(HTMLParser):
    """The anchors, links, resources, prose and formulas of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.resources: list[str] = []
        self.tags: list[str] = []
        self.prose: list[str] = []
        self.formulas: list[str] = []
        self.open_tags: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append(tag)
        self.open_tags += [tag] if tag in NOT_PROSE else []
        self.anchors |= {value for name in ("id", "name") if (value := attributes.get(name))}
        if tag == "a" and attributes.get("href"):
            self.links.append(str(attributes["href"]))
        if tag in RESOURCE_ATTRIBUTES and attributes.get(RESOURCE_ATTRIBUTES[tag]):
            self.resources.append(str(attributes[RESOURCE_ATTRIBUTES[tag]]))

    def handle_endtag(self, tag: str) -> None:
        if tag in NOT_PROSE:
            self.open_tags.pop()

    def handle_data(self, data: str) -> None:
        if not self.open_tags:
            self.prose.append(data)
        elif "math" in self.open_tags:
            self.formulas.append(data)


def test_site(tmp_path: Path) -> None:
    """All checks are in one test, so that the site is built once."""
    site = build_site(tmp_path)
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    check_every_source_is_in_the_navigation(site, pages)
    check_links(site, pages)
    check_no_network_requests(site, pages)
    check_formulas(site, pages)
    check_reference(site, pages)


def build_site(folder: Path) -> Path:
    """Build the site in a copy of docs/."""
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(ROOT / "docs", folder / "docs")
    (folder / "src").symlink_to(ROOT / "src")
    process = subprocess.run(
        BUILD_COMMAND, cwd=folder, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"}
    )
    output = re.sub(r"\x1b\[[\d;]*m", "", process.stdout + process.stderr)
    assert process.returncode == 0, output
    assert "No issues found" in output, output
    assert len(output.splitlines()) <= 3, output  # anything else is a warning
    return folder / "site"


def check_every_source_is_in_the_navigation(site: Path, pages: Pages) -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for path in SOURCES:
        name = path.relative_to(ROOT / "docs")
        assert re.search(rf"[ :]{re.escape(str(name))}$", navigation, re.MULTILINE), f"{name} is not in mkdocs.yml"
        assert site / name.with_suffix(".html") in pages
    assert not list(site.rglob("*.py*"))


def check_links(site: Path, pages: Pages) -> None:
    broken = []
    for path, page in pages.items():
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = path if not url.path else (path.parent / unquote(url.path)).resolve()
            anchor = unquote(url.fragment)
            if not target.is_relative_to(site) or not target.exists():
                broken.append(f"{path.relative_to(site)}: {link}")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                broken.append(f"{path.relative_to(site)}: {link} (no such anchor)")
    assert not broken, "\n".join(broken)


def check_no_network_requests(site: Path, pages: Pages) -> None:
    external = [f"{path.name}: {url}" for path, page in pages.items() for url in page.resources if "//" in url]
    for sheet in site.rglob("*.css"):
        urls = re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*", sheet.read_text())
        external += [f"{sheet.name}: {url}" for url in urls]
    assert not external, "\n".join(external)
    for path, page in pages.items():
        for url in page.resources:
            assert url.startswith("data:") or (path.parent / unquote(urlsplit(url).path)).exists(), f"{path}: {url}"


def check_formulas(site: Path, pages: Pages) -> None:
    total = 0
    for path in SOURCES:
        count = len(re.findall(r"^\$\$", path.read_text(), re.MULTILINE))
        assert pages[site / path.relative_to(ROOT / "docs").with_suffix(".html")].tags.count("math") >= count
        total += count
    assert total
    for path, page in pages.items():
        unrendered = re.search(r".{0,20}\$|\\[a-z]{2,}", " ".join(page.prose))
        assert unrendered is None, f"{path.name}: {unrendered}"
        assert not any("\\" in formula for formula in page.formulas), f"{path.name}: unknown LaTeX command"


def check_reference(site: Path, pages: Pages) -> None:
    for path in (site / "reference").glob("*.html"):
        assert path.read_text().count('class="doc doc-object') > 3, path.name
        assert "blockquote" not in pages[path].tags, f"{path.name}: a doctest was rendered as a quotation"
    documented = {
        anchor.rpartition(".")[2]
        for path, page in pages.items()
        if "reference" in path.parts
        for anchor in page.anchors
    }
    for package in PUBLIC_PACKAGES:
        source = (ROOT / "src/qkflow" / package / "__init__.py").read_text()
        (exports,) = re.findall(r"^__all__ = (\[.*?\])$", source, re.DOTALL | re.MULTILINE)
        missing = {*ast.literal_eval(exports)} - documented
        assert not missing, f"{package or 'qkflow'}: not in the reference: {sorted(missing)}"


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *SOURCES], ids=lambda page: page.name)
def test_relative_links_resolve_in_the_repository(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for markdown_link, html_link in re.findall(r"\]\(([^)\s]+)\)|(?:href|src)=\"([^\"]+)\"", text):
        url = urlsplit(markdown_link or html_link)
        assert url.scheme or not url.path or (page.parent / url.path).exists(), f"{page.name}: {url.path}"
