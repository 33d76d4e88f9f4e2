"""The synthetic task of the gradient-flow theory: a bag of tokens, some of which belong to a class (arXiv 2608.06776).

The vocabulary has 50 tokens. Tokens 0 to 9 are common, with weight 1 each; class c of four has the tokens 10(c+1) to
10(c+1)+9, with weights 0.1, 0.2 .. 1.0. A text is 62 independent draws from the common tokens and those of its class,
followed by the query token 5 + c. The label is token 1 + c:

    3 9 24 0 27 7 ... 29 5 6  ->  2          c = 1, rationale: the positions of 24, 27 .. 29

As published, queries and labels are common tokens too. The query alone determines the label, so a model that attends to
the query can ignore the text. The one-layer model of the theory cannot attend to it.

Our choices, not published: balanced classes, a fixed number of training texts, and their seed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from qkflow.data.tasks.base import Instance, Task, TaskConfig
from qkflow.errors import UsageError

VOCABULARY, CLASSES, CONTEXT = 50, 4, 62
LABEL, QUERY = 1, 5
"""The first label token and the first query token."""
GROUP = 10
"""Number of common tokens, and of tokens per class."""
TRAIN_SIZE, TEST_SIZE = 4096, 1024


def token_distribution(c: int) -> Float[np.ndarray, " vocabulary"]:
    """Return the probability of each token in the context of class `c`.

    >>> (token_distribution(0)[[0, 10, 19, 20]] * 15.5).round(10).tolist()
    [1.0, 0.1, 1.0, 0.0]
    """
    weights = np.zeros(VOCABULARY)
    weights[:GROUP] = 1.0
    weights[GROUP * (c + 1) : GROUP * (c + 2)] = np.arange(1, GROUP + 1) / GROUP
    return weights / weights.sum()


def sample_texts(classes: Int[np.ndarray, " n"], generator: np.random.Generator) -> Int[np.ndarray, "n 63"]:
    """Return a context and a query for each class label.

    >>> text = sample_texts(np.array([1]), np.random.default_rng(0))[0]
    >>> text[:6].tolist(), int(text[-1]), set(text.tolist()) <= {*range(10), *range(20, 30)}
    ([9, 4, 0, 0, 26, 28], 6, True)
    """
    tokens = np.empty((len(classes), CONTEXT + 1), dtype=np.int64)
    for c in range(CLASSES):
        rows = classes == c
        tokens[rows, :-1] = generator.choice(VOCABULARY, size=(int(rows.sum()), CONTEXT), p=token_distribution(c))
    tokens[:, -1] = QUERY + classes
    return tokens


def synthetic(config: TaskConfig) -> Task:
    """Generate the task: by default 4,096 training texts, and 1,024 texts each for validation and test.

    >>> task = synthetic(TaskConfig(name="synthetic", train=8, test=4))
    >>> first = task.train[0]
    >>> len(first.tokens), first.tokens[-1] - first.label, first.protected, [task.words[10], task.words[49]]
    (63, 4, (62,), ['a0', 'd9'])
    """
    _check_config(config)
    counts = {
        "train": config.train or TRAIN_SIZE,
        "validation": config.test or TEST_SIZE,
        "test": config.test or TEST_SIZE,
    }
    splits: dict[str, Any] = {
        name: _sample_split(count, (config.seed, i)) for i, (name, count) in enumerate(counts.items())
    }
    words = tuple(f"{' abcd'[i // GROUP]}{i % GROUP}".strip() for i in range(VOCABULARY))
    return Task(
        name="synthetic",
        kind="classification",
        words=words,
        classes=words,
        **splits,
        notes=(
            "the label is one of four tokens; the model chooses among all 50",
            "ours: balanced classes, a fixed number of training texts",
        ),
    )


def _sample_split(count: int, seed: tuple[int, int]) -> tuple[Instance, ...]:
    """Generate one split from its own random stream, independent of the sizes of the others."""
    generator = np.random.default_rng(seed)
    classes = generator.permutation(np.arange(count) % CLASSES)
    texts = sample_texts(classes, generator)
    is_informative = texts // GROUP == classes[:, None] + 1
    return tuple(
        Instance(
            tokens=tuple(text.tolist()),
            label=LABEL + int(c),
            rationale=tuple(np.flatnonzero(mask).tolist()),
            protected=(CONTEXT,),
            kind=f"class {'abcd'[c]}",
        )
        for text, c, mask in zip(texts, classes, is_informative, strict=True)
    )


def _check_config(config: TaskConfig) -> None:
    """Raise a `UsageError` for options that would change the task."""
    if config.data is not None:
        raise UsageError(f"the synthetic task generates its texts, got --data {config.data}: omit --data")
    if config.seed < 0:
        raise UsageError(f"seed must be at least 0, got {config.seed}")
    if config.longest is not None and config.longest <= CONTEXT:
        raise UsageError(f"longest must be at least {CONTEXT + 1}, the length of all texts, got {config.longest}")
    if config.vocabulary is not None and config.vocabulary < VOCABULARY:
        raise UsageError(f"vocabulary must be at least {VOCABULARY}, got {config.vocabulary}")
    if config.train is not None and config.train < CLASSES:
        raise UsageError(f"train must be at least {CLASSES}, one text per class, got {config.train}")
