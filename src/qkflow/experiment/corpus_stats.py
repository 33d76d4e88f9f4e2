"""Statistics of the data that papers relate the effect of a mechanism to. They are context, never part of a verdict.

| statistic            | measured on a sample of the training text                                            |
|----------------------|--------------------------------------------------------------------------------------|
| vocabulary growth    | h of Heaps' law, distinct words ~ words^h, fitted to log-spaced points                |
| compressibility      | bits per byte of LZMA                                                                |
| document similarity  | mean cosine similarity of the tf-idf vectors of two documents                        |

A recall task has other statistics: its instances, its test grid, its vocabulary and the accuracy of guessing.
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
"""Bytes of training text that are sampled."""
DOCUMENTS = 200
"""Documents that are sampled."""
EXCERPTS, EXCERPT = 3, 64
"""Excerpts of held-out text for attention maps, and the tokens of each."""

_WORD = re.compile(rb"[\w'\x80-\xff]+")
_BUCKETS = 4096


def describe_corpus(corpus: Corpus) -> dict[str, Any]:
    """The content of corpus.json: statistics of the corpus, and excerpts for attention maps."""
    return {
        "notes": _text_notes(corpus) if corpus.task is None else _recall_notes(corpus, corpus.task),
        "excerpts": [{"tokens": tokens} for tokens in excerpts(corpus.validation)],
    }


def note(name: str, value: str, meaning: str) -> dict[str, str]:
    """A statistic as JSON."""
    return {"name": name, "value": value, "meaning": meaning}


def _recall_notes(corpus: Corpus, task: Mapping[str, Any]) -> list[dict[str, str]]:
    train, held_out, test = (f"{len(split.documents):,}" for split in (corpus.train, corpus.validation, corpus.test))
    cells = 0 if corpus.test.cells is None else len(np.unique(corpus.test.cells))
    grid = f"{cells} cell{'s' if cells != 1 else ''} by {' and '.join(task['axes'])}"
    chance = task["chance"]
    return [
        note(
            "instances",
            f"{train} for training, {held_out} held out, {test} for testing",
            "generated from the task's name and options; no instance is in two splits",
        ),
        note("test grid", grid, "test instances are spread evenly over the cells"),
        note("vocabulary", f"{corpus.vocabulary:,} tokens", "including the end token"),
        note(
            "chance",
            f"{100 * chance:.3g} %" if chance >= 1e-6 else f"1 in {1 / chance:,.0f}",
            "accuracy of guessing among the possible answers",
        ),
    ]


def _text_notes(corpus: Corpus) -> list[dict[str, str]]:
    documents = _sample(corpus)
    text = b"\n".join(documents)
    notes = [
        note(
            "size",
            f"{corpus.train.bytes / 1e6:,.1f} MB in {len(corpus.train.documents):,} documents",
            "training text; the statistics below are of a sample spread over its documents",
        ),
        note(
            "compressibility",
            f"{8 * len(lzma.compress(text)) / max(1, len(text)):.2f} bits per byte",
            "size after LZMA; lower means more verbatim repetition",
        ),
    ]
    words = _WORD.findall(text)
    if (growth := vocabulary_growth(words)) is not None:
        meaning = "exponent of distinct words over words (Heaps' law); closer to 1 means a more diverse text"
        notes.append(note("vocabulary growth", f"{growth:.2f}", meaning))
    if (cosine := similarity(documents)) is not None:
        meaning = "mean cosine similarity of two documents' tf-idf vectors; near 0 means few words in common"
        notes.append(note("document similarity", f"{cosine:.3f}", meaning))
    return notes


def vocabulary_growth(words: Sequence[bytes]) -> float | None:
    """The exponent h of Heaps' law, `distinct words ~ words^h`; None for fewer than a hundred words.

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
    """The mean cosine similarity of two documents' tf-idf vectors, over hashed words; None with fewer than two.

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
    """Excerpts of evenly spaced held-out documents, starting at a third of each if that leaves enough tokens.

    Of recall instances, the ends with the questions are taken, and only of those with the deepest needle.

    >>> excerpts(Split(tokens=np.arange(9), documents=np.array([[1, 4], [5, 9]]), sizes=np.array([3, 4])))
    [[1, 2, 3], [5, 6, 7, 8]]
    """
    documents, divisor = np.asarray(split.documents), 3
    if split.cells is not None:
        depths = split.cells["depth"]
        documents, divisor = documents[depths == depths.max()], 1
    chosen = np.unique(np.linspace(0, len(documents) - 1, EXCERPTS).astype(np.int64))
    rows = []
    for begin, end in documents[chosen].tolist():
        start = max(begin, min(begin + (end - begin) // divisor, end - EXCERPT))
        rows.append(split.tokens[start : min(end, start + EXCERPT)].tolist())
    return [tokens for tokens in rows if tokens]


def _sample(corpus: Corpus) -> list[bytes]:
    """The beginnings of evenly spaced training documents, about `SAMPLE` bytes in total."""
    spans = np.asarray(corpus.train.documents)
    chosen = spans[np.unique(np.linspace(0, len(spans) - 1, DOCUMENTS).astype(np.int64))]
    share = SAMPLE // len(chosen)
    return [corpus.decode(corpus.train.tokens[begin : min(end, begin + share)]) for begin, end in chosen.tolist()]
