r"""Whether an answer rests on the words that attention names: delete them, or all others, and ask again.

    comprehensiveness  p(yhat | x) - p(yhat | x without the top words)     high: the answer needed them
    sufficiency        p(yhat | x) - p(yhat | the top words alone)         low: they were enough
    AOPC               either, on average over top parts of 1, 5, 10, 20 and 50 %

yhat is the model's own answer to the whole text x (ERASER, DeYoung et al. 2020, https://arxiv.org/abs/1911.03429). The
top words are 5 % of those that may go, rounded up, so at least one. They are ranked by attention, by gradient, or at
random: a number means something beside what deleting any words does. `qkflow.probes.deletion` says what a deletion is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from qkflow.data.tasks.base import Instance
from qkflow.errors import UsageError, unknown
from qkflow.probes.confidence import entropy, mass
from qkflow.probes.deletion import Row, chances, counted, divided, log_probability, ranked, readings
from qkflow.probes.pooling import Pooling, pooled
from qkflow.probes.readers import Reader

Ranking = Literal["attention", "gradient", "random"]
Values = Float64[np.ndarray, " n"]
Ragged = Float64[np.ndarray, " _"]
_AT_ONCE = 512
"""Instances whose deletions are held in memory together."""
PARTS = (0.01, 0.05, 0.1, 0.2, 0.5)
"""The parts of a text that an AOPC is the mean over."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Faithfulness:
    """What deleting words of one ranking does to each answer, in order of the instances."""

    comprehensiveness: Values
    """What the answer's probability loses without the top words."""
    sufficiency: Values
    """What it loses with the top words alone."""
    comprehensiveness_aopc: Values
    """The mean over parts of the text."""
    sufficiency_aopc: Values
    """The mean over parts of the text."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Looked:
    """What was seen of each instance, in their order."""

    predicted: Int64[np.ndarray, " n"]
    """The model's own answer."""
    correct: Bool[np.ndarray, " n"]
    """Whether it is the label."""
    probability: Values
    """What the model gives its own answer."""
    label_probability: Values
    """What it gives the label."""
    loss: Values
    """The label's loss, in nats."""
    attention: tuple[Ragged, ...]
    """The share of each token of each instance in what is attended to, pooled as asked for."""
    mass: Values
    """How much of that lies on the rationale; not a number for instances without one."""
    masses: Mapping[Pooling, Values]
    """The same for every pooling."""
    entropy: Values
    """Of the attention, in nats."""
    effective: Values
    """As many tokens, attended to evenly, have that entropy."""
    rankings: Mapping[Ranking, Faithfulness]
    """What deletions do, for each ranking asked for."""

    @property
    def comprehensiveness(self) -> Values:
        """By attention."""
        return self._by_attention.comprehensiveness

    @property
    def sufficiency(self) -> Values:
        """By attention."""
        return self._by_attention.sufficiency

    @property
    def _by_attention(self) -> Faithfulness:
        if "attention" not in self.rankings:
            raise UsageError(f"attention was not ranked, only {', '.join(self.rankings) or 'nothing'} was: examine it")
        return self.rankings["attention"]


def examine(
    reader: Reader,
    instances: Sequence[Instance],
    *,
    pooling: Pooling = "average",
    part: float = 0.05,
    parts: Sequence[float] = PARTS,
    rankings: Sequence[Ranking] = ("attention", "random"),
    seed: int = 0,
    batch: int = 256,
) -> Looked:
    """Everything about a model's attention and answers on some instances; no number depends on batches or on order.

    >>> from qkflow.models import Classifier, ClassifierConfig
    >>> from qkflow.probes import readers
    >>> model = Classifier(ClassifierConfig(width=32, layers=1, heads=4, vocabulary=50, classes=3))
    >>> texts = [Instance(tokens=(5, 6, 7, 8), label=1, rationale=(1,)), Instance(tokens=(9, 4), label=0, rationale=())]
    >>> looked = examine(readers.reader(model), texts)
    >>> np.isnan(looked.mass).tolist(), looked.comprehensiveness.shape
    ([False, True], (2,))
    """
    _check(instances, pooling, (part, *parts), rankings, seed, batch)
    looked, saliency = _whole(reader, instances, pooling, batch, gradient="gradient" in rankings)
    scores: dict[Ranking, Sequence[Ragged]] = {"attention": looked.attention, "gradient": saliency}
    if "random" in rankings:
        scores["random"] = [_drawn(one.tokens, seed) for one in instances]
    orders: dict[Ranking, list[list[int]]] = {
        name: [ranked(row, one.protected) for row, one in zip(scores[name], instances, strict=True)]
        for name in rankings
    }
    return replace(looked, rankings=_faithful(reader, instances, looked, orders, part, parts, batch))


