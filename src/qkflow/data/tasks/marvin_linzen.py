"""Subject-verb agreement by Marvin & Linzen (2018, "Targeted syntactic evaluation of language models").

A line of the file is a minimal pair that differs in the verb:

    {"file": "prep_anim", "case": "sing_MS_MV_plur_ES",
     "sents": ["the author next to the guards is tall", "the author next to the guards are tall"]}

The beginning they share is the text, the first number in `case` the label. The tested subject is the sentence's
first noun phrase, but in `sent_comp` ("the bankers said the author") and inside an object relative clause
(`obj_rel_*within*`: "the author that the guards") it is the last one of the beginning.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qkflow.data.tasks import jsonl
from qkflow.data.tasks.base import Task, TaskConfig
from qkflow.data.tasks.prefixes import Prefix, split_task
from qkflow.errors import UsageError

EXPECTED = 'lines like {"file": .., "case": "sing_..", "sents": [right, wrong]}, Marvin & Linzen\'s set as .jsonl'
AGREEMENT = re.compile(r"simple_agrmt|sent_comp|subj_rel|prep_.*|obj_rel_.*|(long_)?vp_coord")
LAST_PHRASE = re.compile(r"sent_comp|obj_rel_.*within.*")
COMPOUNDS = frozenset({"security", "taxi", "television"})
"""First words of two-word nouns: `security guard`."""
NOTES = (
    "rationale: the head noun of the tested subject, found from the template",
    "in (long_)vp_coord the first verb tells the number too, so that attention off the noun can be right as well",
    "television show and show count as one noun",
)


def marvin_linzen(path: Path, config: TaskConfig) -> Task:
    """The task of a .jsonl file (also .xz, .gz, .bz2): one instance for each distinct beginning of a sentence.

    >>> import json, tempfile
    >>> pair = {"file": "simple_agrmt", "case": "sing_MS_MV", "sents": ["the author is", "the author are"]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "pairs.jsonl").write_text(json.dumps(pair))
    ...     marvin_linzen(Path(folder) / "pairs.jsonl", TaskConfig())
    Traceback (most recent call last):
    qkflow.errors.UsageError: Marvin & Linzen: 1 sentences with 1 subject nouns in 1 templates leave nothing for ...
    """
    skipped = Counter[str]()
    return split_task("Marvin & Linzen", _prefixes(path, skipped), config, skipped=skipped, notes=NOTES)


def _prefixes(path: Path, skipped: Counter[str]) -> Iterator[Prefix]:
    number = 0
    for number, row in enumerate(jsonl.rows(jsonl.entry(path), EXPECTED), start=1):
        file, case, right, wrong = _fields(row, path, number)
        if not AGREEMENT.fullmatch(file):
            skipped["not subject-verb agreement"] += 1
            continue
        words, others = right.lower().split(), wrong.lower().split()
        verb = next((place for place, pair in enumerate(zip(words, others, strict=False)) if pair[0] != pair[1]), 0)
        prefix = tuple(words[:verb])
        if (head := _head(file, prefix)) is None:
            skipped["no subject before the verb"] += 1
        elif (label := int(case.startswith("plur"))) != prefix[head].endswith("s"):
            skipped["the noun's number is not the case's"] += 1
        else:
            noun = prefix[head].removesuffix("s")
            yield Prefix(words=prefix, label=label, head=head, noun=noun, template=file, kind=file)
    if not number:
        raise UsageError(f"{path} is empty: expected {EXPECTED}")


def _fields(row: dict[str, Any], path: Path, number: int) -> tuple[str, str, str, str]:
    file, case, pair = row.get("file"), row.get("case"), row.get("sents")
    if not (isinstance(file, str) and isinstance(case, str) and isinstance(pair, list) and len(pair) > 1):
        raise UsageError(f"{path}, row {number}: expected {EXPECTED}")
    if AGREEMENT.fullmatch(file) and not case.startswith(("sing", "plur")):
        raise UsageError(f"{path}, row {number}: case is {case!r}: expected sing_.. or plur_..")
    return file, case, str(pair[0]), str(pair[1])


def _head(file: str, prefix: tuple[str, ...]) -> int | None:
    """The place of the subject's head noun: the word after `the`, or the one after that in a two-word noun."""
    the = [place for place, word in enumerate(prefix) if word == "the"]
    if not the or (the[0] != 0 and not LAST_PHRASE.fullmatch(file)):
        return None
    head = (the[-1] if LAST_PHRASE.fullmatch(file) else 0) + 1
    head += head < len(prefix) and prefix[head] in COMPOUNDS
    return head if head < len(prefix) else None
