"""Words as numbers, and a seeded choice among instances: what all readers of texts share."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeVar

from qkflow.data.tasks.base import PADDING, UNKNOWN, numbered

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")

ASK, QUESTION, ANSWER, END = "<ask>", "<question>", "<answer>", "<end>"
"""What a reader adds to a text: the token that asks, and the borders of question and answer."""
UNSEEN = "<unseen>"
"""A word of a test answer that the vocabulary lacks: no text has it, so no model gives it by copying."""
RESERVED = frozenset({PADDING, UNKNOWN, ASK, QUESTION, ANSWER, END, UNSEEN})

T = TypeVar("T")


def vocabulary(
    texts: Iterable[Sequence[str]], *, markers: Sequence[str] = (), most: int | None = None
) -> dict[str, int]:
    """A number for each word that is frequent enough, and for each marker, which come last.

    >>> vocabulary([["a", "b", "a", "<pad>", "<pad>"]], markers=["<ask>"])
    {'<pad>': 0, '<unk>': 1, 'a': 2, '<ask>': 3}
    """
    plain = ([word for word in text if word not in RESERVED] for text in texts)
    numbers = numbered(plain, most=None if most is None else most - len(markers))
    return numbers | {marker: number for number, marker in enumerate(markers, start=len(numbers))}


def read(words: Iterable[str], numbers: Mapping[str, int]) -> tuple[int, ...]:
    """The numbers of a text's words; one that is not known, or looks like a marker, is `<unk>`.

    >>> read(["a", "c", "<ask>"], {"<pad>": 0, "<unk>": 1, "a": 2, "<ask>": 3})
    (2, 1, 1)
    """
    unknown = numbers[UNKNOWN]
    return tuple(unknown if word in RESERVED else numbers.get(word, unknown) for word in words)


def subsample(items: Sequence[T], most: int | None, seed: int) -> tuple[T, ...]:
    """At most so many, by a seeded choice, in the order they had.

    >>> subsample("abcdef", 3, seed=0), subsample("ab", None, seed=0)
    (('a', 'e', 'f'), ('a', 'b'))
    """
    if most is None or len(items) <= most:
        return tuple(items)
    places = random.Random(f"choice {seed}").sample(range(len(items)), most)
    return tuple(items[place] for place in sorted(places))
