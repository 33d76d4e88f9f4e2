"""HateXplain (Mathew et al., 2021): posts with the words that annotators marked as the reason for their label.

The folder contains the posts (`dataset.json`) and the official split (`post_id_divisions.json`). A post is

    {"post_tokens": [..], "annotators": [{"label": "offensive", ..}, ..], "rationales": [[0, 1, 0, ..], ..]}

Its label is that of the majority of annotators; its rationale is the words marked by the majority of the annotators who
marked any. The posts are offensive: no error message quotes one, and `Task.is_quotable` is False.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkflow.data.tasks.base import Instance, Task, TaskConfig
from qkflow.data.tasks.vocab import ASK, build_vocabulary, encode_words, subsample
from qkflow.data.text.reading import files_with_suffix, read_json
from qkflow.data.text.splits import SPLITS, SplitName
from qkflow.errors import UsageError, unknown

LABELS = ("hatespeech", "normal", "offensive")
DIVISIONS: dict[SplitName, str] = {"train": "train", "validation": "val", "test": "test"}
SITES = ("gab", "twitter")
SPLIT_FILE = "post_id_divisions.json"
EXPECTED = f"a folder with HateXplain's dataset.json and {SPLIT_FILE} (also .xz, .gz)"
EXPECTED_POST = "posts with post_tokens (words), annotators (each with a label) and rationales (lists of marks)"
NOTES = (
    "official split; label: majority of three annotators",
    "rationale (ours): words marked by more than half of the annotators who marked any; `normal` posts have none",
    f"the query token {ASK} follows the post and is never deleted",
)


def hatexplain(path: Path, config: TaskConfig) -> Task:
    """Read a folder with the two files of HateXplain."""
    posts = read_json(_find_file(path, "dataset"), EXPECTED_POST)
    divisions = read_json(_find_file(path, SPLIT_FILE.removesuffix(".json")), "lists of ids under train, val, test")
    labels = {post_id: _label(post, post_id) for post_id, post in posts.items()}
    ids = {split: _split_ids(divisions, split, path) for split in SPLITS}
    in_split = {post_id for split_ids in ids.values() for post_id in split_ids}
    skipped = Counter[str]()
    for post_id in posts:
        if post_id not in in_split:
            skipped["no majority label" if labels[post_id] is None else "not in the official split"] += 1
    chosen: dict[SplitName, tuple[str, ...]] = {}
    for split in SPLITS:
        usable: list[str] = []
        for post_id in ids[split]:
            n_words = len(posts[post_id]["post_tokens"]) if post_id in posts else 0
            if post_id not in posts:
                skipped["in the split, but not in the data"] += 1
            elif labels[post_id] is None:
                skipped["no majority label"] += 1
            elif not n_words:
                skipped["no words"] += 1
            elif config.longest is not None and n_words + 1 > config.longest:
                skipped[f"longer than {config.longest} tokens"] += 1
            else:
                usable.append(post_id)
                n_invalid = len(posts[post_id]["rationales"]) - len(rationales(posts[post_id]))
                skipped["rationales of one annotator with another length than the post (the post is kept)"] += n_invalid
        chosen[split] = subsample(usable, config.limit(split), config.seed)
    texts = (map(str.lower, posts[post_id]["post_tokens"]) for post_id in chosen["train"])
    vocabulary = build_vocabulary(texts, markers=(ASK,), max_size=config.vocabulary)
    instances: dict[str, Any] = {
        split: tuple(_instance(post_id, labels[post_id] or 0, posts[post_id], vocabulary) for post_id in chosen[split])
        for split in SPLITS
    }
    return Task(
        name="HateXplain",
        kind="classification",
        words=tuple(vocabulary),
        classes=LABELS,
        **instances,
        skipped=skipped,
        is_quotable=False,
        notes=NOTES,
    )


def rationales(post: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return the positions that each annotator marked; marks of another length than the post are dropped.

    >>> rationales({"post_tokens": ["a", "b", "c"], "rationales": [[0, 1, 1], [0, 0, 1], [1, 0, 0, 0]]})
    ((1, 2), (2,))
    """
    n_words = len(post["post_tokens"])
    return tuple(
        tuple(position for position, mark in enumerate(marks) if mark)
        for marks in post["rationales"]
        if len(marks) == n_words
    )


def majority(marked: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Return the positions that more than half of the annotators marked.

    >>> majority(((1, 2), (2, 3), (0, 2, 3))), majority(((1, 2), (2,))), majority(())
    ((2, 3), (2,), ())
    """
    counts = Counter(position for positions in marked for position in positions)
    return tuple(sorted(position for position, count in counts.items() if 2 * count > len(marked)))


def _find_file(path: Path, prefix: str) -> Path:
    folder = path if path.is_dir() else path.parent
    files = [file for file in files_with_suffix(folder, ".json") if file.name.startswith(prefix)]
    if path in files:
        return path
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise UsageError(
            f"{folder} must contain one file {prefix}*.json, found {names}: set --data to the path of {EXPECTED}"
        )
    return files[0]


def _split_ids(divisions: Mapping[str, Any], split: SplitName, path: Path) -> list[str]:
    match divisions.get(DIVISIONS[split]):
        case [str(), *_] as ids:
            return [str(post_id) for post_id in ids]
    raise UsageError(
        f"{path}: {SPLIT_FILE} has no list of ids under {DIVISIONS[split]!r}: expected train, val and test"
    )


def _label(post: Any, post_id: str) -> int | None:
    """Return the label of more than half of the annotators; raise a `UsageError` if the post is malformed."""
    match post:
        case {"post_tokens": [*words], "annotators": [*annotators], "rationales": [*marks]} if all(
            isinstance(word, str) for word in words
        ) and all(isinstance(annotator_marks, list) for annotator_marks in marks):
            labels = [annotator.get("label") if isinstance(annotator, dict) else None for annotator in annotators]
        case _:
            raise UsageError(f"the post {post_id} is malformed: expected {EXPECTED_POST}")
    for label in labels:
        if label not in LABELS:
            raise unknown("label", label, LABELS)
    most_common, count = Counter(labels).most_common(1)[0] if labels else (None, 0)
    return LABELS.index(str(most_common)) if 2 * count > len(labels) else None


def _instance(post_id: str, label: int, post: Mapping[str, Any], vocabulary: Mapping[str, int]) -> Instance:
    tokens = (*encode_words(map(str.lower, post["post_tokens"]), vocabulary), vocabulary[ASK])
    rationale = majority(rationales(post)) if LABELS[label] != "normal" else ()
    site = next((site for site in SITES if f"_{site}" in post_id), "other")
    return Instance(tokens=tokens, label=label, rationale=rationale, protected=(len(tokens) - 1,), kind=site)
