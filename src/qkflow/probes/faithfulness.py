r"""Faithfulness of attention: delete the tokens that it ranks highest, or all others, and compare the answers.

    comprehensiveness  p(yhat | x) - p(yhat | x without the top tokens)     high: the answer needed them
    sufficiency        p(yhat | x) - p(yhat | the top tokens only)          low: they were enough
    AOPC               either, averaged over the top 1, 5, 10, 20 and 50 %

yhat is the model's own answer to the whole text x (ERASER, DeYoung et al. 2020, https://arxiv.org/abs/1911.03429). The
top tokens are 5 % of those that may be deleted, rounded up. They are ranked by attention, by gradient, or at random:
the random ranking is the reference for the others.

Tokens are deleted, not masked: the rest moves up, so positions have no gap. Tokens in `Instance.protected` (a
question, the token that is read) are never deleted. If the last token is deleted, the answer is read at the one before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor

from qkflow.data.tasks.base import Instance
from qkflow.errors import UsageError, unknown
from qkflow.probes.attention import POOLINGS, Pooling, attention_entropy, pool_maps, rationale_mass
from qkflow.probes.readers import Reader, ReaderOutput

Ranking = Literal["attention", "gradient", "random"]
Row = tuple[int, ...]
Values = Float64[np.ndarray, " n"]
Ragged = Float64[np.ndarray, " _"]

FRACTIONS = (0.01, 0.05, 0.1, 0.2, 0.5)
"""The fractions of a text that an AOPC averages over."""
_INSTANCES_AT_ONCE = 512
"""Instances whose deletions are in memory at the same time."""
_MAX_TOKENS = 2**11
"""Tokens per batch: more do not fit the caches of a CPU, and are slower."""
_MAX_MAP_ELEMENTS = 2**24
"""Elements of the maps of a batch: 64 MB in float32."""
_ASSUMED_HEADS = 64
"""Layers times heads of a model, until known."""
_SIGNIFICAND = 2.0**14
"""Scores that agree to this precision are ties, so that rounding in batches does not change what is deleted."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DeletionScores:
    """The effect of deleting the tokens of one ranking, one number per instance."""

    comprehensiveness: Values
    sufficiency: Values
    comprehensiveness_aopc: Values
    sufficiency_aopc: Values


@dataclass(frozen=True, kw_only=True, eq=False)
class Faithfulness:
    """Answers, attention and deletion scores, one entry per instance."""

    predicted: Int64[np.ndarray, " n"]
    """The model's answer."""
    correct: Bool[np.ndarray, " n"]
    probability: Values
    """Probability of the model's answer."""
    label_probability: Values
    loss: Values
    """Negative log-likelihood of the label, in nats."""
    attention: tuple[Ragged, ...]
    """Pooled attention on each token."""
    mass: Values
    """Attention on the rationale; NaN for instances without one."""
    masses: Mapping[Pooling, Values]
    """The same for every pooling."""
    entropy: Values
    """Entropy of the attention, in nats."""
    effective: Values
    """exp(entropy), the effective number of attended tokens."""
    rankings: Mapping[Ranking, DeletionScores]

    @property
    def comprehensiveness(self) -> Values:
        """Comprehensiveness of the attention ranking."""
        return self._by_attention.comprehensiveness

    @property
    def sufficiency(self) -> Values:
        """Sufficiency of the attention ranking."""
        return self._by_attention.sufficiency

    @property
    def _by_attention(self) -> DeletionScores:
        if "attention" not in self.rankings:
            raise UsageError(
                f"attention was not ranked (only {', '.join(self.rankings) or 'nothing'}): pass rankings=['attention']"
            )
        return self.rankings["attention"]


def evaluate_faithfulness(
    reader: Reader,
    instances: Sequence[Instance],
    *,
    pooling: Pooling = "average",
    fraction: float = 0.05,
    fractions: Sequence[float] = FRACTIONS,
    rankings: Sequence[Ranking] = ("attention", "random"),
    seed: int = 0,
    batch: int = 256,
) -> Faithfulness:
    """Evaluate a model's answers and attention; the result does not depend on batch size or order.

    >>> from qkflow.models import Classifier, ClassifierConfig
    >>> from qkflow.probes import readers
    >>> model = Classifier(ClassifierConfig(width=32, layers=1, heads=4, vocabulary=50, classes=3))
    >>> texts = [Instance(tokens=(5, 6, 7, 8), label=1, rationale=(1,)), Instance(tokens=(9, 4), label=0, rationale=())]
    >>> result = evaluate_faithfulness(readers.reader(model), texts)
    >>> np.isnan(result.mass).tolist(), result.comprehensiveness.shape
    ([False, True], (2,))
    """
    if not instances:
        raise UsageError("got no instances: expected at least one")
    if pooling not in POOLINGS:
        raise unknown("pooling", pooling, POOLINGS)
    for ranking in rankings:
        if ranking not in get_args(Ranking):
            raise unknown("ranking", ranking, get_args(Ranking))
    if not fractions or any(not 0 < x <= 1 for x in (fraction, *fractions)):
        raise UsageError(f"fractions must be above 0 and at most 1, at least one of them, got {fraction}, {fractions}")
    if batch < 1 or seed < 0:
        raise UsageError(f"batch must be at least 1 and seed at least 0, got {batch} and {seed}")
    result, saliency = _read_whole_texts(reader, instances, pooling, batch, gradient="gradient" in rankings)
    scores: dict[Ranking, Sequence[Ragged]] = {"attention": result.attention, "gradient": saliency}
    if "random" in rankings:
        scores["random"] = [_random_scores(instance.tokens, seed) for instance in instances]
    orders: dict[Ranking, list[list[int]]] = {
        name: [rank_tokens(row, instance.protected) for row, instance in zip(scores[name], instances, strict=True)]
        for name in rankings
    }
    return replace(result, rankings=_delete(reader, instances, result, orders, (fraction, *fractions), batch))


