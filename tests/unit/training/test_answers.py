"""Generated answers and their F1 score."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data.tasks import Instance, Task
from qkflow.models import Decoder, DecoderConfig
from qkflow.training.answers import MAX_TOKENS, token_f1, write_answers


@pytest.fixture
def model(answer_decoder: DecoderConfig) -> Decoder:
    torch.manual_seed(3)
    decoder = Decoder(answer_decoder).double().eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(torch.randn_like(parameter))
    return decoder


@pytest.mark.parametrize("batch", [1, 3])
def test_batched_answers_equal_those_of_one_text_at_a_time(copy_task: Task, model: Decoder, batch: int) -> None:
    instances = copy_task.test[:5]
    third_tokens = [answer[2] for answer in write_answers(model, instances, end=-1)]
    end = max(set(third_tokens), key=third_tokens.count)
    for instance, answer in zip(instances, write_answers(model, instances, end=end, batch=batch), strict=True):
        expected: list[int] = []
        while len(expected) < MAX_TOKENS:
            logits, _ = model(torch.tensor([[*instance.tokens, *expected]]))
            if (token := int(logits[0, -1].argmax())) == end:
                break
            expected.append(token)
        assert answer == tuple(expected)


def test_an_answer_without_an_end_is_truncated(copy_task: Task, model: Decoder) -> None:
    assert {len(answer) for answer in write_answers(model, copy_task.test, end=-1)} == {MAX_TOKENS}


def test_an_answer_may_be_empty(model: Decoder) -> None:
    instance = Instance(tokens=(2, 3), label=0, rationale=())
    ((token, *_),) = write_answers(model, [instance], end=-1)
    assert write_answers(model, [instance], end=token) == [()]


@pytest.mark.parametrize(
    ("answer", "reference", "f1"),
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
def test_f1_of_bags_of_tokens(answer: list[int], reference: list[int], f1: float) -> None:
    assert token_f1(answer, reference) == pytest.approx(f1)


@given(answer=st.lists(st.integers(0, 3), max_size=5), other=st.lists(st.integers(0, 3), min_size=1, max_size=5))
@settings(deadline=None, max_examples=25)
def test_f1_is_the_harmonic_mean_of_precision_and_recall(answer: list[int], other: list[int]) -> None:
    remaining = list(other)
    common = sum(1 for token in answer if token in remaining and (remaining.remove(token) or True))
    expected = 0.0 if not common else 2 / (len(answer) / common + len(other) / common)
    assert token_f1(answer, other) == pytest.approx(expected) == token_f1(other, answer)
