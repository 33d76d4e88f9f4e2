"""BLiMP's agreement sets, from an archive or a folder."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from qkflow.data.tasks import Task, TaskConfig
from qkflow.data.tasks.blimp import PLURALS, RELATIONAL, RELATIVE, SKIPPED_SETS, blimp
from qkflow.errors import UsageError

NOUNS = [("girl", "girls"), ("lady", "ladies"), ("waiter", "waiters"), ("child", "children"), ("driver", "drivers")]


def sets() -> dict[str, list[tuple[str, str]]]:
    """Return pairs of a right and a wrong sentence, by set."""
    pairs: dict[str, list[tuple[str, str]]] = {RELATIONAL: [], RELATIVE: [], PLURALS[1]: [], SKIPPED_SETS[0]: []}
    for singular, plural in NOUNS:
        pairs[RELATIONAL] += [(f"A {singular} of all men hasn't left.", f"A {singular} of all men haven't left.")]
        pairs[RELATIONAL] += [(f"A lot of {plural} of Bob press on.", f"A lot of {plural} of Bob presses on.")]
        pairs[RELATIVE] += [(f"That {singular} that saw men is old.", f"That {singular} that saw men are old.")]
        pairs[RELATIVE] += [
            (f"{plural} who saw Bob do sit.".capitalize(), f"{plural} who saw Bob does sit.".capitalize())
        ]
        pairs[PLURALS[1]] += [(f"Every {singular} wasn't late.", f"Every {singular} aren't late.")]
        pairs[PLURALS[1]] += [(f"The old {plural} sing.", f"The old {plural} sings.")]
    pairs[PLURALS[1]] += [("Paula sings.", "Paula sing.")]
    pairs[SKIPPED_SETS[0]] += [("The women meet.", "The woman meet.")]
    return pairs


def lines(pairs: list[tuple[str, str]]) -> str:
    return "".join(json.dumps({"sentence_good": good, "sentence_bad": bad}) + "\n" for good, bad in pairs)


def write_archive(path: Path, sets: dict[str, list[tuple[str, str]]]) -> Path:
    with tarfile.open(path, "w:xz") as tar:
        for name, pairs in sets.items():
            data = lines(pairs).encode()
            member = tarfile.TarInfo(f"blimp/{name}.jsonl")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def read(task: Task) -> dict[str, tuple[str, str]]:
    prefixes = {}
    for instance in (*task.train, *task.validation, *task.test):
        words = [task.words[token] for token in instance.tokens]
        prefixes[" ".join(words)] = (words[instance.rationale[0]], task.classes[instance.label])
    return prefixes


def test_rationale_is_the_subject_and_label_the_number_of_the_verb(tmp_path: Path) -> None:
    task = blimp(write_archive(tmp_path / "blimp.tar.xz", sets()), TaskConfig())
    prefixes = read(task)
    assert len(prefixes) == 6 * len(NOUNS)
    assert prefixes["a lady of all men"] == ("lady", "singular")
    assert prefixes["a lot of ladies of bob"] == ("ladies", "plural")
    assert prefixes["that lady that saw men"] == ("lady", "singular")
    assert prefixes["children who saw bob"] == ("children", "plural")
    assert prefixes["every child"] == ("child", "singular")
    assert prefixes["the old children"] == ("children", "plural")
    assert task.skipped == {
        "the subjects differ, not the verbs": 1,
        "the subject is the only word before the verb": 1,
    }


def test_folder_and_archive_are_equivalent(tmp_path: Path) -> None:
    folder = tmp_path / "blimp"
    folder.mkdir()
    for name, pairs in sets().items():
        (folder / f"{name}.jsonl").write_text(lines(pairs))
    (folder / "wh_island.jsonl").write_text("not even JSON")
    assert (
        blimp(folder, TaskConfig()).digest == blimp(write_archive(tmp_path / "b.tar.xz", sets()), TaskConfig()).digest
    )


def test_inconsistent_sentences_are_skipped_and_counted(tmp_path: Path) -> None:
    pairs = sets()
    pairs[PLURALS[1]].append(("Some ladies sings.", "Some ladies sing."))
    task = blimp(write_archive(tmp_path / "blimp.tar.xz", pairs), TaskConfig())
    assert task.skipped["the verb contradicts the noun's other sentences"] == 1
    assert len(read(task)) == 6 * len(NOUNS)


def test_invalid_files_raise_one_line_errors(tmp_path: Path) -> None:
    (tmp_path / "damaged.tar").write_bytes(b"nothing")
    (tmp_path / "folder").mkdir()
    (tmp_path / f"{RELATIVE}.jsonl").write_text('{"sentence_good": 1}')
    for name, message in (
        ("damaged.tar", "is damaged or not an archive"),
        ("folder", "contains none of the sets"),
        (f"{RELATIVE}.jsonl", "line 1: expected BLiMP"),
    ):
        with pytest.raises(UsageError, match=message) as error:
            blimp(tmp_path / name, TaskConfig())
        assert "\n" not in str(error.value)
