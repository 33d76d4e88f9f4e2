"""The page of a probe: whatever the text, it stays text."""

import json
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data import ByteTokenizer
from qkflow.probes.attention import attention_stats, rationale_confidence
from qkflow.probes.diagnostics import Diagnostic
from qkflow.report import probed
from qkflow.report.gallery import unpack
from qkflow.report.probed import Part, Probed, characters, probed_page
from qkflow.report.rows import Table

EXHIBIT = Diagnostic(title="gate", kind="bars", x=("head 1",), series=("open",), values=((0.2,),))


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "window.Plotly = {};")


def page_of(text: bytes, *, name: str = "mine", marked: tuple[int, ...] = ()) -> str:
    tokens = [256, *text]
    scores = torch.randn(2, len(tokens), len(tokens))
    causal = torch.ones(len(tokens), len(tokens)).tril().bool()
    maps = [scores.masked_fill(~causal, -torch.inf).softmax(-1), -torch.eye(len(tokens))[None]]
    attention = attention_stats(maps)
    rows = Table(caption=name, columns=("layer", name), rows=(("1", name),), words=(0, 1))
    part = Part(name="maps", title="Attention of each layer", table=rows, verdict=name, note=name)
    found = Probed(
        name=name,
        mechanism=name,
        step=1,
        steps=2,
        source=name,
        tokens=tokens,
        tokenizer=ByteTokenizer(),
        maps=maps,
        own=[(EXHIBIT,), ()],
        own_tokens=min(64, len(tokens)),
        attention=attention,
        confidence=rationale_confidence(attention, marked) if marked else None,
        parts=[part, Part(name="stability", title="Stability", table=rows, verdict=name)],
        remarks=[name],
        command=["qkflow", "probe", name],
        config={name: name},
    )
    return probed_page(found)


TEXTS = {
    "a script": b"<script>alert(1)</script>",
    "quotes": b"\"><img src=x onerror='x'> `{{ 7*7 }}`",
    "controls": b"nul\x00bell\x07escape\x1b[31m\r\n\ttab",
    "right to left": "\u202eevil שלום\u2066".encode(),
    "emoji and broken bytes": "😀".encode() + b"\xff\xf0\x9f",
    "one byte": b"x",
}


@pytest.mark.parametrize("what", TEXTS)
def test_the_text_is_text(synthetic: ModuleType, what: str) -> None:
    text = TEXTS[what]
    read = synthetic.beside("test_page").Document(page_of(text, name=text.decode("utf-8", "surrogateescape")))
    assert [tag for tag, _ in read.elements].count("script") == len(read.scripts) == 3
    assert not {"img", "iframe", "form"} & {tag for tag, _ in read.elements}
    assert not {"<", ">", "&"} & set(read.scripts[0])
    for _, attributes in read.elements:
        assert not any(name.startswith("on") for name in attributes)
    assert not {"\x00", "\x1b", "\u202e", "\x07", "\r"} & set(read.text)


def test_characters_of_several_bytes_are_shown_whole_and_broken_ones_as_escapes(synthetic: ModuleType) -> None:
    text = synthetic.beside("test_page").Document(page_of(TEXTS["emoji and broken bytes"])).text
    assert "😀" in text
    assert "\\xff" in text


@given(st.lists(st.binary(max_size=5), max_size=20))
@settings(deadline=None, max_examples=25)
def test_characters_take_every_token_once_and_in_order(pieces: list[bytes]) -> None:
    spans = characters(pieces)
    assert [place for begin, end in spans for place in range(begin, end)] == list(range(len(pieces)))


def test_words_that_were_named_are_underlined_with_their_mass(synthetic: ModuleType) -> None:
    document: Any = synthetic.beside("test_page").Document
    read = document(page_of(b"an author", marked=(4, 5, 6, 7, 8, 9)))
    marked = [one["title"] for _, one in read.elements if "because" in (one.get("class") or "")]
    assert [title[0] for title in marked] == list("author" * 3)
    assert "mass on the words" in read.text
    assert "mass on the words" not in document(page_of(b"an author")).text


def test_everything_that_is_referred_to_is_there_once(synthetic: ModuleType) -> None:
    read = synthetic.beside("test_page").Document(page_of(b"some text\nof two lines"))
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"maps", "layers", "stability", "own", "record"} <= set(ids)
    for tag, attributes in read.elements:
        for name in ("for", "aria-labelledby"):
            assert set((attributes.get(name) or "").split()) <= set(ids), attributes
        if tag == "a":
            assert (attributes["href"] or "")[1:] in ids


def test_of_a_long_text_the_last_tokens_maps_are_shown_and_it_is_said(
    synthetic: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probed, "MOST_SHOWN", 8)
    read = synthetic.beside("test_page").Document(page_of(b"x" * 22 + b"the last"))
    assert "Maps are of the last 8 of 31 tokens." in read.text
    data = json.loads(read.scripts[0])
    assert data["excerpts"][0]["tokens"] == ["t", "h", "e", "␣", "l", "a", "s", "t"]
    assert data["token"] == 7
    assert [unpack(head, 8).shape for head in data["maps"][0]["maps"][0][0]] == [(8, 8)] * 2
