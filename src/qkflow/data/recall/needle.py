"""Single-needle retrieval (S-NIAH-1, 2, 3, after RULER, https://arxiv.org/abs/2404.06654), in sentences of our own.

    the rain is soft . the number of fern is 4 8 1 5 2 . the road . what is the number of fern ? it is 4 8 1 5 2
    haystack           needle                            haystack   question                           answer

| kind     | haystack                           | answer                       |
|----------|------------------------------------|------------------------------|
| S-NIAH-1 | the same five sentences, repeated  | a number, a token each digit |
| S-NIAH-2 | varied sentences from word lists   | a number                     |
| S-NIAH-3 | as in 2                            | an id of hexadecimal letters |

The needle begins at the end of that sentence which is nearest to its depth, in percent of the haystack. The last
sentence of the haystack is shortened to make the length exact, and keeps its full stop. No haystack has a word that
keys or answers have, so there is one right answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, get_args

import numpy as np

from qkflow.data.recall import vocabulary as words
from qkflow.data.recall.base import Cell, Instances, at_least
from qkflow.data.splitmix import Seed, randint, random_uint64
from qkflow.data.text.corpus import CELL_DTYPE
from qkflow.errors import UsageError, unknown

Answer = Literal["number", "id", "word"]
MOST = 8192
"""The longest test length, unless others are asked for."""

_NUMBER = {word: number for number, word in enumerate(words.WORDS)}


@dataclass(frozen=True, kw_only=True)
class Needle:
    """Which needle is to be found in which haystack.

    >>> Needle(kind=3).name, Needle(kind=3, characters=2).chance, Needle(length=2048).test_lengths
    ('s-niah-3', 0.00390625, (2048, 4096, 8192))
    """

    kind: Literal[1, 2, 3] = 1
    """Of the three tasks."""
    answer: Answer | None = None
    """What is to be retrieved: a number (kinds 1 and 2, unless said), an id (kind 3, unless said), or a word."""
    digits: int = 5
    """Of a number."""
    characters: int = 12
    """Of an id."""
    length: int = 256
    """Tokens of a training instance."""
    lengths: tuple[int, ...] | None = None
    """Tokens of the test instances: 1, 2, 4 and 8 times the training length and at most 8192, unless given."""
    depths: tuple[int, ...] = (0, 25, 50, 75, 100)
    """Of the needles in the test, in percent."""
    train: int = 20_000
    """Training instances."""
    validation: int = 256
    """Validation instances."""
    each: int = 20
    """Test instances for each length and depth."""
    seed: int = 0
    """Which instances are drawn."""

    def __post_init__(self) -> None:
        if self.kind not in (1, 2, 3):
            raise UsageError(f"s-niah has the kinds 1, 2 and 3, got kind={self.kind}: give one of them")
        if self.answer is not None and self.answer not in get_args(Answer):
            raise unknown(f"answer of {self.name}", self.answer, get_args(Answer))
        parts = {"train": self.train, "validation": self.validation, "each": self.each}
        sizes = {"digits": self.digits, "characters": self.characters, "length": self.length}
        at_least(self.name, 1, {**sizes, **parts, "lengths": self.test_lengths})
        at_least(self.name, 0, {"depths": self.depths})
        for length in (self.length, *self.test_lengths):
            _room(self, length)
        _checked_depth(self, max(self.depths))

    @property
    def name(self) -> str:
        """`s-niah-1`, `s-niah-2` or `s-niah-3`."""
        return f"s-niah-{self.kind}"

    @property
    def words(self) -> tuple[str, ...]:
        """The words of all three kinds."""
        return words.WORDS

    @property
    def what(self) -> Answer:
        """What is to be retrieved."""
        return self.answer or ("id" if self.kind == 3 else "number")

    @property
    def test_lengths(self) -> tuple[int, ...]:
        """Tokens of the test instances, each a column of the grid."""
        usual = tuple(times * self.length for times in (1, 2, 4, 8) if times == 1 or times * self.length <= MOST)
        return usual if self.lengths is None else self.lengths

    @property
    def chance(self) -> float:
        """A guess among all answers: 1 / 10^digits, 1 / 16^characters, or 1 / words."""
        symbols, count = _symbols(self)
        return float(len(symbols)) ** -count

    @property
    def axes(self) -> tuple[str, ...]:
        """Accuracy is read against length and depth."""
        return ("length", "depth")

    def grid(self) -> tuple[Cell, ...]:
        """A cell for each length and depth."""
        return tuple(Cell(None, length, depth) for length in self.test_lengths for depth in self.depths)

    def draw(self, cell: Cell | None, *, seed: Seed, first: int, count: int) -> Instances:
        """Instances of the cell's length and depth, or of the training length at any depth."""
        length, depth = (self.length, None) if cell is None else (cell.length, cell.depth)
        return needles(self, seed=seed, count=count, length=length, depth=depth, first=first)


