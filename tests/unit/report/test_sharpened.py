"""The page of a study of sharper attention as a document."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from qkflow.experiment.metrics.rationale import MetricSummary, RationaleSummary
from qkflow.report import write_sharpened
from qkflow.report.sharpened import MOST_EXAMPLES, sharpened_page
from qkflow.report.shell import typeset


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the five megabytes of plotly, which play no part here."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "window.Plotly = {};")


@pytest.fixture(scope="module")
def made(synthetic: ModuleType) -> ModuleType:
    return synthetic.beside("synthetic_sharpened")


@pytest.fixture(scope="module")
def document(synthetic: ModuleType) -> Any:
    return synthetic.beside("test_page").Document


def test_the_page_tells_the_study_in_its_order(made: ModuleType, document: Any, tmp_path: Path) -> None:
    found = made.study(examples=9)
    read = document(write_sharpened(found, tmp_path / "out" / "sharpen.html").read_text())
    assert read.headings == [
        "3 arms against r = 1 on agreement (built-in grammar)",
        "What each arm comes to",
        "Sharpness along training",
        "Attention confidence",
        "Seeds",
        "Before and after",
        *(f"Example {n + 1}" for n in range(MOST_EXAMPLES)),
        "Beside the published table",
        "By kind of instance",
        "Tuning",
        "The task",
        "On record",
    ]
    assert read.text.index(typeset(found.answer)) < read.text.index("Every metric of each arm")


def test_the_page_holds_the_numbers_of_the_study(made: ModuleType, document: Any) -> None:
    found = made.study()
    text = document(sharpened_page(found)).text
    for arm in found.arms:
        for metric in found.metrics:
            reading, times = arm.readings[metric.name], 100 if metric.unit == "percent" else 1
            digits = 3 if metric.unit == "" else 2
            for value in (reading.mean, *reading.by_seed):
                assert typeset(f"{times * value:.{digits}f}") in text, (arm.name, metric.name)
            if change := found.change(arm.name, metric.name):
                ends = f"{times * change.low:+.{digits}f} to {times * change.high:+.{digits}f}"
                assert typeset(ends.replace("+0.000", "0.000")) in text, (arm.name, metric.name)
        assert f"{100 * arm.at_equal_loss.mean:.2f}" in text
    for number in ("92.43", "41.67", "0.240", "93.41", "76.85", "0.2100", "failed", "rationale outside the text"):
        assert number in text
    assert "qkflow sharpen --task agreement" in text
    assert '"torch": "2.13.0"' in text


def test_words_are_coloured_by_their_share_and_the_rationale_is_underlined(made: ModuleType, document: Any) -> None:
    found = made.study(examples=1)
    read = document(sharpened_page(found))
    words = [attributes for _, attributes in read.elements if "word" in (attributes.get("class") or "").split()]
    (example,) = found.examples
    shares = [share for own in example.attention.values() for share in own]
    assert len(words) == len(shares)
    alphas = [float(word["style"].removeprefix("--a:")) for word in words]
    assert sorted(range(len(shares)), key=lambda n: shares[n])[-1] == alphas.index(max(alphas))
    assert all(
        math.isclose(alpha, 0.55 * math.sqrt(x / max(shares)), abs_tol=1e-3)
        for alpha, x in zip(alphas, shares, strict=True)
    )
    count = len(example.words)
    marked = [n for n, word in enumerate(words) if "because" in word["class"]]
    assert marked == [row * count + example.rationale[0] for row in range(len(example.attention))]
    assert words[1]["title"] == f"author: {shares[1]:.3f}"
    assert "singular (0.75)" in read.text


def test_hostile_text_is_text_wherever_it_comes_from(synthetic: ModuleType, made: ModuleType, document: Any) -> None:
    bad = synthetic.HOSTILE
    found = made.study(("r = 1", *bad), seeds=2, words=(*bad, "שלום", "😀"))
    arms = tuple(replace(arm, told=bad[0], by_kind={bad[1]: {"mass": 0.2}}, failures=bad) for arm in found.arms)
    metrics = tuple(replace(one, title=bad[0], told=bad[2]) for one in found.metrics)
    hostile = replace(
        found,
        arms=arms,
        metrics=metrics,
        task=bad[1],
        answer=bad[0],
        notes=bad,
        remarks=bad,
        skipped=dict.fromkeys(bad, 1),
        pooling=bad[2],
        command=bad,
        design={bad[0]: bad[3]},
        published=((bad[1], 1.0, 2.0, 3.0),),
        examples=tuple(replace(one, answer=bad[1], predicted={"r = 1": bad[2]}) for one in found.examples),
    )
    read = document(sharpened_page(hostile))
    plain = document(sharpened_page(replace(made.study(), remarks=("x",), arms=arms)))
    assert {tag for tag, _ in read.elements} <= {tag for tag, _ in plain.elements} | {"code"}
    assert [tag for tag, _ in read.elements].count("script") == len(read.scripts) == 3
    assert not {"<", ">", "&"} & set(read.scripts[0])
    json.loads(read.scripts[0])
    for _, attributes in read.elements:
        assert not any(name.startswith("on") for name in attributes)
        assert (attributes.get("href") or "#").startswith(("#", "data:,"))
    for text in (bad[0], bad[1], "\\u202e", "\\x00", "\\x1b[31m", "{{ 7*7 }}", "שלום", "😀"):
        assert text in read.text
    assert not {"\x00", "\x1b", "\u202e", "\x07"} & set(read.text)


@pytest.mark.parametrize("seeds", [0, 1, 2])
@pytest.mark.parametrize("arms", [(), ("r = 1",), ("r = 1", "r = 20")])
def test_a_study_with_little_in_it_has_a_page(
    made: ModuleType, document: Any, seeds: int, arms: tuple[str, ...]
) -> None:
    found: RationaleSummary = made.study(("r = 1",), seeds=seeds, examples=0)
    found = made.study(arms, seeds=seeds, examples=0) if arms else replace(found, arms=(), changes=(), finished=0)
    text = document(sharpened_page(found)).text
    assert ("There is no answer yet." in text) == (seeds == 0)
    assert ("0 of " in text and "what follows is provisional" in text) == (found.finished == 0)
    assert ("the texts of this task may not be" in text) == (found.finished > 0)
    if seeds == 1 and len(arms) == 2:
        assert "no interval" in text
        assert "One seed says little." in text


def test_what_is_not_known_is_a_dash_and_not_a_zero(made: ModuleType, document: Any) -> None:
    found = made.study(("r = 1", "r = 20"), seeds=3)
    unknown = MetricSummary(mean=None, by_seed=())
    arms = tuple(
        replace(arm, readings={**arm.readings, "mass": unknown}, curve=(), at_equal_loss=None) for arm in found.arms
    )
    changes = tuple(one for one in found.changes if one.metric != "mass")
    text = document(sharpened_page(replace(found, arms=arms, changes=changes, equal_loss=None))).text
    assert "There is no loss that every finished run has passed" in text
    assert "No finished run has instances with a rationale." in text
    assert "nan" not in text.lower().replace("dominant", "")


def test_everything_that_is_referred_to_is_there_once(made: ModuleType, document: Any) -> None:
    read = document(sharpened_page(made.study()))
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in read.elements:
        assert set((attributes.get("aria-labelledby") or "").split()) <= set(ids), attributes
        if tag == "a":
            assert (attributes["href"] or "")[1:] in ids
        if tag == "th":
            assert attributes["scope"] in ("row", "col")
        if attributes.get("role") in ("img", "region", "group"):
            assert attributes.get("aria-label") or attributes.get("aria-labelledby")
    figures = json.loads(read.scripts[0])["figures"]
    assert {f"plot-{name}" for name in figures} <= set(ids)
