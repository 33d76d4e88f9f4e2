"""The page of a probe: untrusted text stays text."""

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data import ByteTokenizer
from qkflow.probes.attention import attention_stats, rationale_confidence
from qkflow.probes.diagnostics import Diagnostic
from qkflow.report import probe_page
from qkflow.report.html import render
from qkflow.report.probe_page import ProbePart, ProbeResult, characters, probe_report
from qkflow.report.sections import text_table

Parse = Callable[[str], Any]
DIAGNOSTIC = Diagnostic(title="gate", kind="bars", x=("head 1",), series=("open",), values=((0.2,),))


def page_of(text: bytes, *, name: str = "mine", marked: tuple[int, ...] = ()) -> str:
    tokens = [256, *text]
    scores = torch.randn(2, len(tokens), len(tokens))
    causal = torch.ones(len(tokens), len(tokens)).tril().bool()
    maps = [scores.masked_fill(~causal, -torch.inf).softmax(-1), -torch.eye(len(tokens))[None]]
    attention = attention_stats(maps)
    table = text_table(caption=name, columns=("layer", name), rows=[("1", name)], text_columns=(0, 1))
    part = ProbePart(name="maps", title="Attention of each layer", table=table, verdict=name, note=name)
    result = ProbeResult(
        name=name,
        mechanism=name,
        step=1,
        steps=2,
        source=name,
        tokens=tokens,
        tokenizer=ByteTokenizer(),
        maps=maps,
        diagnostics=[(DIAGNOSTIC,), ()],
        diagnostic_tokens=min(64, len(tokens)),
        attention=attention,
        confidence=rationale_confidence(attention, marked) if marked else None,
        parts=[part, ProbePart(name="stability", title="Stability", table=table, verdict=name)],
        remarks=[name],
        command=["qkflow", "probe", name],
        config={name: name},
    )
    return render(probe_report(result))


TEXTS = {
    "a script": b"<script>alert(1)</script>",
    "quotes": b"\"><img src=x onerror='x'> `{{ 7*7 }}`",
    "controls": b"nul\x00bell\x07escape\x1b[31m\r\n\ttab",
    "right to left": "\u202eevil שלום\u2066".encode(),
    "emoji and broken bytes": "😀".encode() + b"\xff\xf0\x9f",
    "one byte": b"x",
}


@pytest.mark.parametrize("what", TEXTS)
def test_untrusted_text_stays_text(parse: Parse, what: str) -> None:
    text = TEXTS[what]
    page = parse(page_of(text, name=text.decode("utf-8", "surrogateescape")))
    page.check_inert()


def test_multibyte_characters_are_shown_and_invalid_bytes_escaped(parse: Parse) -> None:
    text = parse(page_of(TEXTS["emoji and broken bytes"])).text
    assert "😀" in text
    assert "\\xff" in text


@given(st.lists(st.binary(max_size=5), max_size=20))
@settings(deadline=None, max_examples=25)
def test_every_token_belongs_to_one_character_in_order(pieces: list[bytes]) -> None:
    spans = characters(pieces)
    assert [place for begin, end in spans for place in range(begin, end)] == list(range(len(pieces)))


def test_the_rationale_is_underlined_with_its_mass(parse: Parse) -> None:
    page = parse(page_of(b"an author", marked=(4, 5, 6, 7, 8, 9)))
    marked = [one["title"] for _, one in page.elements if "rationale" in (one.get("class") or "")]
    assert [title[0] for title in marked] == list("author" * 3)
    assert "mass on the rationale" in page.text
    assert "mass on the rationale" not in parse(page_of(b"an author")).text


def test_every_reference_has_its_target(parse: Parse) -> None:
    page = parse(page_of(b"some text\nof two lines"))
    page.check_references()
    ids = {attributes.get("id") for _, attributes in page.elements}
    assert {"maps", "layers", "stability", "diagnostics", "record"} <= ids


def test_a_long_text_shows_the_maps_of_its_last_tokens(
    parse: Parse, synthetic: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_page, "MAX_TOKENS", 8)
    page = parse(page_of(b"x" * 22 + b"the last"))
    assert "Maps show the last 8 of 31 tokens." in page.text
    data = json.loads(page.scripts[0])
    assert data["excerpts"][0]["tokens"] == ["t", "h", "e", "␣", "l", "a", "s", "t"]
    assert data["token"] == 7
    assert [synthetic.unpack(head, 8).shape for head in data["maps"][0]["maps"][0][0]] == [(8, 8)] * 2
