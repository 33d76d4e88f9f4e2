from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data.tasks import Instance, Task
from qkflow.models import Decoder, DecoderConfig
from qkflow.training.tasks import overlap, write_answers
from qkflow.training.tasks.writing import MOST


@pytest.fixture
def model(decoder: DecoderConfig) -> Decoder:
    torch.manual_seed(3)
    made = Decoder(decoder).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter))
    return made


@pytest.mark.parametrize("batch", [1, 3])
def test_answers_are_those_of_one_text_at_a_time_until_the_end(copies: Task, model: Decoder, batch: int) -> None:
    texts = copies.test[:5]
    first = write_answers(model, texts, end=-1)
    ends = [answer[2] for answer in first]
    end = max(set(ends), key=ends.count)
    for one, got in zip(texts, write_answers(model, texts, end=end, batch=batch), strict=True):
        want: list[int] = []
        while len(want) < MOST:
            scores, _ = model(torch.tensor([[*one.tokens, *want]]))
            if (token := int(scores[0, -1].argmax())) == end:
                break
            want.append(token)
        assert got == tuple(want)


def test_an_answer_that_never_ends_is_cut(copies: Task, model: Decoder) -> None:
    assert {len(answer) for answer in write_answers(model, copies.test, end=-1)} == {MOST}


def test_an_answer_may_be_empty(model: Decoder) -> None:
    one = Instance(tokens=(2, 3), label=0, rationale=())
    ((token, *_),) = write_answers(model, [one], end=-1)
    assert write_answers(model, [one], end=token) == [()]


@pytest.mark.parametrize(
    ("given_", "right", "f1"),
    [
        ([1, 2], [1, 2], 1.0),
        ([2, 1], [1, 2], 1.0),
        ([1], [2], 0.0),
        ([], [1], 0.0),
        ([1, 1, 1], [1], 0.5),
        ([1, 1], [1, 1, 2], 0.8),
        ([1, 2, 3, 4], [1], 0.4),
    ],
)
def test_overlap_is_the_f1_of_bags(given_: list[int], right: list[int], f1: float) -> None:
    assert overlap(given_, right) == pytest.approx(f1)


@given(one=st.lists(st.integers(0, 3), max_size=5), other=st.lists(st.integers(0, 3), min_size=1, max_size=5))
@settings(deadline=None, max_examples=25)
def test_overlap_is_harmonic_between_precision_and_recall(one: list[int], other: list[int]) -> None:
    left = list(other)
    common = sum(1 for token in one if token in left and (left.remove(token) or True))
    want = 0.0 if not common else 2 / (len(one) / common + len(other) / common)
    assert overlap(one, other) == pytest.approx(want) == overlap(other, one)
