"""Marvin & Linzen's pairs: the beginning, its number, and the head noun of the tested subject."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qkflow.data.tasks import Instance, Task, TaskConfig
from qkflow.data.tasks.marvin_linzen import marvin_linzen
from qkflow.errors import UsageError

MAIN = ["author", "pilot", "surgeon", "farmer", "manager", "customer", "officer", "teacher", "senator", "consultant"]
OTHER = ["security guard", "chef", "taxi driver"]


def pair(file: str, plural: bool, beginning: str, *, others: str = "") -> dict[str, Any]:
    right, wrong = ("are", "is") if plural else ("is", "are")
    case = f"{'plur' if plural else 'sing'}_MS_MV{others}"
    return {"file": file, "case": case, "sents": [f"{beginning} {right} tall", f"{beginning} {wrong} tall"]}


def few() -> list[dict[str, Any]]:
    """Three templates with ten nouns each: enough to split."""
    rows = []
    for noun in MAIN:
        for plural in (False, True):
            subject = f"the {noun}{'s' * plural}"
            rows.append(pair("simple_agrmt", plural, subject))
            for other in OTHER:
                rows.append(pair("prep_anim", plural, f"{subject} next to the {other}s", others="_plur_ES"))
                rows.append(pair("subj_rel", plural, f"{subject} that like{'s' * (not plural)} the {other}"))
    return rows


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[list[dict[str, Any]]], Path]:
    def write(rows: list[dict[str, Any]]) -> Path:
        path = tmp_path / "pairs.jsonl.xz"
        path.write_bytes(lzma.compress("\n".join(json.dumps(row) for row in rows).encode()))
        return path

    return write


Stored = Callable[[list[dict[str, Any]]], Path]


def found(task: Task, kind: str) -> tuple[str, str, str]:
    """The text of the only instance of a kind, its label and the word of its rationale."""
    (one,) = [one for one in (*task.train, *task.validation, *task.test) if one.kind == kind]
    words = [task.words[token] for token in one.tokens]
    return " ".join(words), task.classes[one.label], words[one.rationale[0]]


@pytest.mark.parametrize(
    ("file", "case", "beginning", "head"),
    [
        ("sent_comp", "sing", "the bankers said the taxi driver", "driver"),
        ("prep_inanim", "plur", "the television shows from the author", "shows"),
        ("obj_rel_across_anim", "sing", "the chef that the authors like", "chef"),
        ("obj_rel_no_comp_across_inanim", "plur", "the shows the author likes", "shows"),
        ("obj_rel_within_anim", "plur", "the author that the security guards", "guards"),
        ("obj_rel_no_comp_within_inanim", "sing", "the shows the taxi driver", "driver"),
        ("vp_coord", "sing", "the chef swims and", "chef"),
        ("long_vp_coord", "plur", "the chefs like to watch television shows and", "chefs"),
    ],
)
def test_the_head_noun_is_found_in_every_template(
    stored: Stored, file: str, case: str, beginning: str, head: str
) -> None:
    row = pair(file, case == "plur", beginning)
    # Twice more in a file that is counted for its words only: a word is known when training texts have it twice.
    task = marvin_linzen(stored([row, *few(), *spread(beginning)]), TaskConfig())
    text, label, noun = found(task, file)
    assert (text, label, noun) == (beginning, {"sing": "singular", "plur": "plural"}[case], head)


def spread(beginning: str) -> list[dict[str, Any]]:
    """Training sentences with the words of a beginning, in a template with one noun only, which is never held out."""
    return [pair("subj_rel", False, f"the reader that {beginning} {word}") for word in ("a", "b")]


def test_no_template_with_its_noun_is_in_two_parts(stored: Stored) -> None:
    task = marvin_linzen(stored(few()), TaskConfig())

    def pairs(part: tuple[Instance, ...]) -> set[tuple[str, str]]:
        return {(one.kind, task.words[one.tokens[one.rationale[0]]].removesuffix("s")) for one in part}

    assert not pairs(task.train) & pairs(task.test)
    assert not pairs(task.train) & pairs(task.validation)
    assert not pairs(task.validation) & pairs(task.test)
    assert len(pairs(task.train)) + len(pairs(task.validation)) + len(pairs(task.test)) == 30


def test_verbs_do_not_multiply_instances_and_other_files_are_counted(stored: Stored) -> None:
    npi = {"file": "simple_npi_anim", "case": "past", "sents": ["no one ever", "one ever", "some one ever"]}
    reflexive = {
        "file": "reflexives_across",
        "case": "sing_MS_ANPHR",
        "sents": ["he hurt himself", "he hurt themselves"],
    }
    other = [{**row, "sents": [f"{one} indeed" for one in row["sents"]]} for row in few()]
    task = marvin_linzen(stored([*few(), *other, npi, reflexive]), TaskConfig())
    assert task.skipped == {"not subject-verb agreement": 2, "repeated beginnings": len(few())}
    assert len(task.train) + len(task.validation) + len(task.test) == len(few())


def test_a_noun_against_its_case_is_skipped(stored: Stored) -> None:
    wrong = pair("simple_agrmt", True, "the author")
    early = {"file": "simple_agrmt", "case": "sing", "sents": ["an author is", "authors are"]}
    task = marvin_linzen(stored([*few(), wrong, early]), TaskConfig())
    assert task.skipped == {"the noun's number is not the case's": 1, "no subject before the verb": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("[1, 2]", "line 1, is not an object"),
        ("{broken", r"line 1, is not JSON \(Expecting property name"),
        ('{"file": "a"}', "row 1: expected lines like"),
        ('{"file": "prep_anim", "case": "dual", "sents": ["a", "b"]}', "case is 'dual': expected sing_.. or plur_.."),
    ],
)
def test_a_file_of_another_format_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as error:
        marvin_linzen(path, TaskConfig())
    assert "\n" not in str(error.value)
