"""decisions.jsonl: what a study has decided, and the checksums of the files that its decisions rest on.

    {"kind": "design", ...}      the SHA-256 of design.json
    {"kind": "run", ...}         a finished run: the SHA-256 of its files; none if it is to be trained again
    {"kind": "rates", ...}       the learning rates that tuning chose
    {"kind": "round", ...}       a round begins: its arms and seeds
    {"kind": "verdicts", ...}    a round has ended: the verdicts
    {"kind": "end", ...}         no further round, and why
    {"kind": "budget", ...}      time that was added after the end

A decision is written before it is acted on, so that a resumed study makes the same ones. Every line holds the SHA-256
of its content and of the line before it. A crash can truncate only the last line, which is then dropped.
"""

from __future__ import annotations

import hashlib
import json
import os
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkflow.config import from_dict, to_dict
from qkflow.errors import DiskError, UsageError
from qkflow.experiment.stats.verdict import Verdict
from qkflow.io import checksum, write_file
from qkflow.training.run_dir import holds_run

FILE = "decisions.jsonl"
VERDICT_FILES = (
    "config.json",
    "metrics.jsonl",
    "documents.npy",
    "weights.safetensors",
    "recall.json",
    "instances.safetensors",
)
"""The files of a run folder that verdicts and reports rest on."""
_FIELDS: dict[str, dict[str, type | types.UnionType]] = {
    "design": {"sha256_design": str},
    "run": {"folder": str, "files": dict},
    "rates": {"rates": dict},
    "round": {"round": int, "arms": list, "seeds": list},
    "verdicts": {"round": int, "verdicts": list, "elapsed": int | float},
    "end": {"reason": str, "failed": list, "elapsed": int | float},
    "budget": {"seconds": int | float},
}
"""The fields of each kind of record. Records may also have `elapsed`: the seconds that the study has taken."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round of a study: new seeds for the baseline and for the arms that are still open."""

    number: int
    """Counted from 1."""
    arms: tuple[str, ...]
    """The baseline and the open arms."""
    seeds: tuple[int, ...]
    """The new seeds."""

    def __post_init__(self) -> None:
        if self.number < 1 or not self.arms or not self.seeds:
            raise UsageError(f"a round needs a number from 1, arms and seeds, got {self}")


@dataclass(frozen=True, kw_only=True)
class StudyState:
    """How far a study is."""

    rounds: int
    """Rounds that have been judged."""
    ended: str | None
    """Why no further round starts; None if the study is still running, or was interrupted."""
    elapsed: float
    """Seconds that it has taken."""
    budget: float | None
    """Seconds that it may take; None if there is no limit."""


