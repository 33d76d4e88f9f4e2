import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.errors import UsageError
from qkflow.probes.attention import attended, confidence_on, places_of


def test_even_attention_attends_to_every_token_and_a_single_one_to_one() -> None:
    even = torch.ones(2, 4, 4).tril() / torch.arange(1, 5)[:, None]
    last = torch.eye(4).expand(2, 4, 4)
    found = attended([even, last])
    assert found.layers[0].attended_last == pytest.approx(4)
    assert found.layers[0].entropy_last == pytest.approx(math.log(4))
    assert found.layers[0].attended == pytest.approx((1 + 2 + 3 + 4) / 4)
    assert found.layers[1].attended_last == found.layers[1].attended == pytest.approx(1)
    assert found.pooled["average"] == pytest.approx([0.125, 0.125, 0.125, 0.625])
    assert all(sum(shares) == pytest.approx(1) for shares in found.pooled.values())


def test_figures_are_means_over_heads() -> None:
    heads = torch.stack([torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.eye(2)])
    assert attended([heads]).layers[0].attended_last == pytest.approx(1.5)


def test_the_strongest_link_is_between_two_different_tokens_and_has_its_sign() -> None:
    weights = torch.eye(3).repeat(2, 1, 1)
    weights[1, 2, 0] = -0.7
    weights[0, 1, 0] = 0.3
    link = attended([weights]).layers[0].strongest
    assert link is not None
    assert (link.by, link.source, link.head) == (2, 0, 1)
    assert link.weight == pytest.approx(-0.7)
    assert attended([torch.ones(1, 1, 1)]).layers[0].strongest is None


def test_a_token_that_attends_to_nothing_is_left_out_of_means() -> None:
    weights = torch.eye(3)[None].clone()
    weights[0, 0] = 0  # as where only what came before is seen
    assert attended([weights]).layers[0].attended == pytest.approx(1)
    assert math.isnan(attended([torch.zeros(1, 2, 2)]).layers[0].attended)


def test_mass_lies_between_none_and_all_and_even_attention_gives_the_part_of_the_tokens() -> None:
    even = torch.ones(1, 4, 4).tril() / torch.arange(1, 5)[:, None]
    on = confidence_on(attended([even]), [0, 3])
    assert on.mass["average"] == on.mass["max"] == pytest.approx(on.even) == pytest.approx(0.5)
    assert confidence_on(attended([even]), range(4)).mass["rollout"] == pytest.approx(1)


@given(st.lists(st.sampled_from(["the", "author", "guards", "naïve", "שלום", "😀", "a.b"]), min_size=1), st.data())
@settings(deadline=None, max_examples=25)
def test_words_are_found_however_the_text_is_cut_into_tokens(words: list[str], data: st.DataObject) -> None:
    text = " ".join(words).encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)))))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True) if begin < end]
    wanted = data.draw(st.sampled_from(words))
    inside = set()
    for place, word in enumerate(words):
        if word == wanted:
            begin = len(" ".join([*words[:place], ""]).encode())
            inside |= set(range(begin, begin + len(word.encode())))
    begins = [sum(map(len, pieces[:n])) for n in range(len(pieces))]
    overlap = [n for n, piece in enumerate(pieces) if inside & set(range(begins[n], begins[n] + len(piece)))]
    assert places_of(wanted, pieces) == tuple(overlap)


def test_a_token_beside_a_word_is_not_of_it() -> None:
    assert places_of("author", [b"the ", b"author", b" of"]) == (1,)


@pytest.mark.parametrize("words", ["auth", "authors", "", " "])
def test_what_is_no_word_of_the_text_is_refused(words: str) -> None:
    with pytest.raises(UsageError, match=r"words? of the text"):
        places_of(words, [b"the", b" author"])
