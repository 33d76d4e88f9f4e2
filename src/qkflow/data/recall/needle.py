"""Single needle in a haystack (S-NIAH-1, 2, 3 after RULER, https://arxiv.org/abs/2404.06654), with generated sentences.

    the rain is soft . the number of fern is 4 8 1 5 2 . the road . what is the number of fern ? it is 4 8 1 5 2
    haystack           needle                            haystack   question                           answer

| kind     | haystack                           | answer                        |
|----------|------------------------------------|-------------------------------|
| S-NIAH-1 | the same five sentences, repeated  | a number, one token per digit |
| S-NIAH-2 | varied sentences from word lists   | a number                      |
| S-NIAH-3 | as in 2                            | an id of hexadecimal digits   |

The needle is inserted at the sentence border nearest to its depth, in percent of the haystack. The last sentence of
the haystack is truncated to the exact length and keeps its period. Haystack words are never keys or answers, so the
right answer is unique.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np

from qkflow.data.recall import needle_words as words
from qkflow.data.recall.base import Instances, RecallCell, check_minimum
from qkflow.data.splitmix import Seed, randint, random_uint64
from qkflow.data.text.corpus import CELL_DTYPE
from qkflow.errors import UsageError, unknown

Answer = Literal["number", "id", "word"]
MAX_TEST_LENGTH = 8192
"""Longest default test length."""

_TOKEN = {word: token for token, word in enumerate(words.WORDS)}


@dataclass(frozen=True, kw_only=True)
class Needle:
    """Configuration of a needle-in-a-haystack task.

    >>> Needle(kind=3).name, Needle(kind=3, characters=2).chance, Needle(length=2048).test_lengths
    ('s-niah-3', 0.00390625, (2048, 4096, 8192))
    """

    axes: ClassVar[tuple[str, ...]] = ("length", "depth")
    """Axes of the test grid."""
    kind: Literal[1, 2, 3] = 1
    """S-NIAH-1, 2 or 3."""
    answer: Answer | None = None
    """What to retrieve; default: a number for kinds 1 and 2, an id for kind 3."""
    digits: int = 5
    """Digits of a number."""
    characters: int = 12
    """Characters of an id."""
    length: int = 256
    """Tokens per training instance."""
    lengths: tuple[int, ...] | None = None
    """Tokens per test instance; default: 1, 2, 4 and 8 times the training length, up to 8192."""
    depths: tuple[int, ...] = (0, 25, 50, 75, 100)
    """Needle depths of the test, in percent."""
    train: int = 20_000
    validation: int = 256
    each: int = 20
    """Test instances per length and depth."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in (1, 2, 3):
            raise UsageError(f"s-niah: kind must be 1, 2 or 3, got {self.kind}")
        if self.answer is not None and self.answer not in get_args(Answer):
            raise unknown(f"answer of {self.name}", self.answer, get_args(Answer))
        names = ("digits", "characters", "length", "train", "validation", "each")
        check_minimum(self.name, 1, {name: getattr(self, name) for name in names} | {"lengths": self.test_lengths})
        check_minimum(self.name, 0, {"depths": self.depths})
        for length in (self.length, *self.test_lengths):
            _haystack_length(self, length)
        if max(self.depths) > 100:
            raise UsageError(f"{self.name}: depth must be from 0 to 100 percent, got {max(self.depths)}")

    @property
    def name(self) -> str:
        """`s-niah-1`, `s-niah-2` or `s-niah-3`."""
        return f"s-niah-{self.kind}"

    @property
    def words(self) -> tuple[str, ...]:
        """The vocabulary, shared by all three kinds."""
        return words.WORDS

    @property
    def answer_kind(self) -> Answer:
        """What to retrieve."""
        return self.answer or ("id" if self.kind == 3 else "number")

    @property
    def test_lengths(self) -> tuple[int, ...]:
        """Lengths of the test instances."""
        if self.lengths is not None:
            return self.lengths
        return (self.length, *(n * self.length for n in (2, 4, 8) if n * self.length <= MAX_TEST_LENGTH))

    @property
    def chance(self) -> float:
        """Accuracy of guessing: 1 / 10^digits, 1 / 16^characters, or 1 / words."""
        symbols, count = _answer_symbols(self)
        return float(len(symbols)) ** -count

    def grid(self) -> tuple[RecallCell, ...]:
        """Return one cell per length and depth."""
        return tuple(RecallCell(None, length, depth) for length in self.test_lengths for depth in self.depths)

    def draw(self, cell: RecallCell | None = None, *, seed: Seed, count: int, first: int = 0) -> Instances:
        """Generate instances number `first` to `first + count - 1` of the stream of `seed`.

        They have the length and depth of a test `cell`, or the training length if it is None. Without a depth, each
        instance has a depth uniform in 0 .. 100.

        >>> config = Needle(kind=1, digits=3)
        >>> instances = config.draw(RecallCell(pairs=None, length=30, depth=50), seed=0, count=1)
        >>> " ".join(config.words[token] for token in instances.tokens[0])
        'the road is long . the number of comet is 2 9 5 . the rain is . what is the number of comet ? it is 2 9 5'
        >>> instances.answers.tolist()
        [[0, 27, 30]]
        """
        length, depth = (self.length, None) if cell is None else (cell.length, cell.depth)
        hay_length, (symbols, answer_length) = _haystack_length(self, length), _answer_symbols(self)
        grammar = _grammar(self.kind)
        n_numbers = 2 + answer_length + grammar.max_sentences(hay_length) + hay_length
        numbers = random_uint64(seed, first + np.arange(count), n_numbers)
        depths = randint(numbers[:, 0], 101) if depth is None else np.full(count, depth)
        key = _tokens(words.KEYS)[randint(numbers[:, 1], len(words.KEYS))]
        answer = _tokens(symbols)[randint(numbers[:, 2 : 2 + answer_length], len(symbols))]

        hay, borders = grammar.haystack(numbers[:, 2 + answer_length :], hay_length)
        nearest = np.abs(100 * borders - depths[:, None] * hay_length).argmin(axis=1)
        begin = np.take_along_axis(borders, nearest[:, None], axis=1)
        needle, question = (_fill_pattern(self, pattern, key, answer) for pattern in (words.NEEDLE, words.QUESTION))
        n = needle.shape[1]
        # insert the needle at `begin`: gather the text from the concatenation [haystack | needle]
        t = np.arange(hay_length + n)
        source = np.where(t < begin, t, np.where(t < begin + n, t - begin + hay_length, t - n))
        text = np.take_along_axis(np.concatenate([hay, needle], axis=1), source, axis=1)

        cells = np.empty(count, dtype=CELL_DTYPE)
        cells["pairs"], cells["length"], cells["depth"] = -1, length, depths
        spans = np.column_stack([np.arange(count), np.full(count, length - answer_length), np.full(count, length)])
        return Instances(np.concatenate([text, question], axis=1), spans, cells)