def _read_whole_texts(
    reader: Reader, instances: Sequence[Instance], pooling: Pooling, batch: int, *, gradient: bool
) -> tuple[Faithfulness, list[Ragged]]:
    """Return everything but the rankings, and the saliency of the tokens if requested."""
    empty = np.empty(0)
    attention, saliency = [empty] * len(instances), [empty] * len(instances)
    masses: dict[Pooling, Values] = {name: np.empty(len(instances)) for name in POOLINGS}
    predicted, answer_log_p, label_log_p, entropy = (np.empty(len(instances)) for _ in range(4))
    texts = [instance.tokens for instance in instances]
    for index, tokens, lengths, output in read_batches(reader, texts, batch=batch, maps=True):
        if output.maps is None:
            raise UsageError(f"{type(reader).__name__}.read(..., maps=True) returned no maps")
        labels = torch.tensor([instances[i].label for i in index])
        n_answers = output.logits.shape[1]
        if int(labels.min()) < 0 or int(labels.max()) >= n_answers:
            raise UsageError(
                f"labels must be from 0 to {n_answers - 1}, the answers of the model, got {int(labels.min())} to"
                f" {int(labels.max())}: evaluate the model on the task that it was trained on"
            )
        answers = output.logits.argmax(-1).cpu()
        predicted[index], answer_log_p[index] = answers, log_probability(output.logits, answers)
        label_log_p[index] = log_probability(output.logits, labels)
        rationale = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, i in enumerate(index):
            rationale[row, list(instances[i].rationale)] = True
        for name in POOLINGS:
            shares = pool_maps(output.maps, lengths, name, query_positions=output.answer_positions).cpu().double()
            masses[name][index] = rationale_mass(shares, rationale)
            if name == pooling:
                entropy[index] = attention_entropy(shares)
                _scatter(attention, index, shares, lengths)
        if gradient:
            _scatter(saliency, index, reader.saliency(tokens, lengths).cpu().double(), lengths)
    result = Faithfulness(
        predicted=predicted.astype(np.int64),
        correct=predicted == np.array([instance.label for instance in instances]),
        probability=np.exp(answer_log_p),
        label_probability=np.exp(label_log_p),
        loss=-label_log_p,
        attention=tuple(attention),
        mass=masses[pooling],
        masses=masses,
        entropy=entropy,
        effective=np.exp(entropy),
        rankings={},
    )
    return result, saliency


def _delete(
    reader: Reader,
    instances: Sequence[Instance],
    result: Faithfulness,
    orders: Mapping[Ranking, Sequence[Sequence[int]]],
    fractions: Sequence[float],
    batch: int,
) -> dict[Ranking, DeletionScores]:
    """Delete tokens and measure the loss of probability: at the first of `fractions`, and averaged over the others."""
    lost: dict[Ranking, Float64[np.ndarray, "n fractions 2"]] = {
        ranking: np.empty((len(instances), len(fractions), 2)) for ranking in orders
    }
    by_length = sorted(range(len(instances)), key=lambda i: len(instances[i].tokens))
    for start in range(0, len(instances), _INSTANCES_AT_ONCE):
        index = by_length[start : start + _INSTANCES_AT_ONCE]
        answers, whole = result.predicted[index].tolist(), result.probability[index]
        known = {(instances[i].tokens, answer): p for i, answer, p in zip(index, answers, whole.tolist(), strict=True)}
        questions: dict[Ranking, list[tuple[Row, int]]] = {ranking: [] for ranking in orders}
        for ranking, order in orders.items():
            for i, answer in zip(index, answers, strict=True):
                counts = [top_count(fraction, len(order[i])) for fraction in fractions]
                texts = {count: split_tokens(instances[i].tokens, order[i], count) for count in set(counts)}
                questions[ranking] += [(text, answer) for count in counts for text in texts[count]]
        flat = [question for asked in questions.values() for question in asked]
        probability = answer_probabilities(reader, flat, batch=batch, known=known)
        for ranking, asked in questions.items():
            remaining = np.array([probability[question] for question in asked]).reshape(len(index), len(fractions), 2)
            lost[ranking][index] = whole[:, None, None] - remaining
    return {
        ranking: DeletionScores(
            comprehensiveness=x[:, 0, 0],
            sufficiency=x[:, 0, 1],
            comprehensiveness_aopc=x[:, 1:, 0].mean(1),
            sufficiency_aopc=x[:, 1:, 1].mean(1),
        )
        for ranking, x in lost.items()
    }


