"""Held-out loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qkflow.data import Corpus, Split
from qkflow.errors import DivergenceError, Interrupted, NotFiniteError, UsageError
from qkflow.models import Decoder
from qkflow.training import Evaluation, evaluate
from qkflow.training.distributed import ProcessGroup, SingleProcess
from qkflow.training.evaluate import DOCUMENT, HeldOutSplit, evaluate_held_out
from qkflow.training.logits import TargetLogits


def split_of(*lengths: int) -> Split:
    generator = np.random.default_rng(0)
    tokens, spans = [256], []
    for length in lengths:
        spans.append((len(tokens), len(tokens) + length))
        tokens += [*generator.integers(0, 256, length).tolist(), 256]
    return Split(
        tokens=np.array(tokens, np.uint16), documents=np.array(spans, np.int64), sizes=np.array(lengths, np.int64)
    )


def decoder(configure: Any, **shape: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(configure(model=shape).model)


def one_by_one(model: Decoder, split: Split, context: int) -> list[float]:
    """The loss of one document at a time, as a reference for the batched form."""
    totals = []
    for begin, end in split.documents.tolist():
        total = 0.0
        for at in range(begin, end, context):
            stop = min(at + context, end)
            tokens = torch.from_numpy(split.tokens[at - 1 : stop].astype(np.int64))
            logits = model(tokens[None, :-1])[0][0]
            total += F.cross_entropy(logits, tokens[1:], reduction="sum").item()
        totals.append(total)
    return totals


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), batch=st.integers(1, 9), context=st.integers(1, 20)
)
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_batches_and_padding_change_no_document(configure: Any, lengths: list[int], batch: int, context: int) -> None:
    model, split = decoder(configure), split_of(*lengths)
    result = evaluate(model, split, context=context, batch=batch)
    assert result.documents["tokens"].tolist() == lengths
    assert result.documents["bytes"].tolist() == lengths
    with torch.no_grad():
        assert result.documents["nats"].tolist() == pytest.approx(one_by_one(model, split, context), rel=1e-5)


@pytest.mark.parametrize("stride", [1, 5, 16])
def test_a_stride_scores_every_token_once(configure: Any, stride: int) -> None:
    model, split, context = decoder(configure), split_of(50, 7), 16
    result = evaluate(model, split, context=context, stride=stride, batch=4)
    assert result.documents["tokens"].tolist() == [50, 7]
    for row, (begin, end) in enumerate(split.documents.tolist()):
        total = 0.0
        for target in range(begin, end):
            ahead = max(0, target - begin + 1 - context)
            start = begin - 1 + -(-ahead // stride) * stride
            tokens = torch.from_numpy(split.tokens[start : target + 1].astype(np.int64))
            with torch.no_grad():
                total += F.cross_entropy(model(tokens[None, :-1])[0][0, -1], tokens[-1]).item()
        assert result.documents["nats"][row] == pytest.approx(total, rel=1e-5)


def test_a_limit_takes_whole_documents(configure: Any, corpus: Corpus) -> None:
    split = split_of(*[10] * 8)
    result = evaluate(decoder(configure), split, context=16, limit=35)
    assert result.documents["tokens"].tolist() == [10, 10, 10]


def test_evaluation_is_deterministic_and_does_not_change_the_model(configure: Any, corpus: Corpus) -> None:
    model = decoder(configure, dropout=0.5).train()
    before = torch.get_rng_state()
    first, second = (evaluate(model, corpus.validation, context=16, batch=3) for _ in range(2))
    assert np.array_equal(first.documents, second.documents)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    evaluate(model.eval(), corpus.validation, context=16)
    assert not model.training


def test_summary_values_follow_from_the_documents() -> None:
    result = Evaluation(np.array([(6 * math.log(2), 2, 3), (10 * math.log(2), 2, 5)], DOCUMENT))
    assert result.bits_per_byte == pytest.approx(2.0)
    assert result.perplexity == pytest.approx(16.0)
    assert result.summary()["scored_bytes"] == 8
    assert Evaluation(np.array([(1e6, 1, 1)], DOCUMENT)).summary()["perplexity"] is None


def test_an_evaluation_can_be_stopped_between_batches(configure: Any) -> None:
    calls = []

    def should_stop() -> bool:
        calls.append(True)
        return len(calls) == 2

    model = decoder(configure)
    with pytest.raises(Interrupted):
        evaluate(model, split_of(9, 9, 9, 9), context=16, batch=1, should_stop=should_stop)
    assert len(calls) == 2


def test_a_non_finite_loss_names_the_layer(configure: Any) -> None:
    model = decoder(configure)
    with torch.no_grad():
        model.get_submodule("blocks.1.mechanism.output").weight.fill_(float("nan"))  # pyright: ignore
    with pytest.raises(DivergenceError, match=r"not finite.*blocks\.1\.mechanism\.output"):
        evaluate(model, split_of(9), context=16)


def test_a_layer_error_exits_a_sharded_process(configure: Any) -> None:
    class Refusing(TargetLogits):
        def forward(self, *args: Any) -> Any:
            raise NotFiniteError("beta is nan")

    split, options = HeldOutSplit(split_of(5), context=8), {"batch": 1}
    refusing = Refusing(decoder(configure))
    never = {"should_stop": lambda: False}
    with pytest.raises(DivergenceError, match=r"is not finite: the first non-finite output is the loss itself"):
        evaluate_held_out(refusing, split, group=SingleProcess(), **options, **never)
    with pytest.raises(DivergenceError, match=r"is not finite: beta is nan$"):
        evaluate_held_out(
            refusing, split, group=ProcessGroup(rank=0, size=1, local_rank=0, kind="fsdp"), **options, **never
        )


def test_an_empty_split_raises(configure: Any) -> None:
    nothing = Split(tokens=np.array([256]), documents=np.zeros((0, 2), np.int64), sizes=np.zeros(0, np.int64))
    with pytest.raises(UsageError, match="no held-out document"):
        evaluate(decoder(configure), nothing, context=16)
    with pytest.raises(UsageError, match="batch size must be at least 1, got 0"):
        evaluate(decoder(configure), split_of(9), context=16, batch=0)
