"""BLiMP's agreement sets: from an archive or a folder, with the subject's noun as rationale."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from qkflow.data.tasks import Task, TaskConfig
from qkflow.data.tasks.blimp import PLURALS, RELATIONAL, RELATIVE, SUBJECTS, blimp
from qkflow.errors import UsageError

NOUNS = [("girl", "girls"), ("lady", "ladies"), ("waiter", "waiters"), ("child", "children"), ("driver", "drivers")]


def sets() -> dict[str, list[tuple[str, str]]]:
    """Pairs of a sentence and its wrong twin, by set."""
    made: dict[str, list[tuple[str, str]]] = {RELATIONAL: [], RELATIVE: [], PLURALS[1]: [], SUBJECTS[0]: []}
    for one, many in NOUNS:
        made[RELATIONAL] += [(f"A {one} of all men hasn't left.", f"A {one} of all men haven't left.")]
        made[RELATIONAL] += [(f"A lot of {many} of Bob press on.", f"A lot of {many} of Bob presses on.")]
        made[RELATIVE] += [(f"That {one} that saw men is old.", f"That {one} that saw men are old.")]
        made[RELATIVE] += [(f"{many} who saw Bob do sit.".capitalize(), f"{many} who saw Bob does sit.".capitalize())]
        made[PLURALS[1]] += [(f"Every {one} wasn't late.", f"Every {one} aren't late.")]
        made[PLURALS[1]] += [(f"The old {many} sing.", f"The old {many} sings.")]
    made[PLURALS[1]] += [("Paula sings.", "Paula sing.")]
    made[SUBJECTS[0]] += [("The women meet.", "The woman meet.")]
    return made


def lines(pairs: list[tuple[str, str]]) -> str:
    return "".join(json.dumps({"sentence_good": good, "sentence_bad": bad}) + "\n" for good, bad in pairs)


def archive(path: Path, made: dict[str, list[tuple[str, str]]]) -> Path:
    with tarfile.open(path, "w:xz") as tar:
        for name, pairs in made.items():
            data = lines(pairs).encode()
            member = tarfile.TarInfo(f"blimp/{name}.jsonl")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def read(task: Task) -> dict[str, tuple[str, str]]:
    found = {}
    for one in (*task.train, *task.validation, *task.test):
        words = [task.words[token] for token in one.tokens]
        found[" ".join(words)] = (words[one.rationale[0]], task.classes[one.label])
    return found


def test_the_subject_is_the_rationale_and_the_verb_gives_the_number(tmp_path: Path) -> None:
    task = blimp(archive(tmp_path / "blimp.tar.xz", sets()), TaskConfig())
    found = read(task)
    assert len(found) == 6 * len(NOUNS)
    assert found["a lady of all men"] == ("lady", "singular")
    assert found["a lot of ladies of bob"] == ("ladies", "plural")
    assert found["that lady that saw men"] == ("lady", "singular")
    assert found["children who saw bob"] == ("children", "plural")
    assert found["every child"] == ("child", "singular")
    assert found["the old children"] == ("children", "plural")
    assert task.skipped == {
        "the subjects differ, not the verbs": 1,
        "the subject is the only word before the verb": 1,
    }


def test_a_folder_reads_as_its_archive(tmp_path: Path) -> None:
    folder = tmp_path / "blimp"
    folder.mkdir()
    for name, pairs in sets().items():
        (folder / f"{name}.jsonl").write_text(lines(pairs))
    (folder / "wh_island.jsonl").write_text("not even JSON")
    assert blimp(folder, TaskConfig()).digest == blimp(archive(tmp_path / "b.tar.xz", sets()), TaskConfig()).digest


def test_a_mistake_of_the_set_is_outvoted_and_counted(tmp_path: Path) -> None:
    made = sets()
    made[PLURALS[1]].append(("Some ladies sings.", "Some ladies sing."))
    task = blimp(archive(tmp_path / "blimp.tar.xz", made), TaskConfig())
    assert task.skipped["the verb contradicts the noun's other sentences"] == 1
    assert len(read(task)) == 6 * len(NOUNS)


def test_what_is_not_blimp_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "torn.tar").write_bytes(b"nothing")
    (tmp_path / "folder").mkdir()
    (tmp_path / f"{RELATIVE}.jsonl").write_text('{"sentence_good": 1}')
    for name, message in (
        ("torn.tar", "is damaged or no archive"),
        ("folder", "has none of the sets"),
        (f"{RELATIVE}.jsonl", "row 1: expected BLiMP"),
    ):
        with pytest.raises(UsageError, match=message) as error:
            blimp(tmp_path / name, TaskConfig())
        assert "\n" not in str(error.value)
