"""HateXplain (Mathew et al., 2021): posts with the words that annotators call the reason for their label.

A folder with the posts (`dataset.json`) and the official split (`post_id_divisions.json`); of a post

    {"post_tokens": [..], "annotators": [{"label": "offensive", ..}, ..], "rationales": [[0, 1, 0, ..], ..]}

are read the label that most annotators gave, and the words that most of those who marked any did mark. The posts are
full of slurs: no message here quotes one, and `Task.is_quotable` is False.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkflow.data.tasks import jsonl
from qkflow.data.tasks.base import Instance, Task, TaskConfig
from qkflow.data.tasks.vocab import ASK, PARTS, Part, read, subsample, vocabulary
from qkflow.errors import UsageError, unknown

LABELS = ("hatespeech", "normal", "offensive")
DIVISIONS: dict[Part, str] = {"train": "train", "validation": "val", "test": "test"}
SITES = ("gab", "twitter")
SPLIT_FILE = "post_id_divisions.json"
EXPECTED = f"a folder with HateXplain's dataset.json and {SPLIT_FILE} (also .xz, .gz)"
POST = "posts with post_tokens, annotators (each with a label) and rationales"
NOTES = (
    "official split; label: majority of three annotators",
    "rationale (ours): words marked by more than half of the annotators who marked any; `normal` posts have none",
    f"the token {ASK} after the post asks, and is never deleted",
)


def hatexplain(path: Path, config: TaskConfig) -> Task:
    """The task of a folder with the two files of HateXplain."""
    posts = jsonl.document(_file(path, "dataset"), POST)
    divisions = jsonl.document(_file(path, SPLIT_FILE.removesuffix(".json")), "lists of ids under train, val, test")
    skipped = Counter[str]()
    named = {part: _ids(divisions, part, path) for part in PARTS}
    placed = {name for names in named.values() for name in names}
    without = [name for name, post in posts.items() if name not in placed and _label(post, name) is None]
    skipped["no label has a majority"] += len(without)
    skipped["not in the official split"] += len(posts.keys() - placed) - len(without)
    chosen: dict[Part, tuple[tuple[str, int, Mapping[str, Any]], ...]] = {}
    for part in PARTS:
        usable = [one for name in named[part] if (one := _usable(name, posts, config, skipped)) is not None]
        chosen[part] = subsample(usable, config.train if part == "train" else config.test, config.seed)
    numbers = vocabulary((_words(post) for _, _, post in chosen["train"]), markers=(ASK,), most=config.vocabulary)
    instances = {part: tuple(_instance(*one, numbers) for one in chosen[part]) for part in PARTS}
    return Task(
        name="HateXplain",
        kind="classification",
        words=tuple(numbers),
        classes=LABELS,
        train=instances["train"],
        validation=instances["validation"],
        test=instances["test"],
        skipped={reason: count for reason, count in skipped.items() if count},
        is_quotable=False,
        notes=NOTES,
    )


def rationales(post: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """The places that each annotator marked; who marked another number of words than the post has is left out.

    >>> rationales({"post_tokens": ["a", "b", "c"], "rationales": [[0, 1, 1], [0, 0, 1], [1, 0, 0, 0]]})
    ((1, 2), (2,))
    """
    words = len(post["post_tokens"])
    return tuple(
        tuple(place for place, mark in enumerate(marks) if mark) for marks in post["rationales"] if len(marks) == words
    )


def majority(marked: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """The places that more than half of the annotators marked.

    >>> majority(((1, 2), (2, 3), (0, 2, 3))), majority(((1, 2), (2,))), majority(())
    ((2, 3), (2,), ())
    """
    counts = Counter(place for places in marked for place in places)
    return tuple(sorted(place for place, count in counts.items() if 2 * count > len(marked)))


def _file(path: Path, start: str) -> Path:
    folder = path if path.is_dir() else path.parent
    found = [file for file in jsonl.files(folder, ".json") if file.name.startswith(start)]
    if path in found:
        return path
    if len(found) != 1:
        seen = f"{len(found)} of them ({', '.join(file.name for file in found)})" if found else "none"
        raise UsageError(f"{folder} should have one file {start}*.json, and has {seen}: give --data PATH, {EXPECTED}")
    return found[0]


def _ids(divisions: Mapping[str, Any], part: Part, path: Path) -> list[str]:
    match divisions.get(DIVISIONS[part]):
        case [str(), *_] as ids:
            return [str(one) for one in ids]
    raise UsageError(f"{path}: {SPLIT_FILE} has no list of ids under {DIVISIONS[part]!r}: expected train, val and test")


def _usable(
    name: str, posts: Mapping[str, Any], config: TaskConfig, skipped: Counter[str]
) -> tuple[str, int, Mapping[str, Any]] | None:
    post = posts.get(name)
    if post is None:
        skipped["in the split, but not in the data"] += 1
        return None
    label = _label(post, name)
    if label is None:
        skipped["no label has a majority"] += 1
    elif not post["post_tokens"]:
        skipped["no words"] += 1
    elif config.longest is not None and len(post["post_tokens"]) + 1 > config.longest:
        skipped[f"longer than {config.longest} tokens"] += 1
    else:
        wrong = len(post["rationales"]) - len(rationales(post))
        skipped["rationales (of one annotator) of another length than the post; the post stays"] += wrong
        return name, label, post
    return None


def _label(post: Any, name: str) -> int | None:
    """The label of more than half of the annotators; an error where a post is not what it should be."""
    match post:
        case {"post_tokens": [*_] as words, "annotators": [*annotators], "rationales": [*marks]}:
            labels = [one.get("label") if isinstance(one, dict) else None for one in annotators]
        case _:
            raise UsageError(f"the post {name} is not what it should be: expected {POST}")
    if not all(isinstance(word, str) for word in words) or not all(isinstance(one, list) for one in marks):
        raise UsageError(f"the post {name} is not what it should be: expected words, and a list of marks an annotator")
    for label in labels:
        if label not in LABELS:
            raise unknown("label", label, LABELS)
    found, count = Counter(labels).most_common(1)[0] if labels else (None, 0)
    return LABELS.index(str(found)) if 2 * count > len(labels) else None


def _words(post: Mapping[str, Any]) -> list[str]:
    return [word.lower() for word in post["post_tokens"]]


def _instance(name: str, label: int, post: Mapping[str, Any], numbers: Mapping[str, int]) -> Instance:
    tokens = (*read(_words(post), numbers), numbers[ASK])
    rationale = majority(rationales(post)) if LABELS[label] != "normal" else ()
    source = next((site for site in SITES if f"_{site}" in name), "other")
    return Instance(tokens=tokens, label=label, rationale=rationale, protected=(len(tokens) - 1,), kind=source)
