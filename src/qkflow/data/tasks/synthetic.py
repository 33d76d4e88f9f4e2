"""The synthetic task of the theory: a bag of tokens, some of which belong to a class (arXiv 2608.06776).

The vocabulary is 50 tokens. Tokens 0 to 9 are common, with weight 1 each; class c of four owns the tokens 10(c+1) to
10(c+1)+9, with weights 0.1, 0.2 .. 1.0. A text is 62 tokens drawn independently from the common ones and its class's
own, and the query token 5 + c, which asks for the label, token 1 + c:

    3 9 24 0 27 7 ... 29 5 6  ->  2          c = 1, rationale: the places of 24, 27 .. 29

As published, queries and labels are common tokens too. So the query alone decides the label, and a model that may look
at it learns to: the one-layer model of the theory may not.

Not published, and ours: classes are equally many, training is on a fixed number of texts, and their seed.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from qkflow.data.tasks.base import Instance, Task, TaskConfig
from qkflow.errors import UsageError

VOCABULARY, CLASSES, CONTEXT = 50, 4, 62
LABEL, QUERY, OWN = 1, 5, 10
"""The first label, the first query, and how many tokens are common, and each class's own."""
_TRAIN, _TEST = 4096, 1024


def mixture(c: int) -> Float[np.ndarray, " vocabulary"]:
    """How often each token stands in the context of class `c`.

    >>> (mixture(0)[[0, 10, 19, 20]] * 15.5).round(10).tolist()
    [1.0, 0.1, 1.0, 0.0]
    """
    weights = np.zeros(VOCABULARY)
    weights[:OWN] = 1.0
    weights[OWN * (c + 1) : OWN * (c + 2)] = np.arange(1, OWN + 1) / OWN
    return weights / weights.sum()


def texts(classes: Int[np.ndarray, " n"], generator: np.random.Generator) -> Int[np.ndarray, "n 63"]:
    """A context and a query for each of the classes.

    >>> text = texts(np.array([1]), np.random.default_rng(0))[0]
    >>> text[:6].tolist(), int(text[-1]), set(text.tolist()) <= {*range(10), *range(20, 30)}
    ([9, 4, 0, 0, 26, 28], 6, True)
    """
    found = np.empty((len(classes), CONTEXT + 1), dtype=np.int64)
    for c in range(CLASSES):
        own = classes == c
        found[own, :-1] = generator.choice(VOCABULARY, size=(int(own.sum()), CONTEXT), p=mixture(c))
    found[:, -1] = QUERY + classes
    return found


def synthetic(config: TaskConfig) -> Task:
    """The task, made from the config's seed: 4,096 training texts and 1,024 each to validate and to test on.

    >>> task = synthetic(TaskConfig(name="synthetic", train=8, test=4))
    >>> first = task.train[0]
    >>> len(first.tokens), first.tokens[-1] - first.label, first.protected, [task.words[10], task.words[49]]
    (63, 4, (62,), ['a0', 'd9'])
    """
    _check(config)
    counts = {"train": config.train or _TRAIN, "validation": config.test or _TEST, "test": config.test or _TEST}
    parts = {name: _part(count, (config.seed, i)) for i, (name, count) in enumerate(counts.items())}
    words = tuple(f"{' abcd'[i // OWN]}{i % OWN}".strip() for i in range(VOCABULARY))
    return Task(
        name="synthetic",
        kind="classification",
        words=words,
        classes=words,
        train=parts["train"],
        validation=parts["validation"],
        test=parts["test"],
        notes=(
            "the label is one of four tokens, out of 50 that a model may answer",
            "ours: classes equally many, a fixed number of training texts",
        ),
    )


def _part(count: int, seed: tuple[int, int]) -> tuple[Instance, ...]:
    """One part of the task, with a stream of random numbers of its own: its size changes no other part."""
    generator = np.random.default_rng(seed)
    classes = generator.permutation(np.arange(count) % CLASSES)
    rows = texts(classes, generator)
    own = rows // OWN == classes[:, None] + 1
    return tuple(
        Instance(
            tokens=tuple(row.tolist()),
            label=LABEL + int(c),
            rationale=tuple(np.flatnonzero(places).tolist()),
            protected=(CONTEXT,),
            kind=f"class {'abcd'[c]}",
        )
        for row, c, places in zip(rows, classes, own, strict=True)
    )


def _check(config: TaskConfig) -> None:
    """Refuse what would make another task of it."""
    if config.data is not None:
        raise UsageError(f"the task synthetic makes its own texts, got --data {config.data}: leave it out")
    if config.seed < 0:
        raise UsageError(f"seed must be at least 0, got {config.seed}")
    if config.longest is not None and config.longest <= CONTEXT:
        raise UsageError(f"texts of the task synthetic have {CONTEXT + 1} tokens, got longest={config.longest}")
    if config.vocabulary is not None and config.vocabulary < VOCABULARY:
        raise UsageError(f"the task synthetic has {VOCABULARY} tokens, got vocabulary={config.vocabulary}")
    if config.train is not None and config.train < CLASSES:
        raise UsageError(f"train must be at least {CLASSES}, so that every class is seen, got {config.train}")
