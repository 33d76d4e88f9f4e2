import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.report.wording import brief, fixed, short, signed, size, token_label, visible

ANY = st.text(st.characters(codec=None), max_size=60)  # lone surrogates too


@given(ANY)
@settings(deadline=None, max_examples=25)
def test_visible_text_prints_and_can_be_written_anywhere(text: str) -> None:
    shown = visible(text)
    assert shown.isprintable()
    shown.encode("utf-8")
    assert visible(shown) == shown


@given(ANY, st.integers(8, 40))
@settings(deadline=None, max_examples=25)
def test_short_text_keeps_its_ends(text: str, most: int) -> None:
    told, whole = short(text, most), visible(text)
    assert len(told) == min(most, len(whole))
    assert whole.startswith(told.split("…")[0]) or "…" in whole
    assert told[-1:] == whole[-1:]


@given(st.binary(max_size=12))
@settings(deadline=None, max_examples=25)
def test_every_token_has_a_label_that_prints(piece: bytes) -> None:
    assert token_label(piece).isprintable()
    assert token_label(piece)


def test_tokens_that_look_alike_have_labels_that_differ() -> None:
    pieces = [b" ", b"\n", b"\t", b"\xc3", b"\x00", b"a", b" a", b"", "\u202e".encode(), "\u00a0".encode()]
    labels = [token_label(piece) for piece in pieces] + [token_label(b"", end=True)]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_a_dash(value: float | None) -> None:
    assert signed(value) == fixed(value) == brief(value) == size(value) == "\N{EN DASH}"


def test_a_difference_that_rounds_to_nothing_has_no_sign() -> None:
    assert signed(-1e-9) == signed(1e-9) == "0.0000"


def test_units_change_where_three_digits_would_not_do() -> None:
    assert [brief(x) for x in (999, 1000, 999_600, 12_345_678)] == ["999", "1 k", "1 M", "12.3 M"]
