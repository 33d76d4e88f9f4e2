"""Pages without plotly's five megabytes, and a parser for them."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser

import pytest

VOID = {"meta", "link", "input", "wbr", "br", "img", "path", "rect", "circle"}


class Page(HTMLParser):
    """Elements, attributes and text of a page; asserts that every element is closed."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.headings: list[str] = []
        self.text = ""
        self.feed(source)
        assert self.open == []

    @property
    def tags(self) -> list[str]:
        return [tag for tag, _ in self.elements]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self.open[-1:] != ["style"]:
            self.text += data
            if {"h1", "h2", "h3"} & set(self.open):
                self.headings.append(data)

    def check_references(self) -> None:
        """Every id is unique, every reference has its target, and everything that needs a name has one."""
        ids = [attributes["id"] for _, attributes in self.elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        for tag, attributes in self.elements:
            for name in ("for", "aria-labelledby"):
                assert set((attributes.get(name) or "").split()) <= set(ids), attributes
            if tag == "a":
                assert (attributes["href"] or "")[1:] in ids
            if tag == "th":
                assert attributes["scope"] in ("row", "col")
            if attributes.get("role") in ("img", "region", "group"):
                assert attributes.get("aria-label") or attributes.get("aria-labelledby")
        assert ("html", {"lang": "en"}) in self.elements
        for landmark in ("header", "nav", "main", "footer", "h1"):
            assert self.tags.count(landmark) == 1

    def check_inert(self) -> None:
        """No element, attribute or link comes from untrusted text, and nothing invisible is in the text."""
        assert self.tags.count("script") == len(self.scripts) == 3
        assert not {"<", ">", "&"} & set(self.scripts[0])
        assert not {"img", "iframe", "object", "embed", "form"} & set(self.tags)
        for _, attributes in self.elements:
            assert not any(name.startswith("on") for name in attributes)
            assert (attributes.get("href") or "#").startswith(("#", "data:,"))
        assert not {"\x00", "\x1b", "\u202e", "\x07", "\r"} & set(self.text)


@pytest.fixture(scope="session")
def parse() -> Callable[[str], Page]:
    """From the source of a page to its parsed form."""
    return Page


@pytest.fixture(autouse=True)
def without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "window.Plotly = {};")