def _whole(
    reader: Reader, instances: Sequence[Instance], pooling: Pooling, batch: int, *, gradient: bool
) -> tuple[Looked, list[Ragged]]:
    """What is seen of the whole texts: everything but the rankings; and the tokens' saliency, if it is asked for."""
    empty = np.empty(0)
    attention, saliency = [empty] * len(instances), [empty] * len(instances)
    masses: dict[Pooling, Values] = {how: np.empty(len(instances)) for how in _POOLINGS}
    predicted, own, right, spread = (np.empty(len(instances)) for _ in range(4))
    for here, tokens, lengths, reading in readings(reader, [one.tokens for one in instances], batch=batch, maps=True):
        if reading.maps is None:
            raise UsageError(f"{type(reader).__name__} gave no maps: read(..., maps=True) has to")
        labels = torch.tensor([instances[i].label for i in here])
        known = reading.logits.shape[1]
        if int(labels.min()) < 0 or int(labels.max()) >= known:
            raise UsageError(
                f"the model gives {known} answers, numbered from 0; labels are {int(labels.min())} to"
                f" {int(labels.max())}: examine it on the task that it was trained on"
            )
        answers = reading.logits.argmax(-1).cpu()
        predicted[here], own[here] = answers, log_probability(reading.logits, answers)
        right[here] = log_probability(reading.logits, labels)
        rationale = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, i in enumerate(here):
            rationale[row, list(instances[i].rationale)] = True
        for how in _POOLINGS:
            row = pooled(reading.maps, lengths, how, asked=reading.asked).cpu().double()
            masses[how][here] = mass(row, rationale)
            if how == pooling:
                spread[here] = entropy(row)
                _scatter(attention, here, row, lengths)
        if gradient:
            _scatter(saliency, here, reader.saliency(tokens, lengths).cpu().double(), lengths)
    looked = Looked(
        predicted=predicted.astype(np.int64),
        correct=predicted == np.array([one.label for one in instances]),
        probability=np.exp(own),
        label_probability=np.exp(right),
        loss=-right,
        attention=tuple(attention),
        mass=masses[pooling],
        masses=masses,
        entropy=spread,
        effective=np.exp(spread),
        rankings={},
    )
    return looked, saliency


def _faithful(
    reader: Reader,
    instances: Sequence[Instance],
    looked: Looked,
    orders: Mapping[Ranking, Sequence[Sequence[int]]],
    part: float,
    parts: Sequence[float],
    batch: int,
) -> dict[Ranking, Faithfulness]:
    """Delete, ask again, and note what was lost at `part`, and on average over `parts`."""
    every = (part, *parts)
    lost: dict[Ranking, Float64[np.ndarray, "n parts 2"]] = {
        ranking: np.empty((len(instances), len(every), 2)) for ranking in orders
    }
    by_length = sorted(range(len(instances)), key=lambda i: len(instances[i].tokens))
    for at in range(0, len(instances), _AT_ONCE):
        here = by_length[at : at + _AT_ONCE]
        answers, whole = looked.predicted[here].tolist(), looked.probability[here]
        known = {(instances[i].tokens, answer): p for i, answer, p in zip(here, answers, whole.tolist(), strict=True)}
        asked: dict[Ranking, list[tuple[Row, int]]] = {ranking: [] for ranking in orders}
        for ranking, order in orders.items():
            for i, answer in zip(here, answers, strict=True):
                counts = [counted(share, len(order[i])) for share in every]
                rows = {count: divided(instances[i].tokens, order[i], count) for count in set(counts)}
                asked[ranking] += [(row, answer) for count in counts for row in rows[count]]
        found = chances(reader, [one for these in asked.values() for one in these], batch=batch, known=known)
        for ranking, these in asked.items():
            left = np.array([found[one] for one in these]).reshape(len(here), len(every), 2)
            lost[ranking][here] = whole[:, None, None] - left
    return {
        ranking: Faithfulness(
            comprehensiveness=x[:, 0, 0],
            sufficiency=x[:, 0, 1],
            comprehensiveness_aopc=x[:, 1:, 0].mean(1),
            sufficiency_aopc=x[:, 1:, 1].mean(1),
        )
        for ranking, x in lost.items()
    }


def _scatter(into: list[Ragged], here: Sequence[int], rows: Tensor, lengths: Tensor) -> None:
    for i, row, length in zip(here, rows.numpy(), lengths.tolist(), strict=True):
        into[i] = row[:length].copy()


def _drawn(tokens: Row, seed: int) -> Ragged:
    """Numbers that depend on the text and the seed alone."""
    return np.random.default_rng((seed, *tokens)).random(len(tokens))


def _check(
    instances: Sequence[Instance],
    pooling: str,
    parts: Sequence[float],
    rankings: Sequence[str],
    seed: int,
    batch: int,
) -> None:
    if not instances:
        raise UsageError("there are no instances to examine: give at least one")
    if pooling not in _POOLINGS:
        raise unknown("pooling", pooling, _POOLINGS)
    for ranking in rankings:
        if ranking not in get_args(Ranking):
            raise unknown("ranking", ranking, get_args(Ranking))
    if len(parts) < 2 or any(not 0 < part <= 1 for part in parts):
        raise UsageError(f"parts of a text are above 0 and at most 1, and there is one at least, got {list(parts)}")
    if batch < 1 or seed < 0:
        raise UsageError(f"batch must be at least 1 and seed at least 0, got {batch} and {seed}")


_POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
