"""SST-2 (Socher et al., 2013): is a phrase of a film review positive or negative?

The labels of the official test part are not public, and its validation part of 872 sentences is too small to see a
difference of one point. Both parts are therefore cut from the training file:

    test, validation    phrases of at least eight words, drawn at random
    train               all other phrases, but for those that contain one of them or are part of one

The phrases of a sentence are the nodes of its parse tree: two of them are disjoint, or one contains the other. So no
word of a test phrase is trained on in its place. There are no rationales.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from qkflow.data.tasks.base import Instance, Task, TaskConfig
from qkflow.data.tasks.vocab import ASK, build_vocabulary, encode_words, subsample
from qkflow.data.text.reading import iter_lines, list_files, text_file
from qkflow.data.text.splits import SPLITS, SplitName
from qkflow.errors import UsageError

LABELS = ("negative", "positive")
EXPECTED = "SST-2's train.tsv (also .xz, .gz) or its folder: lines of a phrase, a tab, and 0 or 1"
MIN_WORDS = 8
"""The fewest words of a test or validation phrase."""
TEST, VALIDATION = 4000, 2000

Phrase = tuple[str, ...]


def sst2(path: Path, config: TaskConfig) -> Task:
    """Read SST-2's training file and cut a validation and a test part from it."""
    labels = dict(_read(_find_file(path)))
    long = [phrase for phrase in labels if len(phrase) >= MIN_WORDS]
    random.Random(f"sst2 {config.seed}").shuffle(long)
    share = min(1.0, 0.3 * len(long) / (TEST + VALIDATION))
    n_test, n_validation = round(share * TEST), round(share * VALIDATION)
    test = set(long[:n_test])
    parts = {part for phrase in test for part in _parts(phrase)}
    validation = {phrase for phrase in long[n_test : n_test + n_validation] if not _overlaps(phrase, test, parts)}
    held_out = test | validation
    parts |= {part for phrase in validation for part in _parts(phrase)}
    train = [phrase for phrase in labels if not _overlaps(phrase, held_out, parts)]
    splits: dict[SplitName, list[Phrase]] = {
        "train": train,
        "validation": [phrase for phrase in labels if phrase in validation],
        "test": [phrase for phrase in labels if phrase in test],
    }
    n_skipped = len(labels) - sum(map(len, splits.values()))
    chosen = {split: subsample(splits[split], config.limit(split), config.seed) for split in SPLITS}
    vocabulary = build_vocabulary(chosen["train"], markers=(ASK,), max_size=config.vocabulary)

    def instance(phrase: Phrase) -> Instance:
        tokens = (*encode_words(phrase, vocabulary), vocabulary[ASK])
        return Instance(tokens=tokens, label=labels[phrase], rationale=(), protected=(len(tokens) - 1,))

    instances: dict[str, Any] = {split: tuple(map(instance, chosen[split])) for split in SPLITS}
    return Task(
        name="SST-2",
        kind="classification",
        words=tuple(vocabulary),
        classes=LABELS,
        **instances,
        skipped={"phrases that contain a test or validation phrase, or are part of one": n_skipped},
        notes=(f"test and validation phrases have at least {MIN_WORDS} words and are cut from the training file",),
    )


def _find_file(path: Path) -> Path:
    if path.is_file():
        return path
    files = list_files(path, lambda file: Path(file.label).name.startswith("train.tsv"))
    if len(files) != 1:
        raise UsageError(f"{path} must contain one file train.tsv: set --data to the path of {EXPECTED}")
    return files[0]


def _read(path: Path) -> Iterator[tuple[Phrase, int]]:
    for number, line in enumerate(iter_lines(text_file(path)), 1):
        text, tab, label = line.decode("utf-8", "replace").rstrip("\r\n").rpartition("\t")
        if number == 1 and label.strip() == "label":
            continue
        if not tab or label.strip() not in ("0", "1"):
            raise UsageError(f"{path}:{number} is no phrase with a label: expected {EXPECTED}")
        if words := tuple(text.lower().split()):
            yield words, int(label)


def _overlaps(phrase: Phrase, held_out: Collection[Phrase], parts: Collection[Phrase]) -> bool:
    """Whether a phrase is, contains or is part of one that is held out."""
    return phrase in parts or any(part in held_out for part in _parts(phrase))


def _parts(phrase: Phrase) -> Iterable[Phrase]:
    """All runs of words of a phrase."""
    return (phrase[start:stop] for start in range(len(phrase)) for stop in range(start + 1, len(phrase) + 1))
