"""Corpus notes: figures the papers tie the effect of a mechanism to. They are context, and never part of a verdict.

| note                 | measured on a sample of the training text                                            |
|----------------------|--------------------------------------------------------------------------------------|
| vocabulary growth    | h of Heaps' law, distinct words ~ words^h, fitted to log-spaced points                |
| compressibility      | bits that LZMA needs for a byte                                                      |
| document similarity  | mean cosine between the tf-idf vectors of two documents                              |

A task has other notes: how many instances it has, of which tokens, and how often a guess is right.
"""

from __future__ import annotations

import lzma
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qkflow.data import Corpus, Split

SAMPLE = 1_000_000
"""Bytes of training text that the notes are measured on."""
DOCUMENTS = 200
"""Documents that are compared with each other."""
EXCERPTS, EXCERPT = 3, 64
"""Excerpts of held-out text for attention maps, and the tokens of each."""

_WORD = re.compile(rb"[\w'\x80-\xff]+")
_BUCKETS = 4096


def describe(corpus: Corpus) -> dict[str, Any]:
    """The content of a study's corpus.json: notes on the corpus, and the excerpts that attention maps are drawn on."""
    return {"notes": notes(corpus), "excerpts": [{"tokens": tokens} for tokens in excerpts(corpus.validation)]}


def notes(corpus: Corpus) -> list[dict[str, str]]:
    """Every note: its name, its value as people read it, and what it means."""
    return _of_text(corpus) if corpus.task is None else _of_task(corpus, corpus.task)


def _of_task(corpus: Corpus, task: Mapping[str, Any]) -> list[dict[str, str]]:
    parts = [f"{len(part.documents):,}" for part in (corpus.train, corpus.validation, corpus.test)]
    cells = 0 if corpus.test.cells is None else len(np.unique(corpus.test.cells))
    grid = f"{cells} cell{'s' if cells != 1 else ''} by {' and '.join(task['axes'])}"
    made = "made from the task's name and options alone, the same on every machine; none is in two parts"
    return [
        _note("instances", f"{parts[0]} to learn from, {parts[1]} held out, {parts[2]} to test", made),
        _note("test grid", grid, "the test instances are shared out evenly"),
        _note("vocabulary", f"{corpus.vocabulary:,} tokens", "the end token included"),
        _note("chance", _rarely(task["chance"]), "how often a guess among the possible answers is right"),
    ]


def _rarely(chance: float) -> str:
    """A chance in percent; a long answer's has more zeros than anyone reads."""
    return f"{100 * chance:.3g} %" if chance >= 1e-6 else f"1 in {1 / chance:,.0f}"


def _of_text(corpus: Corpus) -> list[dict[str, str]]:
    documents = _sample(corpus)
    text = b"\n".join(documents)
    found = [
        _note(
            "size",
            f"{corpus.train.bytes / 1e6:,.1f} MB in {len(corpus.train.documents):,} documents",
            "training text; the figures below come from a sample of it, spread over the documents",
        ),
        _note(
            "compressibility",
            f"{8 * len(lzma.compress(text)) / max(1, len(text)):.2f} bits per byte",
            "what LZMA needs; less means more that repeats word by word",
        ),
    ]
    words = _WORD.findall(text)
    if (growth := vocabulary_growth(words)) is not None:
        meaning = "exponent of distinct words over words (Heaps); nearer 1 means ever new words: a more diverse text"
        found.append(_note("vocabulary growth", f"{growth:.2f}", meaning))
    if (alike := similarity(documents)) is not None:
        meaning = "mean cosine of the tf-idf vectors of two documents; near 0 means that they share few telling words"
        found.append(_note("document similarity", f"{alike:.3f}", meaning))
    return found


def vocabulary_growth(words: Sequence[bytes]) -> float | None:
    """The exponent h of `distinct words ~ words^h`; None for fewer than a hundred words.

    >>> vocabulary_growth([b"%d" % n for n in range(1000)])
    1.0
    >>> vocabulary_growth([b"same"] * 1000)
    0.0
    """
    if len(words) < 100:
        return None
    points = np.unique(np.geomspace(20, len(words), 20).astype(np.int64))
    seen: set[bytes] = set()
    distinct, begin = [], 0
    for end in points.tolist():
        seen.update(words[begin:end])
        distinct.append(len(seen))
        begin = end
    return round(float(np.polyfit(np.log(points), np.log(distinct), 1)[0]), 6) + 0.0


def similarity(documents: Sequence[bytes]) -> float | None:
    """The mean cosine between two documents' tf-idf vectors over hashed words; None for fewer than two with words.

    >>> round(similarity([b"red fish", b"red fish", b"blue bird", b"blue bird"]), 3)
    0.333
    """
    counts = np.zeros((len(documents), _BUCKETS))
    for row, document in zip(counts, documents, strict=True):
        for word in _WORD.findall(document.lower()):
            row[zlib.crc32(word) % _BUCKETS] += 1
    counts = counts[counts.any(1)]
    if len(counts) < 2:
        return None
    vectors = np.log1p(counts) * np.log((1 + len(counts)) / (0.5 + (counts > 0).sum(0)))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = vectors @ vectors.T
    return float((cosines.sum() - np.trace(cosines)) / (len(counts) * (len(counts) - 1)))


def excerpts(split: Split) -> list[list[int]]:
    """Tokens of evenly spaced held-out documents, each from a third of its length on where that leaves enough of them.

    Of a task's instances the ends are taken, where the questions are, and only of those whose needle lies nearest.

    >>> excerpts(Split(tokens=np.arange(9), documents=np.array([[1, 4], [5, 9]]), sizes=np.array([3, 4])))
    [[1, 2, 3], [5, 6, 7, 8]]
    """
    documents, part = np.asarray(split.documents), 3
    if split.cells is not None:
        depths = split.cells["depth"]
        documents, part = documents[depths == depths.max()], 1
    chosen = np.unique(np.linspace(0, len(documents) - 1, EXCERPTS).astype(np.int64))
    found = []
    for begin, end in documents[chosen].tolist():
        start = max(begin, min(begin + (end - begin) // part, end - EXCERPT))
        found.append(split.tokens[start : min(end, start + EXCERPT)].tolist())
    return [tokens for tokens in found if tokens]


def _sample(corpus: Corpus) -> list[bytes]:
    """The beginnings of evenly spaced training documents, about `SAMPLE` bytes together."""
    spans = np.asarray(corpus.train.documents)
    chosen = spans[np.unique(np.linspace(0, len(spans) - 1, DOCUMENTS).astype(np.int64))]
    share = SAMPLE // len(chosen)
    return [corpus.decode(corpus.train.tokens[begin : min(end, begin + share)]) for begin, end in chosen.tolist()]


def _note(name: str, value: str, meaning: str) -> dict[str, str]:
    return {"name": name, "value": value, "meaning": meaning}
