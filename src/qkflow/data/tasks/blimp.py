"""Subject-verb agreement in BLiMP (Warstadt et al., 2020): minimal pairs that differ in the verb.

    A niece of most senators hasn't ..    A niece of most senators haven't ..     singular, because of 'niece'

Four of its sets ask for a verb. In the two whose name ends in `_agreement_2` the subjects differ and the verb is the
same: there is no beginning to continue, and they are left out.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path, PurePosixPath
from typing import Any, cast

from qkflow.data.tasks import jsonl
from qkflow.data.tasks.base import Task, TaskConfig
from qkflow.data.tasks.prefixes import Prefix, split_task
from qkflow.data.text import reading
from qkflow.data.text.reading import Entry
from qkflow.errors import UsageError

RELATIONAL, RELATIVE = "distractor_agreement_relational_noun", "distractor_agreement_relative_clause"
PLURALS = tuple(f"{how}_plural_subject_verb_agreement_1" for how in ("irregular", "regular"))
SETS = (RELATIONAL, RELATIVE, *PLURALS)
SUBJECTS = tuple(f"{how}_plural_subject_verb_agreement_2" for how in ("irregular", "regular"))
EXPECTED = "BLiMP: its .tar.xz, a .zip, or a folder with its .jsonl files (sentence_good, sentence_bad)"
AUXILIARIES = {"is": 0, "was": 0, "has": 0, "does": 0, "are": 1, "were": 1, "have": 1, "do": 1}
NOTES = (
    "rationale: the subject's head noun; many determiners (every, these) tell the number too",
    "the distractor sets always have a noun of the other number after the subject: that can be learnt instead",
    "a noun that is a subject in one set only stays in training",
)


def blimp(path: Path, config: TaskConfig) -> Task:
    """The task of BLiMP's archive or folder, or of single sets of it."""
    skipped, prefixes = Counter[str](), list[Prefix]()
    with _opened(path) as entries:
        for entry in entries:
            name = PurePosixPath(entry.label or Path(reading.bare(path.name)).name).stem
            for number, row in enumerate(jsonl.rows(entry, EXPECTED), start=1):
                if (prefix := _prefix(name, row, entry, number, skipped)) is not None:
                    prefixes.append(prefix)
    if not prefixes:
        raise UsageError(f"{path} has none of the sets {', '.join(SETS)}: expected {EXPECTED}")
    return split_task("BLiMP agreement", _consistent(prefixes, skipped), config, skipped=skipped, notes=NOTES)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Iterator[Entry]]:
    if path.is_dir() or not (path.name.endswith((".tgz", ".txz")) or reading.ending(path.name) == ".tar"):
        yield reading.entries(path, lambda entry: _wanted(entry.label))
        return
    import tarfile

    try:
        with reading.readable(str(path)), tarfile.open(path) as archive:
            names = sorted(name for name in archive.getnames() if _wanted(name))
            yield (
                Entry(
                    label=name,
                    shown=f"{path}:{name}",
                    open=lambda name=name: _member(archive.extractfile(name)),
                )
                for name in names
            )
    except tarfile.TarError as error:
        raise UsageError(f"{path} is damaged or no archive: expected {EXPECTED}") from error


def _member(file: object) -> BufferedIOBase:
    if file is None:
        raise UsageError(f"the archive has a folder or a link where a .jsonl file should be: expected {EXPECTED}")
    return cast(BufferedIOBase, file)


def _wanted(label: str) -> bool:
    name = PurePosixPath(label)
    return name.suffix == ".jsonl" and name.stem in (*SETS, *SUBJECTS) and not name.name.startswith(".")


def _prefix(name: str, row: dict[str, Any], entry: Entry, number: int, skipped: Counter[str]) -> Prefix | None:
    match row:
        case {"sentence_good": str(good), "sentence_bad": str(bad)}:
            words, others = good.lower().rstrip(".").split(), bad.lower().rstrip(".").split()
        case _:
            raise UsageError(f"{entry.shown}, row {number}: expected {EXPECTED}")
    verb = next((place for place, pair in enumerate(zip(words, others, strict=False)) if pair[0] != pair[1]), 0)
    prefix = tuple(words[:verb])
    if name not in SETS:
        skipped["the subjects differ, not the verbs"] += 1
    elif len(prefix) < 2:
        skipped["the subject is the only word before the verb"] += 1
    elif (head := _head(name, prefix)) is None:
        skipped["no subject found"] += 1
    else:
        label, noun = _number(words[verb], others[verb]), prefix[head]
        return Prefix(words=prefix, label=label, head=head, noun=noun, template=name, kind=name)
    return None


def _head(name: str, prefix: tuple[str, ...]) -> int | None:
    """The word before `of` or `about`, before `that` or `who`, or before the verb."""
    if name in PLURALS:
        return len(prefix) - 1
    after = ("of", "about") if name == RELATIONAL else ("that", "who", "which")
    start = 3 if prefix[:3] == ("a", "lot", "of") else 1
    return next((place - 1 for place in range(start, len(prefix)) if prefix[place] in after), None)


def _number(right: str, wrong: str) -> int:
    """0: singular, 1: plural. A verb of the third person singular is longer than its plural."""
    return AUXILIARIES.get(right.removesuffix("n't"), int(len(right) < len(wrong)))


def _consistent(prefixes: list[Prefix], skipped: Counter[str]) -> Iterator[Prefix]:
    """The sets hold mistakes ("some men irritates"): a noun's number is the one most of its sentences give it."""
    numbers: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for prefix in prefixes:
        numbers[prefix.noun][prefix.label] += 1
    for prefix in prefixes:
        if 2 * numbers[prefix.noun][prefix.label] > numbers[prefix.noun].total():
            yield prefix
        else:
            skipped["the verb contradicts the noun's other sentences"] += 1