class _Grammar(NamedTuple):
    """Sentence patterns as arrays: slot s of a pattern stands for any of the tokens `flat[firsts[s]:][: sizes[s]]`."""

    is_random: bool
    lengths: np.ndarray  # [patterns]
    slots: np.ndarray  # [patterns, longest]
    firsts: np.ndarray  # [slots]
    sizes: np.ndarray  # [slots]
    flat: np.ndarray  # [tokens of all slots]

    def max_sentences(self, length: int) -> int:
        """Return the largest number of sentences needed to fill `length` tokens."""
        return -(-length // int(self.lengths.min()))

    def haystack(self, numbers: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens `[n, length]` and the positions `[n, sentences + 1]` at which a needle can be inserted."""
        count, most = len(numbers), self.max_sentences(length)
        patterns = np.broadcast_to(np.arange(most) % len(self.lengths), (count, most))
        if self.is_random:
            patterns = randint(numbers[:, :most], len(self.lengths))
        borders = np.pad(np.cumsum(self.lengths[patterns], axis=1), ((0, 0), (1, 0)))
        is_start = np.zeros((count, length), dtype=np.int64)
        row, border = np.nonzero(borders < length)
        is_start[row, borders[row, border]] = 1
        sentence = np.cumsum(is_start, axis=1) - 1
        offset = np.arange(length) - np.take_along_axis(borders, sentence, axis=1)
        slot = self.slots[np.take_along_axis(patterns, sentence, axis=1), offset]
        tokens = self.flat[self.firsts[slot] + randint(numbers[:, most : most + length], self.sizes[slot])]
        tokens[:, -1:] = _TOKEN[words.PERIOD]
        return tokens, np.minimum(borders, length)


@cache
def _grammar(kind: int) -> _Grammar:
    patterns = [pattern.split() for pattern in (words.REPEATED if kind == 1 else words.VARIED)]
    names = sorted({name for pattern in patterns for name in pattern})
    choices = [words.LISTS.get(name, (name,)) for name in names]
    sizes = np.array([len(choice) for choice in choices])
    slots = np.zeros((len(patterns), max(map(len, patterns))), dtype=np.int64)
    for row, pattern in zip(slots, patterns, strict=True):
        row[: len(pattern)] = [names.index(name) for name in pattern]
    lengths = np.array([len(pattern) for pattern in patterns])
    flat = np.concatenate([_tokens(choice) for choice in choices])
    return _Grammar(kind != 1, lengths, slots, np.cumsum(sizes) - sizes, sizes, flat)


def _fill_pattern(config: Needle, pattern: str, key: np.ndarray, answer: np.ndarray) -> np.ndarray:
    """Return the tokens `[n, m]` of a needle or question with its key and answer."""
    variables = {"KEY": key[:, None], "ANSWER": answer}
    columns = [
        variables[word] if word in variables else np.full((len(key), 1), _TOKEN[word])
        for word in pattern.replace("WHAT", config.answer_kind).split()
    ]
    return np.concatenate(columns, axis=1)


def _answer_symbols(config: Needle) -> tuple[tuple[str, ...], int]:
    """Return the words that answers consist of, and the number of words per answer."""
    if config.answer_kind == "word":
        return words.ANSWERS, 1
    return (words.DIGITS, config.digits) if config.answer_kind == "number" else (words.CHARACTERS, config.characters)


def _haystack_length(config: Needle, length: int) -> int:
    """Return the number of tokens left for the haystack."""
    size = _answer_symbols(config)[1]
    needle, question = (len(pattern.split()) - 1 + size for pattern in (words.NEEDLE, words.QUESTION))
    if needle + question > length:
        raise UsageError(
            f"{config.name}: a needle of {needle} tokens and a question with answer of {question} tokens do not fit "
            f"into length {length}: use a length of {needle + question} or more, or a shorter answer"
        )
    return length - needle - question


def _tokens(text: tuple[str, ...]) -> np.ndarray:
    return np.array([_TOKEN[word] for word in text], dtype=np.int64)
