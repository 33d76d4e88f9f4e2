"""Subject-verb agreement by Marvin & Linzen (2018, "Targeted syntactic evaluation of language models").

Each line of the file is a minimal pair that differs in the verb:

    {"file": "prep_anim", "case": "sing_MS_MV_plur_ES",
     "sents": ["the author next to the guards is tall", "the author next to the guards are tall"]}

The shared prefix is the text, and the first number in `case` is the label. The tested subject is the first noun phrase
of the sentence, except in `sent_comp` ("the bankers said the author") and inside an object relative clause
(`obj_rel_*within*`: "the author that the guards"), where it is the last noun phrase of the prefix.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qkflow.data.tasks.base import Task, TaskConfig
from qkflow.data.tasks.prefixes import Prefix, prefix_task, verb_position
from qkflow.data.text.reading import iter_json_lines, text_file
from qkflow.errors import UsageError

EXPECTED = 'Marvin & Linzen\'s .jsonl file, with lines like {"file": .., "case": "sing_..", "sents": [right, wrong]}'
AGREEMENT = re.compile(r"simple_agrmt|sent_comp|subj_rel|prep_.*|obj_rel_.*|(long_)?vp_coord")
SUBJECT_IS_LAST = re.compile(r"sent_comp|obj_rel_.*within.*")
COMPOUNDS = frozenset({"security", "taxi", "television"})
"""First words of two-word nouns such as `security guard`."""
NOTES = (
    "rationale: the head noun of the tested subject, found from the template",
    "in (long_)vp_coord the first verb also shows the number, so attention away from the noun can be right as well",
    "television show and show count as one noun",
)


def marvin_linzen(path: Path, config: TaskConfig) -> Task:
    """Read a .jsonl file (also .xz, .gz, .bz2): one instance per distinct sentence prefix.

    >>> import json, tempfile
    >>> pair = {"file": "simple_agrmt", "case": "sing_MS_MV", "sents": ["the author is", "the author are"]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "pairs.jsonl").write_text(json.dumps(pair))
    ...     marvin_linzen(Path(folder) / "pairs.jsonl", TaskConfig())
    Traceback (most recent call last):
    qkflow.errors.UsageError: Marvin & Linzen: 1 sentences with 1 subject nouns in 1 templates are too few: ...
    """
    skipped = Counter[str]()
    return prefix_task("Marvin & Linzen", _prefixes(path, skipped), config, skipped=skipped, notes=NOTES)


def _prefixes(path: Path, skipped: Counter[str]) -> Iterator[Prefix]:
    is_empty = True
    for location, row in iter_json_lines(text_file(path), EXPECTED):
        is_empty = False
        file, case, right, wrong = _parse_row(row, location)
        if not AGREEMENT.fullmatch(file):
            skipped["not subject-verb agreement"] += 1
            continue
        words = right.lower().split()
        prefix = tuple(words[: verb_position(words, wrong.lower().split())])
        if (head := _head_position(file, prefix)) is None:
            skipped["no subject before the verb"] += 1
        elif (label := int(case.startswith("plur"))) != prefix[head].endswith("s"):
            skipped["the noun's number differs from the case"] += 1
        else:
            noun = prefix[head].removesuffix("s")
            yield Prefix(words=prefix, label=label, head=head, noun=noun, template=file, kind=file)
    if is_empty:
        raise UsageError(f"{path} is empty: expected {EXPECTED}")


def _parse_row(row: Any, location: str) -> tuple[str, str, str, str]:
    match row:
        case {"file": str(file), "case": str(case), "sents": [right, wrong, *_]}:
            pass
        case _:
            raise UsageError(f"{location}: expected {EXPECTED}")
    if AGREEMENT.fullmatch(file) and not case.startswith(("sing", "plur")):
        raise UsageError(f"{location}: case must start with sing or plur, got {case!r}")
    return file, case, str(right), str(wrong)


def _head_position(file: str, prefix: tuple[str, ...]) -> int | None:
    """Return the position of the subject's head noun: after `the`, or one further in a two-word noun."""
    articles = [position for position, word in enumerate(prefix) if word == "the"]
    if not articles or (articles[0] != 0 and not SUBJECT_IS_LAST.fullmatch(file)):
        return None
    head = (articles[-1] if SUBJECT_IS_LAST.fullmatch(file) else 0) + 1
    head += head < len(prefix) and prefix[head] in COMPOUNDS
    return head if head < len(prefix) else None
