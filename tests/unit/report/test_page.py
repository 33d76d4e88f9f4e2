"""The page as a document: what it says, in which order, and that nothing in it can be more than text."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

from qkflow.experiment.summary import ExperimentResult
from qkflow.report import write_report
from qkflow.report.gallery import Gallery
from qkflow.report.page import page
from qkflow.report.shell import typeset

ARMS = ("standard", "differential", "coupled")
VOID = {"meta", "link", "input", "wbr", "br", "img", "path", "rect", "circle"}


class Document(HTMLParser):
    """Elements, attributes and text of a page; complains about elements that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.headings: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

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


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the five megabytes of plotly, which play no part here."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "window.Plotly = {};")


def read(summary: ExperimentResult, gallery: Gallery | None = None) -> Document:
    return Document(page(summary, gallery or Gallery()))


@pytest.fixture
def shown(synthetic: ModuleType, tmp_path: Path) -> Callable[[ExperimentResult], Document]:
    def make(summary: ExperimentResult) -> Document:
        names = [arm.name for arm in summary.arms]
        runs = synthetic.folder(tmp_path, names, layers=1, excerpts=1, width=32)
        return Document(write_report(summary, tmp_path, tmp_path / "out" / "report.html", runs=runs).read_text())

    return make


def test_the_page_tells_the_study_in_its_order(
    synthetic: ModuleType, shown: Callable[[ExperimentResult], Document]
) -> None:
    document = shown(synthetic.study(ARMS, tuned=True, failed=[("coupled", 1)]))
    assert document.headings == [
        "2 arms against standard on python-stdlib",
        "Verdicts",
        "Learning",
        "Differences",
        "Seeds",
        "Readings",
        "Cost and memory",
        "Attention on held-out text",
        "What the mechanisms show of their own",
        "lambda, the weight of the subtracted map",
        "Tuning",
        "Runs that failed",
        "The corpus",
        "On record",
    ]
    answer, verdict = "Better than standard: coupled", "Verdict on each arm"
    assert document.text.index(answer) < document.text.index(verdict) < document.text.index("Shown as")


def test_the_page_holds_the_numbers_of_the_summary(synthetic: ModuleType) -> None:
    summary = synthetic.study(ARMS)
    text = read(summary).text
    for item in summary.comparisons:
        assert typeset(f"{item.difference.mean:+.4f}") in text
        assert typeset(f"{item.difference.low:+.4f} to {item.difference.high:+.4f}") in text
    for arm in summary.arms:
        assert f"{arm.mean:.4f}" in text
        assert f"{arm.parameters:,}" in text
        for loss in arm.bits_per_byte:
            assert f"{loss:.4f}" in text
    for verdict in summary.verdicts:
        assert typeset(verdict.sentence) in text
    for note in summary.notes:
        assert note.value in text
    assert summary.digest in text
    assert "qkflow compare 'my text.txt' --arms standard,differential,coupled" in text
    assert '"torch": "2.13.0"' in text


def test_scripts_are_named_by_their_hash_and_nothing_may_be_loaded(synthetic: ModuleType) -> None:
    text = page(synthetic.study(), Gallery())
    rule = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert rule is not None
    assert text.index("Content-Security-Policy") < text.index("<style>")
    directives = dict(part.split(" ", 1) for part in rule[1].replace("&#39;", "'").split("; "))
    assert directives["default-src"] == "'none'"
    assert "unsafe" not in directives["script-src"]
    assert directives["script-src"].count("'sha256-") == 2
    assert directives["form-action"] == directives["base-uri"] == "'none'"
    assert text.startswith("<!doctype html>")
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)


