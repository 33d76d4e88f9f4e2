import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.formatting import (
    escape_unprintable,
    format_bytes,
    format_compact,
    format_number,
    format_signed,
    shorten,
    token_label,
)

ANY = st.text(st.characters(codec=None), max_size=60)  # also lone surrogates


@given(ANY)
@settings(deadline=None, max_examples=25)
def test_escaped_text_is_printable_and_escaping_is_idempotent(text: str) -> None:
    shown = escape_unprintable(text)
    assert shown.isprintable()
    shown.encode("utf-8")
    assert escape_unprintable(shown) == shown


@given(ANY, st.integers(8, 40))
@settings(deadline=None, max_examples=25)
def test_shortened_text_keeps_both_ends(text: str, max_length: int) -> None:
    short, whole = shorten(text, max_length), escape_unprintable(text)
    assert len(short) == min(max_length, len(whole))
    assert whole.startswith(short.split("…")[0]) or "…" in whole
    assert short[-1:] == whole[-1:]


@given(st.binary(max_size=12))
@settings(deadline=None, max_examples=25)
def test_every_token_has_a_printable_label(piece: bytes) -> None:
    assert token_label(piece).isprintable()
    assert token_label(piece)


def test_different_tokens_have_different_labels() -> None:
    pieces = [b" ", b"\n", b"\t", b"\xc3", b"\x00", b"a", b" a", b"", "\u202e".encode(), "\u00a0".encode()]
    labels = [token_label(piece) for piece in pieces] + [token_label(b"", is_end=True)]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -float("inf")])
def test_missing_and_non_finite_numbers_are_a_dash(value: float | None) -> None:
    assert format_signed(value) == format_number(value) == format_compact(value) == format_bytes(value) == "\N{EN DASH}"


def test_a_number_that_rounds_to_zero_has_no_sign() -> None:
    assert format_signed(-1e-9) == format_signed(1e-9) == "0.0000"


def test_units_keep_at_most_three_digits() -> None:
    assert [format_compact(x) for x in (999, 1000, 999_600, 12_345_678)] == ["999", "1k", "1M", "12.3M"]
