"""Subject-verb agreement in BLiMP (Warstadt et al., 2020): minimal pairs that differ in the verb.

    A niece of most senators hasn't ..    A niece of most senators haven't ..     singular, because of 'niece'

Four of its sets test a verb. In the two sets `*_agreement_2` the subjects differ and the verb is the same, so there is
no prefix to continue; they are skipped.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, cast

from qkflow.data.tasks.base import Task, TaskConfig
from qkflow.data.tasks.prefixes import Prefix, prefix_task, verb_position
from qkflow.data.text import reading
from qkflow.data.text.reading import TextFile
from qkflow.errors import UsageError

RELATIONAL, RELATIVE = "distractor_agreement_relational_noun", "distractor_agreement_relative_clause"
PLURALS = ("irregular_plural_subject_verb_agreement_1", "regular_plural_subject_verb_agreement_1")
SETS = (RELATIONAL, RELATIVE, *PLURALS)
SKIPPED_SETS = ("irregular_plural_subject_verb_agreement_2", "regular_plural_subject_verb_agreement_2")
EXPECTED = "BLiMP: its .tar.xz, a .zip, or a folder with its .jsonl files (sentence_good, sentence_bad)"
AUXILIARIES = {"is": 0, "was": 0, "has": 0, "does": 0, "are": 1, "were": 1, "have": 1, "do": 1}  # 1: plural
NOTES = (
    "rationale: the subject's head noun; many determiners (every, these) also show the number",
    "the distractor sets always have a noun of the other number after the subject, which a model can learn instead",
    "a noun that is a subject in one set only stays in training",
)


def blimp(path: Path, config: TaskConfig) -> Task:
    """Read BLiMP's archive or folder, or single sets of it."""
    skipped, prefixes = Counter[str](), list[Prefix]()
    with _open_sets(path) as files:
        for file in files:
            name = PurePosixPath(file.label or reading.strip_compression(path.name)).stem
            for location, row in reading.iter_json_lines(file, EXPECTED):
                if (prefix := _prefix(name, row, location, skipped)) is not None:
                    prefixes.append(prefix)
    if not prefixes:
        raise UsageError(f"{path} contains none of the sets {', '.join(SETS)}: expected {EXPECTED}")
    return prefix_task("BLiMP agreement", _consistent(prefixes, skipped), config, skipped=skipped, notes=NOTES)


@contextlib.contextmanager
def _open_sets(path: Path) -> Iterator[Iterator[TextFile]]:
    if path.is_dir() or not (path.name.endswith((".tgz", ".txz")) or reading.content_suffix(path.name) == ".tar"):
        yield reading.iter_files(path, lambda file: _is_agreement_set(file.label))
        return
    import tarfile

    try:
        with reading.reading_errors(str(path)), tarfile.open(path) as archive:
            members = (member.name for member in archive if member.isfile() and _is_agreement_set(member.name))
            yield (
                TextFile(label=name, name=f"{path}:{name}", open=partial(cast(Any, archive.extractfile), name))
                for name in sorted(members)
            )
    except tarfile.TarError as error:
        raise UsageError(f"{path} is damaged or not an archive: expected {EXPECTED}") from error


def _is_agreement_set(label: str) -> bool:
    path = PurePosixPath(label)
    return path.suffix == ".jsonl" and path.stem in (*SETS, *SKIPPED_SETS) and not path.name.startswith(".")


def _prefix(name: str, row: Any, location: str, skipped: Counter[str]) -> Prefix | None:
    match row:
        case {"sentence_good": str(good), "sentence_bad": str(bad)}:
            words, others = good.lower().rstrip(".").split(), bad.lower().rstrip(".").split()
        case _:
            raise UsageError(f"{location}: expected {EXPECTED}")
    verb = verb_position(words, others)
    prefix = tuple(words[:verb])
    if name not in SETS:
        skipped["the subjects differ, not the verbs"] += 1
    elif len(prefix) < 2:
        skipped["the subject is the only word before the verb"] += 1
    elif (head := _head_position(name, prefix)) is None:
        skipped["no subject found"] += 1
    else:
        # a verb in the third person singular is longer than its plural
        label = AUXILIARIES.get(words[verb].removesuffix("n't"), int(len(words[verb]) < len(others[verb])))
        return Prefix(words=prefix, label=label, head=head, noun=prefix[head], template=name, kind=name)
    return None


def _head_position(name: str, prefix: tuple[str, ...]) -> int | None:
    """Return the position before `of` or `about`, before `that` or `who`, or before the verb."""
    if name in PLURALS:
        return len(prefix) - 1
    next_words = ("of", "about") if name == RELATIONAL else ("that", "who", "which")
    start = 3 if prefix[:3] == ("a", "lot", "of") else 1
    return next((position - 1 for position in range(start, len(prefix)) if prefix[position] in next_words), None)


def _consistent(prefixes: list[Prefix], skipped: Counter[str]) -> Iterator[Prefix]:
    """Drop mistakes of the data ("some men irritates"): a noun has the number that most of its sentences give it."""
    numbers: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for prefix in prefixes:
        numbers[prefix.noun][prefix.label] += 1
    for prefix in prefixes:
        if 2 * numbers[prefix.noun][prefix.label] > numbers[prefix.noun].total():
            yield prefix
        else:
            skipped["the verb contradicts the noun's other sentences"] += 1