def test_hostile_text_is_text_wherever_it_comes_from(
    synthetic: ModuleType, shown: Callable[[ExperimentResult], Document]
) -> None:
    names = ("standard", *synthetic.HOSTILE)
    summary = synthetic.study(names, seeds=3, failed=[(names[1], 0)])
    bad = synthetic.HOSTILE
    summary = replace(
        summary,
        folder=f"/home/{bad[0]}/{bad[3]}",
        corpus=bad[1],
        command=("qkflow", bad[2], bad[3]),
        remarks=bad,
        design={bad[0]: bad[2], "deep": [{"x": bad[3]}]},
        environment={"cpu": bad[1]},
        notes=tuple(replace(summary.notes[0], name=text, value=text, meaning=text) for text in bad),
    )
    document, plain = shown(summary), read(synthetic.study(("standard", *(f"arm{n}" for n in range(7))), seeds=3))
    known = {tag for tag, _ in plain.elements} | {"h3", "select", "option", "output", "small"}
    assert {tag for tag, _ in document.elements} <= known
    assert "img" not in {tag for tag, _ in document.elements}
    assert [tag for tag, _ in document.elements].count("script") == 3
    for _, attributes in document.elements:
        assert not any(name.startswith("on") for name in attributes)
        assert not (attributes.get("href") or "").startswith("javascript")
    for text in (bad[0], bad[1], "\\u202e", "\\x00", "\\x1b[31m", "{{ 7*7 }}"):
        assert text in document.text
    assert not {"\x00", "\x1b", "\u202e", "\x07"} & set(document.text)
    assert "49" not in document.text.split("{{ 7*7 }}")[1][:20]


def test_data_for_the_script_cannot_end_its_element(
    synthetic: ModuleType, shown: Callable[[ExperimentResult], Document]
) -> None:
    document = shown(synthetic.study(("standard", *synthetic.HOSTILE), seeds=2))
    assert len(document.scripts) == 3
    assert not {"<", ">", "&"} & set(document.scripts[0])
    data = json.loads(document.scripts[0])
    assert "</script>" in data["maps"][3]["name"]
    assert "<" in data["excerpts"][0]["tokens"]


@pytest.mark.parametrize("seeds", [0, 1, 2])
@pytest.mark.parametrize("arms", [("standard",), ARMS])
def test_a_study_with_little_in_it_has_a_page(synthetic: ModuleType, seeds: int, arms: tuple[str, ...]) -> None:
    document = read(synthetic.study(arms, seeds=seeds))
    assert "There are no attention maps to show yet." in document.text
    assert "Figures need JavaScript, which is off." in document.text
    assert ("No run is finished yet." in document.text) == (seeds == 0)
    assert ("No seed has both runs yet." in document.text) == (seeds == 0 or len(arms) == 1)


def test_what_is_missing_is_said(synthetic: ModuleType) -> None:
    told = read(synthetic.study(ARMS, seeds=1)).text
    assert "One seed only: no interval can be given." in told
    assert "no interval" in told
    text = read(synthetic.study(ARMS, seeds=4, unfinished=True)).text
    assert "6 of 12 runs are finished: what follows is provisional." in text
    failed = read(synthetic.study(ARMS, failed=[("coupled", 1)])).text
    assert "14 of 15 runs are finished, 1 failed." in failed
    assert "coupled: seed 1: the loss was not finite" in failed
    assert "provisional" not in failed
    whole = read(synthetic.study(ARMS)).text
    assert "are finished" not in whole
    gone = read(synthetic.study(ARMS), Gallery(missing=["standard: gone"])).text
    assert "standard: gone" in gone


def test_everything_that_is_referred_to_is_there_once(
    synthetic: ModuleType, shown: Callable[[ExperimentResult], Document]
) -> None:
    document = shown(synthetic.study(ARMS, tuned=True))
    ids = [attributes["id"] for _, attributes in document.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in document.elements:
        for name in ("for", "aria-labelledby"):
            assert set((attributes.get(name) or "").split()) <= set(ids), attributes
        if tag == "a":
            assert (attributes["href"] or "")[1:] in ids
        if tag == "th":
            assert attributes["scope"] in ("row", "col")
        if attributes.get("role") in ("img", "region", "group"):
            assert attributes.get("aria-label") or attributes.get("aria-labelledby")
    assert ("html", {"lang": "en"}) in document.elements
    for landmark in ("header", "nav", "main", "footer", "h1"):
        assert [tag for tag, _ in document.elements].count(landmark) == 1