class Decisions:
    """The records of a study's decisions.jsonl; raises `UsageError` if it was changed by hand."""

    def __init__(self, study: Path) -> None:
        self.path = study / FILE
        self.records: list[dict[str, Any]] = []
        self._last = ""
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            self._read(line, number)
        self._truncated = len(whole) < len(content)

    def append(self, kind: str, values: Mapping[str, Any]) -> None:
        """Write a decision to disk."""
        if self._truncated:
            content = self.path.read_bytes()
            write_file(self.path, content[: content.rfind(b"\n") + 1])
            self._truncated = False
        record = {"kind": kind, **values}
        digest = _digest(record, self._last)
        line = json.dumps({**record, "sha256": digest}, sort_keys=True, allow_nan=False).encode() + b"\n"
        try:
            with open(self.path, "ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DiskError(error.errno, f"could not write {self.path} ({error.strerror})") from error
        self.records.append(json.loads(json.dumps(record)))  # as it will be read
        self._last = digest

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind, in order."""
        return [record for record in self.records if record["kind"] == kind]

    def rounds(self) -> list[Round]:
        """The rounds that have begun."""
        where = f" of {self.path}"
        return [
            from_dict(Round, {"number": record["round"], "arms": record["arms"], "seeds": record["seeds"]}, where=where)
            for record in self.of_kind("round")
        ]

    def rates(self) -> dict[str, float]:
        """The learning rates that tuning chose, by arm; empty if it has not ended, or there is none."""
        recorded = self.of_kind("rates")
        return dict(recorded[-1]["rates"]) if recorded else {}

    def judged_rounds(self) -> int:
        """The number of rounds whose verdicts are written."""
        return len(self.of_kind("verdicts"))

    def verdicts(self, round: int | None = None) -> dict[str, Verdict]:
        """The verdicts of a judged round, by default of the last one, by arm; empty for round 0."""
        judged = self.of_kind("verdicts")[:round]
        verdicts = [from_dict(Verdict, v, where=f" of {self.path}") for v in (judged[-1]["verdicts"] if judged else [])]
        return {verdict.arm: verdict for verdict in verdicts}

    def last_decision(self) -> dict[str, Any]:
        """The last record that is not about a run; empty if there is none."""
        return next((record for record in reversed(self.records) if record["kind"] != "run"), {})

    def state(self, budget: float | None) -> StudyState:
        """How far the study is; `budget` is that of its design."""
        elapsed = [float(record["elapsed"]) for record in self.records if "elapsed" in record]
        added = self.of_kind("budget")
        last = self.last_decision()
        return StudyState(
            rounds=self.judged_rounds(),
            ended=last["reason"] if last.get("kind") == "end" else None,
            elapsed=elapsed[-1] if elapsed else 0.0,
            budget=float(added[-1]["seconds"]) if added else budget,
        )

    def append_design(self, elapsed: float) -> None:
        """Write the checksum of the study's design.json, and the seconds that it took to make."""
        digest = checksum(self.path.with_name("design.json"))
        self.append("design", {"sha256_design": digest, "elapsed": elapsed})

    def append_verdicts(self, round_: Round, verdicts: tuple[Verdict, ...], elapsed: float) -> None:
        """Write the verdicts of a round, and the seconds that the study has taken."""
        values = {"round": round_.number, "verdicts": [to_dict(verdict) for verdict in verdicts], "elapsed": elapsed}
        self.append("verdicts", values)

    def append_run(self, study: Path, folder: Path, elapsed: float) -> None:
        """Write the checksums of a finished run, and the seconds that the study has taken."""
        files = run_checksums(study / folder)
        self.append("run", {"folder": folder.as_posix(), "files": files, "elapsed": elapsed})

    def append_discarded(self, folder: Path) -> None:
        """Write that a run is to be trained again."""
        self.append("run", {"folder": folder.as_posix(), "files": {}})

    def changed_file(self, study: Path, folder: Path) -> Path | None:
        """The first file of a finished run that has changed since it was recorded; None if there is none."""
        if not (files := self._files(folder)):
            return None
        current = run_checksums(study / folder)
        return next(
            (folder / name for name in sorted({*files, *current}) if files.get(name) != current.get(name)), None
        )

    def is_recorded(self, folder: Path) -> bool:
        """Whether the checksums of a run are written."""
        return bool(self._files(folder))

    def _files(self, folder: Path) -> dict[str, str]:
        """The checksums of a run, by file; empty if it is not finished."""
        recorded = [record["files"] for record in self.of_kind("run") if record["folder"] == folder.as_posix()]
        return recorded[-1] if recorded else {}

    def _read(self, line: bytes, number: int) -> None:
        try:
            record = json.loads(line)
            digest = record.pop("sha256")
            is_valid = digest == _digest(record, self._last) and _has_fields(record)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            is_valid, record, digest = False, {}, ""
        if not is_valid:
            raise UsageError(
                f"{self.path}, line {number} was changed after it was written: restore the file from a copy, or start "
                "a new study"
            )
        self.records.append(record)
        self._last = digest


def run_checksums(folder: Path) -> dict[str, str]:
    """The SHA-256 of the files of a run that verdicts rest on."""
    if not holds_run(folder):
        return {}
    return {name: checksum(folder / name) for name in VERDICT_FILES if (folder / name).is_file()}


def _has_fields(record: Mapping[str, Any]) -> bool:
    expected = {**_FIELDS[record["kind"]], **({"elapsed": int | float} if "elapsed" in record else {})}
    has_types = all(isinstance(record.get(name), kind) for name, kind in expected.items())
    has_types &= all(isinstance(verdict, dict) for verdict in record.get("verdicts", []))
    return has_types and all(isinstance(rate, int | float) for rate in record.get("rates", {}).values())


def _digest(record: Mapping[str, Any], previous: str) -> str:
    content = json.dumps(record, sort_keys=True, allow_nan=False)
    return hashlib.sha256(f"{previous}\n{content}".encode()).hexdigest()
