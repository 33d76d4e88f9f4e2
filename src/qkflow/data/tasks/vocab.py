"""Word vocabularies and subsampling, shared by the tasks that read texts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

PADDING, UNKNOWN = "<pad>", "<unk>"
"""The first two words of every vocabulary."""
ASK, QUESTION, ANSWER, END = "<ask>", "<question>", "<answer>", "<end>"
"""Markers added to a text: the query token, and the delimiters of question and answer."""
UNSEEN = "<unseen>"
"""Replaces a word of a test answer that is not in the vocabulary. No text contains it, so copying cannot produce it."""
RESERVED = frozenset({PADDING, UNKNOWN, ASK, QUESTION, ANSWER, END, UNSEEN})

T = TypeVar("T")


def build_vocabulary(
    texts: Iterable[Iterable[str]],
    *,
    markers: Sequence[str] = (),
    max_size: int | None = None,
    min_count: int = 2,
) -> dict[str, int]:
    """Return a token for each word that occurs at least `min_count` times, most frequent first; markers come last.

    >>> build_vocabulary([["a", "b", "a", "<pad>", "<pad>"]], markers=["<ask>"])
    {'<pad>': 0, '<unk>': 1, 'a': 2, '<ask>': 3}
    """
    counts = Counter(word for text in texts for word in text if word not in RESERVED)
    frequent = sorted((word for word, count in counts.items() if count >= min_count), key=lambda word: -counts[word])
    if max_size is not None:
        frequent = frequent[: max(0, max_size - len(markers) - 2)]
    return {word: token for token, word in enumerate((PADDING, UNKNOWN, *frequent, *markers))}


def encode_words(words: Iterable[str], vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """Return the tokens of words; words that are unknown or equal to a marker become `<unk>`.

    >>> encode_words(["a", "c", "<ask>"], {"<pad>": 0, "<unk>": 1, "a": 2, "<ask>": 3})
    (2, 1, 1)
    """
    unknown = vocabulary[UNKNOWN]
    return tuple(unknown if word in RESERVED else vocabulary.get(word, unknown) for word in words)


def subsample(items: Sequence[T], count: int | None, seed: int) -> tuple[T, ...]:
    """Return at most `count` items, chosen at random by `seed`, in their original order.

    >>> subsample("abcdef", 3, seed=0), subsample("ab", None, seed=0)
    (('a', 'e', 'f'), ('a', 'b'))
    """
    if count is None or len(items) <= count:
        return tuple(items)
    indices = random.Random(f"choice {seed}").sample(range(len(items)), count)
    return tuple(items[index] for index in sorted(indices))