def rank_tokens(scores: Float64[np.ndarray, " t"], protected: Sequence[int] = ()) -> list[int]:
    """Return the positions that may be deleted, highest score first; ties to four digits are broken by position.

    >>> rank_tokens(np.array([0.1, 0.5, 0.3, 0.5]), protected=[2])
    [1, 3, 0]
    """
    significand, exponent = np.frexp(scores)
    rounded = np.ldexp(np.rint(significand * _SIGNIFICAND), exponent)
    excluded = set(protected)
    return [position for position in np.argsort(-rounded, kind="stable").tolist() if position not in excluded]


def split_tokens(tokens: Row, order: Sequence[int], count: int) -> tuple[Row, Row]:
    """Return the text without the first `count` positions of the order, and the text without the others.

    A text always keeps its last token.

    >>> split_tokens((10, 11, 12, 13), order=[2, 0, 1], count=1)
    ((10, 11, 13), (12, 13))
    >>> split_tokens((10,), order=[0], count=1)
    ((10,), (10,))
    """
    top, others = set(order[:count]), set(order[count:])
    without = tuple(token for position, token in enumerate(tokens) if position not in top)
    return without or tokens[-1:], tuple(token for position, token in enumerate(tokens) if position not in others)


def top_count(fraction: float, positions: int) -> int:
    """Return a fraction of the positions, rounded up, and at least one if there is one.

    >>> [top_count(0.05, positions) for positions in (0, 1, 20, 21)]
    [0, 1, 1, 2]
    """
    return min(positions, max(1, math.ceil(fraction * positions - 1e-9)))  # 0.07 * 100 is 7.000000000000001


def read_batches(
    reader: Reader, rows: Sequence[Row], *, batch: int, maps: bool = False
) -> Iterator[tuple[list[int], Int[Tensor, "b t"], Int[Tensor, " b"], ReaderOutput]]:
    """Read all rows in batches of similar length, padded on the right; yields indices, tokens, lengths and output."""
    order, start, heads = sorted(range(len(rows)), key=lambda i: -len(rows[i])), 0, _ASSUMED_HEADS
    while start < len(order):
        t = len(rows[order[start]])
        limit = _MAX_MAP_ELEMENTS // (t * t * heads) if maps else _MAX_TOKENS // t
        index = order[start : start + max(1, min(batch, limit))]
        lengths = np.array([len(rows[i]) for i in index])
        padded = np.zeros((len(index), t), dtype=np.int64)
        padded[np.arange(t) < lengths[:, None]] = np.fromiter(chain.from_iterable(rows[i] for i in index), np.int64)
        tokens, counts = torch.from_numpy(padded), torch.from_numpy(lengths)
        output = reader.read(tokens, counts, maps=maps)
        if output.maps is not None:
            heads = max(1, sum(layer.shape[1] for layer in output.maps))
        yield index, tokens, counts, output
        start += len(index)


def answer_probabilities(
    reader: Reader, questions: Sequence[tuple[Row, int]], *, batch: int, known: Mapping[tuple[Row, int], float]
) -> dict[tuple[Row, int], float]:
    """Return the probability of each answer given its text; each pair is read once, and not if it is `known`."""
    probability = dict(known)
    new = [question for question in dict.fromkeys(questions) if question not in probability]
    for index, _, _, output in read_batches(reader, [row for row, _ in new], batch=batch):
        answers = torch.tensor([new[i][1] for i in index])
        for i, log_p in zip(index, log_probability(output.logits, answers).tolist(), strict=True):
            probability[new[i]] = math.exp(log_p)
    return probability


def log_probability(logits: Float[Tensor, "b c"], answers: Int[Tensor, " b"]) -> Float64[Tensor, " b"]:
    """Return the log-probability of one answer per row."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    chosen = scores.gather(1, answers.to(scores.device)[:, None])[:, 0]
    return (chosen.double() - scores.logsumexp(-1).double()).cpu()


def _scatter(into: list[Ragged], index: Sequence[int], rows: Tensor, lengths: Tensor) -> None:
    for i, row, length in zip(index, rows.numpy(), lengths.tolist(), strict=True):
        into[i] = row[:length].copy()


def _random_scores(tokens: Row, seed: int) -> Ragged:
    """Random scores that depend on the text and the seed only."""
    return np.random.default_rng((seed, *tokens)).random(len(tokens))
