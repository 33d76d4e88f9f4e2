"""Evaluation on recall tasks: scored tokens and correct answers."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data import CELL_DTYPE, Split
from qkflow.models import Decoder, DecoderConfig, Sampling, generate
from qkflow.training import Evaluation, evaluate
from qkflow.training.evaluate import DOCUMENT, HeldOutSplit

evaluation = importlib.import_module("qkflow.training.evaluate")  # not the function of the same name

WORDS = 2
END = WORDS


def split_of(*lengths: int, widest: int = 3) -> Split:
    """Return instances of several lengths with two answers of one to `widest` tokens each."""
    generator = np.random.default_rng(sum(lengths))
    tokens, spans, answers, sizes = [END], [], [], []
    for length in lengths:
        begin, half = len(tokens), length // 2
        tokens += [*generator.integers(0, WORDS, length).tolist(), END]
        spans.append((begin, begin + length))
        pair = [generator.integers(1, widest + 1) for _ in range(2)]
        answers += [(begin + half - pair[0], begin + half), (begin + length - pair[1], begin + length)]
        sizes.append(sum(pair))
    cells = np.zeros(len(lengths), CELL_DTYPE)
    cells["pairs"], cells["length"], cells["depth"] = 2, lengths, -1
    return Split(
        tokens=np.array(tokens, np.uint16),
        documents=np.array(spans, np.int64),
        sizes=np.array(sizes, np.int64),
        answers=np.array(answers, np.int64),
        cells=cells,
    )


def decoder(mechanism: str = "standard") -> Decoder:
    torch.manual_seed(1)
    shape = {"width": 16, "layers": 2, "heads": 2, "hidden": 16, "vocabulary": WORDS + 1, "mechanism": mechanism}
    model = Decoder(DecoderConfig(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)  # blocks are nearly zero at initialization
    return model.eval()


def learn(model: Decoder, split: Split, steps: int) -> None:
    """Memorize some answers of a split."""
    held_out = HeldOutSplit(split, context=8)
    examples, mask = held_out.examples(held_out.windows, max(window.length for window in held_out.windows))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(examples.inputs)[0][mask], examples.targets[mask]).backward()
        optimizer.step()


@given(
    lengths=st.lists(st.integers(8, 40), min_size=1, max_size=6), batch=st.integers(1, 9), context=st.integers(8, 20)
)
@settings(deadline=None, max_examples=10)
def test_the_loss_is_that_of_the_answers_given_the_tokens_before_them(
    lengths: list[int], batch: int, context: int
) -> None:
    model, split = decoder(), split_of(*lengths)
    result = evaluate(model, split, context=context, batch=batch)
    expected = np.zeros(len(lengths))
    for number, (begin, end) in enumerate(split.documents.tolist()):
        tokens = torch.from_numpy(split.tokens[begin - 1 : end].astype(np.int64))
        with torch.no_grad():
            losses = F.cross_entropy(model(tokens[None, :-1])[0][0], tokens[1:], reduction="none")
        for first, last in split.answers.tolist():
            if begin <= first < end:
                expected[number] += losses[first - begin : last - begin].sum().item()
    assert result.documents["nats"].tolist() == pytest.approx(expected.tolist(), rel=1e-4)
    assert result.documents["tokens"].tolist() == result.documents["bytes"].tolist() == split.sizes.tolist()


@pytest.mark.parametrize("mechanism", ["standard", "qdelta"])
def test_a_question_is_correct_iff_greedy_decoding_gives_its_answer(mechanism: str) -> None:
    model, split = decoder(mechanism), split_of(*range(8, 40))
    learn(model, split, steps=12)
    result = evaluate(model, split, context=16, batch=5)
    owners = np.searchsorted(split.documents[:, 0], split.answers[:, 0], side="right") - 1
    prompts = [
        split.tokens[split.documents[owner, 0] - 1 : first].tolist()
        for owner, first in zip(owners, split.answers[:, 0], strict=True)
    ]
    written = generate(model, prompts, tokens=3, sampling=Sampling(temperature=0.0))
    expected = [split.tokens[first:last].tolist() for first, last in split.answers]
    same = [row[: len(answer)] == answer for row, answer in zip(written, expected, strict=True)]
    right = np.bincount(owners, weights=same).astype(int)
    assert {len(answer) for answer, is_same in zip(expected, same, strict=True) if is_same} == {1, 2, 3}
    assert result.cells is not None
    assert result.cells["right"].tolist() == right.tolist()
    assert set(right.tolist()) == {0, 1, 2}
    assert result.cells["questions"].tolist() == [2] * len(right)
    assert result.accuracy == right.sum() / (2 * len(right))


def test_a_partly_correct_answer_is_wrong() -> None:
    """A model that always predicts the same word has at most one of two different answers."""
    model = decoder()
    with torch.no_grad():
        for block in model.blocks:
            for parameter in block.parameters():
                parameter.zero_()
        model.norm.weight.fill_(1.0)
        model.embedding.weight.copy_(torch.eye(WORDS + 1, 16))  # each word is followed by itself
    split = split_of(9, widest=1)
    tokens = np.array([END, 0, 0, 1, 1, 1, 0, 0, 0, 0, END], np.uint16)
    for answers, right in (([[2, 4], [4, 6]], 1), ([[2, 3], [4, 6]], 2), ([[2, 4], [5, 8]], 0)):
        now = Split(
            tokens=tokens, documents=split.documents, sizes=split.sizes, answers=np.array(answers), cells=split.cells
        )
        result = evaluate(model, now, context=16)
        assert result.cells is not None
        assert result.cells["right"].tolist() == [right]


def test_long_instances_are_evaluated_in_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, split, shapes = decoder(), split_of(*[100] * 3, *[32] * 5, *[8] * 9), []
    read = Decoder.read
    monkeypatch.setattr(
        Decoder, "read", lambda self, tokens, *rest: [shapes.append(tokens.shape), read(self, tokens, *rest)][1]
    )
    evaluate(model, split, context=16, batch=4)
    assert [tuple(shape) for shape in shapes] == [(1, 100)] * 3 + [(2, 32)] * 2 + [(2, 32)] + [(4, 8)] * 2


@pytest.mark.parametrize("mechanism", ["standard", "qdelta", "kuramoto"])
def test_reading_in_chunks_changes_nothing(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, split = decoder(mechanism), split_of(40, 33, 12)
    whole = evaluate(model, split, context=16)
    monkeypatch.setattr(evaluation, "CHUNK", 7)
    pieces = evaluate(model, split, context=16)
    np.testing.assert_allclose(whole.documents["nats"], pieces.documents["nats"], rtol=1e-4)
    assert np.array_equal(whole.cells, pieces.cells)  # pyright: ignore


def test_text_has_no_accuracy() -> None:
    result = Evaluation(np.array([(1.0, 1, 1)], DOCUMENT))
    assert result.accuracy is None
    assert not {"accuracy", "questions"} & result.summary().keys()
