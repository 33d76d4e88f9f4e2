from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.report.highlight import AROUND, LONG, lines, shade


@given(st.floats(0, 1), st.floats(0, 1))
@settings(deadline=None, max_examples=25)
def test_a_larger_share_never_has_less_colour(first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert 0 <= shade(low, 1.0) <= shade(high, 1.0) < 0.6  # the word stays readable


@given(st.integers(1, 300), st.data())
@settings(deadline=None, max_examples=25)
def test_nothing_that_matters_is_left_out_of_a_long_text(count: int, data: st.DataObject) -> None:
    marked = data.draw(st.sets(st.integers(0, count - 1), max_size=3))
    peak = data.draw(st.integers(0, count - 1))
    shares = [1.0 if place == peak else 0.001 for place in range(count)]
    words = [f"w{place}" for place in range(count)]
    (line,) = lines(words, {"r = 1": shares}, {}, marked=marked)
    shown = [word.text for word in line.words if not word.gap]
    assert {words[place] for place in (*marked, peak, 0, count - 1)} <= set(shown)
    assert shown == [word for word in words if word in shown]
    gaps = [int(word.text.split()[1]) for word in line.words if word.gap]
    assert len(shown) + sum(gaps) == count
    assert len(shown) <= max(LONG, 6 * (2 * AROUND + 1))


def test_a_gap_says_what_it_holds() -> None:
    shares = [1.0, *[0.001] * 198, 1.0]
    (line,) = lines(["w"] * 200, {"r = 1": shares}, {})
    (gap,) = (word for word in line.words if word.gap)
    assert gap.told == "190 words: 0.190 together"


def test_all_models_are_on_one_scale() -> None:
    first, second = lines(["a", "b"], {"x": [0.9, 0.1], "y": [0.1, 0.1]}, {"y": "plural"})
    assert first.words[1].alpha == second.words[0].alpha < first.words[0].alpha
    assert second.told == "plural"
