"""decisions.jsonl: a chain of checksums over everything that a study has decided."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from qkflow.errors import DiskError, UsageError
from qkflow.experiment import decisions as module
from qkflow.experiment.decisions import Decisions, Round
from qkflow.experiment.stats.verdict import Verdict

Lines = list[bytes]
RECORDS = (
    ("design", {"sha256_design": "0" * 64, "elapsed": 1.5}),
    ("rates", {"rates": {"a": 0.1, "b": 3e-3}}),
    ("round", {"round": 1, "arms": ["a", "b"], "seeds": [0, 1]}),
    ("run", {"folder": "runs/a/seed-0", "files": {"config.json": "1" * 64}, "elapsed": 2.5}),
    ("end", {"reason": "the budget is spent", "failed": [], "elapsed": 3.0}),
)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study with one record of most kinds."""
    decisions = Decisions(tmp_path)
    for kind, values in RECORDS:
        decisions.append(kind, values)
    return tmp_path


def lines(study: Path) -> Lines:
    return (study / "decisions.jsonl").read_bytes().splitlines(keepends=True)


def test_records_are_read_as_they_were_appended(study: Path) -> None:
    decisions = Decisions(study)
    assert decisions.records == [{"kind": kind, **values} for kind, values in RECORDS]
    assert decisions.rounds() == [Round(number=1, arms=("a", "b"), seeds=(0, 1))]
    assert decisions.rates() == {"a": 0.1, "b": 3e-3}
    state = decisions.state(9.0)
    assert (state.rounds, state.ended, state.elapsed, state.budget) == (0, "the budget is spent", 3.0, 9.0)
    decisions.append("budget", {"seconds": 60.0})
    assert decisions.records == Decisions(study).records
    assert (decisions.state(9.0).ended, decisions.state(9.0).budget) == (None, 60.0)


def test_a_run_that_is_recorded_after_the_end_does_not_reopen_the_study(study: Path) -> None:
    decisions = Decisions(study)
    decisions.append_discarded(Path("runs/a/seed-0"))
    assert decisions.state(None).ended == "the budget is spent"
    assert not decisions.is_recorded(Path("runs/a/seed-0"))


def test_verdicts_are_kept_by_round(study: Path) -> None:
    decisions = Decisions(study)
    first = Verdict(arm="b", kind="undecided", sentence="one", p_adjusted=0.1 + 0.2)
    second = Verdict(arm="b", kind="worse", sentence="two", round=2)
    for number, verdict in ((1, first), (2, second)):
        decisions.append_verdicts(Round(number=number, arms=("a", "b"), seeds=(number,)), (verdict,), 4.0)
    decisions = Decisions(study)
    assert [decisions.verdicts(n) for n in (0, 1, 2)] == [{}, {"b": first}, {"b": second}]
    assert decisions.verdicts() == {"b": second}
    assert decisions.judged_rounds() == 2


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda old: [*old[:1], old[1].replace(b"0.1", b"0.2"), *old[2:]], 2),
        (lambda old: [*old[:1], *old[2:]], 2),
        (lambda old: old[1:], 1),
        (lambda old: [*old[:2], old[1], *old[2:]], 3),
        (lambda old: [old[0], old[2], old[1], *old[3:]], 2),
        (lambda old: [*old, b"{}\n"], 6),
        (lambda old: [*old, b'"text"\n'], 6),
        (lambda old: [*old, b"[" * 100_000 + b"\n"], 6),
        (lambda old: [*old, b"\xff\xfe\n"], 6),
        (lambda old: [*old, b"\n"], 6),
    ],
    ids=["changed", "removed", "first removed", "inserted", "reordered", "object", "text", "nested", "bytes", "empty"],
)
def test_a_line_that_was_tampered_with_is_named(study: Path, change: Callable[[Lines], Lines], line: int) -> None:
    (study / "decisions.jsonl").write_bytes(b"".join(change(lines(study))))
    with pytest.raises(UsageError, match=rf"decisions\.jsonl, line {line} was changed") as caught:
        Decisions(study)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("unknown", {}),
        ("design", {"sha256_design": 3}),
        ("run", {"folder": "runs/a/seed-0", "files": []}),
        ("rates", {"rates": [0.1]}),
        ("round", {"round": "1", "arms": ["a"], "seeds": [0]}),
        ("round", {"round": 1, "arms": ["a"]}),
        ("verdicts", {"round": 1, "verdicts": ["better"], "elapsed": 1.0}),
        ("end", {"reason": None, "failed": [], "elapsed": 1.0}),
        ("end", {"reason": "", "failed": [], "elapsed": "soon"}),
        ("budget", {"seconds": "many"}),
    ],
)
def test_a_record_of_the_wrong_shape_is_refused_even_with_a_valid_checksum(
    tmp_path: Path, kind: str, values: dict[str, object]
) -> None:
    Decisions(tmp_path).append(kind, values)
    with pytest.raises(UsageError, match="line 1 was changed"):
        Decisions(tmp_path)


def test_seeds_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    Decisions(tmp_path).append("round", {"round": 1, "arms": ["a"], "seeds": ["../../x"]})
    with pytest.raises(UsageError, match=r"decisions\.jsonl"):
        Decisions(tmp_path).rounds()


def test_a_truncated_last_line_is_dropped_and_repaired(study: Path) -> None:
    path, whole = study / "decisions.jsonl", lines(study)
    for cut in (1, len(whole[-1]) // 2, len(whole[-1]) - 1):
        path.write_bytes(b"".join(whole[:-1]) + whole[-1][:cut])
        decisions = Decisions(study)
        assert len(decisions.records) == len(RECORDS) - 1
        assert path.read_bytes() == b"".join(whole[:-1]) + whole[-1][:cut]  # reading changes nothing
        decisions.append(*RECORDS[-1])
        assert lines(study) == whole


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_refused(study: Path, value: float) -> None:
    before = lines(study)
    with pytest.raises(ValueError, match="JSON"):
        Decisions(study).append("budget", {"seconds": value})
    assert lines(study) == before
    line = json.dumps({"kind": "budget", "seconds": value, "sha256": "0" * 64}).encode() + b"\n"
    (study / "decisions.jsonl").write_bytes(b"".join([*before, line]))
    with pytest.raises(UsageError, match="line 6"):
        Decisions(study)


def test_a_full_disk_is_an_error_that_names_the_file(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(DiskError, match=r"could not write .*decisions\.jsonl \(No space left on device\)"):
        Decisions(study).append("budget", {"seconds": 1.0})
