"""Marvin & Linzen's pairs: prefix, number, and head noun of the tested subject."""

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


def pair(file: str, plural: bool, prefix: str, *, others: str = "") -> dict[str, Any]:
    right, wrong = ("are", "is") if plural else ("is", "are")
    case = f"{'plur' if plural else 'sing'}_MS_MV{others}"
    return {"file": file, "case": case, "sents": [f"{prefix} {right} tall", f"{prefix} {wrong} tall"]}


def small_set() -> list[dict[str, Any]]:
    """Return three templates with ten nouns each, enough to split."""
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
def write_rows(tmp_path: Path) -> Callable[[list[dict[str, Any]]], Path]:
    def write(rows: list[dict[str, Any]]) -> Path:
        path = tmp_path / "pairs.jsonl.xz"
        path.write_bytes(lzma.compress("\n".join(json.dumps(row) for row in rows).encode()))
        return path

    return write


Writer = Callable[[list[dict[str, Any]]], Path]


def only_instance(task: Task, kind: str) -> tuple[str, str, str]:
    """Return the text, label and rationale of the only instance of a kind."""
    (instance,) = [instance for instance in (*task.train, *task.validation, *task.test) if instance.kind == kind]
    words = [task.words[token] for token in instance.tokens]
    return " ".join(words), task.classes[instance.label], words[instance.rationale[0]]


@pytest.mark.parametrize(
    ("file", "case", "prefix", "head"),
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
def test_head_noun_is_found_in_every_template(write_rows: Writer, file: str, case: str, prefix: str, head: str) -> None:
    row = pair(file, case == "plur", prefix)
    # Add training sentences with the same words: a word is in the vocabulary if it occurs twice in training.
    task = marvin_linzen(write_rows([row, *small_set(), *sentences_with(prefix)]), TaskConfig())
    text, label, noun = only_instance(task, file)
    assert (text, label, noun) == (prefix, {"sing": "singular", "plur": "plural"}[case], head)


def sentences_with(prefix: str) -> list[dict[str, Any]]:
    """Return training sentences with the words of a prefix; their only noun is never held out."""
    return [pair("subj_rel", False, f"the reader that {prefix} {word}") for word in ("a", "b")]


def test_template_noun_pairs_are_in_one_split(write_rows: Writer) -> None:
    task = marvin_linzen(write_rows(small_set()), TaskConfig())

    def pairs(instances: tuple[Instance, ...]) -> set[tuple[str, str]]:
        return {
            (instance.kind, task.words[instance.tokens[instance.rationale[0]]].removesuffix("s"))
            for instance in instances
        }

    assert not pairs(task.train) & pairs(task.test)
    assert not pairs(task.train) & pairs(task.validation)
    assert not pairs(task.validation) & pairs(task.test)
    assert len(pairs(task.train)) + len(pairs(task.validation)) + len(pairs(task.test)) == 30


def test_repeated_prefixes_and_other_phenomena_are_counted(write_rows: Writer) -> None:
    npi = {"file": "simple_npi_anim", "case": "past", "sents": ["no one ever", "one ever", "some one ever"]}
    reflexive = {
        "file": "reflexives_across",
        "case": "sing_MS_ANPHR",
        "sents": ["he hurt himself", "he hurt themselves"],
    }
    other = [{**row, "sents": [f"{sentence} indeed" for sentence in row["sents"]]} for row in small_set()]
    task = marvin_linzen(write_rows([*small_set(), *other, npi, reflexive]), TaskConfig())
    assert task.skipped == {"not subject-verb agreement": 2, "repeated prefixes": len(small_set())}
    assert len(task.train) + len(task.validation) + len(task.test) == len(small_set())


def test_noun_that_contradicts_the_case_is_skipped(write_rows: Writer) -> None:
    wrong = pair("simple_agrmt", True, "the author")
    early = {"file": "simple_agrmt", "case": "sing", "sents": ["an author is", "authors are"]}
    task = marvin_linzen(write_rows([*small_set(), wrong, early]), TaskConfig())
    assert task.skipped == {"the noun's number differs from the case": 1, "no subject before the verb": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("[1, 2]", "line 1: expected Marvin"),
        ("{broken", r"line 1 is not valid JSON \(Expecting property name"),
        ('{"file": "a"}', "line 1: expected Marvin"),
        ('{"file": "prep_anim", "case": "dual", "sents": ["a", "b"]}', "case must start with sing or plur, got 'dual'"),
    ],
)
def test_invalid_file_raises_one_line_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as error:
        marvin_linzen(path, TaskConfig())
    assert "\n" not in str(error.value)