def needles(
    config: Needle, *, seed: Seed, count: int, length: int | None = None, depth: int | None = None, first: int = 0
) -> Instances:
    """Instances `first` to `first + count - 1` of the stream that `seed` chooses.

    `length` is the config's unless given. Without a `depth` each instance has one of its own, uniform in 0 .. 100.

    >>> config = Needle(kind=1, digits=3)
    >>> made = needles(config, seed=0, count=1, length=30, depth=50)
    >>> " ".join(config.words[token] for token in made.tokens[0])
    'the road is long . the number of comet is 2 9 5 . the rain is . what is the number of comet ? it is 2 9 5'
    >>> made.answers.tolist()
    [[0, 27, 30]]
    """
    length = config.length if length is None else length
    room, (symbols, size) = _room(config, length), _symbols(config)
    grammar = _grammar(config.kind)
    columns = 2 + size + grammar.most(room) + room
    numbers = random_uint64(seed, first + np.arange(count), columns)
    depths = randint(numbers[:, 0], 101) if depth is None else np.full(count, _checked_depth(config, depth))
    key = _tokens(words.KEYS)[randint(numbers[:, 1], len(words.KEYS))]
    answer = _tokens(symbols)[randint(numbers[:, 2 : 2 + size], len(symbols))]

    hay, borders = grammar.haystack(numbers[:, 2 + size :], room)
    nearest = np.abs(100 * borders - depths[:, None] * room).argmin(axis=1)
    begin = np.take_along_axis(borders, nearest[:, None], axis=1)
    needle, question = (_framed(config, frame, key, answer) for frame in (words.NEEDLE, words.QUESTION))
    within = needle.shape[1]
    # the text takes its tokens from [haystack | needle]: from the needle while it lasts, and goes on where it broke off
    place = np.arange(room + within)
    source = np.where(place < begin, place, np.where(place < begin + within, place - begin + room, place - within))
    text = np.take_along_axis(np.concatenate([hay, needle], axis=1), source, axis=1)

    cells = np.empty(count, dtype=CELL_DTYPE)
    cells["pairs"], cells["length"], cells["depth"] = -1, length, depths
    spans = np.column_stack([np.arange(count), np.full(count, length - size), np.full(count, length)])
    return Instances(np.concatenate([text, question], axis=1), spans, cells)


class _Grammar(NamedTuple):
    """Sentences as numbers: a pattern is a row of slots, and a slot any of `sizes` words from `firsts` on in `flat`."""

    random: bool
    lengths: np.ndarray  # [patterns]
    slots: np.ndarray  # [patterns, longest]
    firsts: np.ndarray  # [slots]
    sizes: np.ndarray  # [slots]
    flat: np.ndarray  # [words of all slots]

    def most(self, room: int) -> int:
        """Sentences that fill `room` tokens, however short."""
        return -(-room // int(self.lengths.min()))

    def haystack(self, numbers: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens `[n, room]`, and where a needle may begin in them, `[n, sentences + 1]`."""
        count, most = len(numbers), self.most(room)
        patterns = np.broadcast_to(np.arange(most) % len(self.lengths), (count, most))
        if self.random:
            patterns = randint(numbers[:, :most], len(self.lengths))
        borders = np.pad(np.cumsum(self.lengths[patterns], axis=1), ((0, 0), (1, 0)))
        opens = np.zeros((count, room), dtype=np.int64)
        row, which = np.nonzero(borders < room)
        opens[row, borders[row, which]] = 1
        sentence = np.cumsum(opens, axis=1) - 1
        within = np.arange(room) - np.take_along_axis(borders, sentence, axis=1)
        slot = self.slots[np.take_along_axis(patterns, sentence, axis=1), within]
        tokens = self.flat[self.firsts[slot] + randint(numbers[:, most : most + room], self.sizes[slot])]
        tokens[:, -1:] = _NUMBER[words.PERIOD]
        return tokens, np.minimum(borders, room)


@cache
def _grammar(kind: int) -> _Grammar:
    patterns = [pattern.split() for pattern in (words.DULL if kind == 1 else words.VARIED)]
    names = sorted({name for pattern in patterns for name in pattern})
    choices = [words.LISTS.get(name, (name,)) for name in names]
    sizes = np.array([len(choice) for choice in choices])
    slots = np.zeros((len(patterns), max(map(len, patterns))), dtype=np.int64)
    for row, pattern in zip(slots, patterns, strict=True):
        row[: len(pattern)] = [names.index(name) for name in pattern]
    lengths = np.array([len(pattern) for pattern in patterns])
    flat = np.concatenate([_tokens(choice) for choice in choices])
    return _Grammar(kind != 1, lengths, slots, np.cumsum(sizes) - sizes, sizes, flat)


def _framed(config: Needle, frame: str, key: np.ndarray, answer: np.ndarray) -> np.ndarray:
    """The tokens `[n, m]` of a needle or question, with its key and answer in their places."""
    parts = {"KEY": key[:, None], "ANSWER": answer}
    spelled = frame.replace("WHAT", words.WHAT[config.what]).split()
    columns = [parts[word] if word in parts else np.full((len(key), 1), _NUMBER[word]) for word in spelled]
    return np.concatenate(columns, axis=1)


def _symbols(config: Needle) -> tuple[tuple[str, ...], int]:
    """The words an answer is made of, and how many it has."""
    if config.what == "word":
        return words.ANSWERS, 1
    return (words.DIGITS, config.digits) if config.what == "number" else (words.CHARACTERS, config.characters)


def _room(config: Needle, length: int) -> int:
    """The tokens left for the haystack."""
    size = _symbols(config)[1]
    needle, question = (len(frame.split()) - 1 + size for frame in (words.NEEDLE, words.QUESTION))
    if needle + question > length:
        what = f"a needle of {needle} tokens and a question with answer of {question}"
        need = f"give {needle + question} tokens or more, or a shorter answer"
        raise UsageError(f"{config.name}: {what} do not fit into a text of {length}: {need}")
    return length - needle - question


def _checked_depth(config: Needle, depth: int) -> int:
    if not 0 <= depth <= 100:
        raise UsageError(f"{config.name}: depth is {depth}: give percents from 0 to 100")
    return depth


def _tokens(spelled: tuple[str, ...]) -> np.ndarray:
    return np.array([_NUMBER[word] for word in spelled], dtype=np.int64)
