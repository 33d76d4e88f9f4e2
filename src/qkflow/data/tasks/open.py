"""A task from its name: the built-in ones, or a reader for the files that were given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qkflow.data.tasks import jsonl
from qkflow.data.tasks.base import Task, TaskConfig, existing
from qkflow.data.text import reading
from qkflow.data.text.reading import Entry
from qkflow.errors import UsageError

PAIRS = "Marvin & Linzen's pairs (.jsonl, .jsonl.xz) or BLiMP (.tar.xz or its folder)"

ARCHIVES = (".tar", ".tar.xz", ".tar.gz", ".tar.bz2", ".tgz", ".txz", ".zip")


def open_task(config: TaskConfig) -> Task:
    """Read or make the task that a config names.

    >>> open_task(TaskConfig(name="agreement", train=50, test=10)).name
    'agreement (built-in grammar)'
    """
    if config.name == "synthetic":
        from qkflow.data.tasks.synthetic import synthetic

        return synthetic(config)
    if config.name == "agreement":
        return _agreement(config)
    if config.name == "squad":
        from qkflow.data.tasks import squad

        return squad.squad(existing(config.data, "squad", squad.EXPECTED), config)
    from qkflow.data.tasks import hatexplain

    return hatexplain.hatexplain(existing(config.data, "hatexplain", hatexplain.EXPECTED), config)


def _agreement(config: TaskConfig) -> Task:
    from qkflow.data.tasks import agreement, blimp, marvin_linzen

    if config.data is None:
        return agreement.agreement(config)
    path = existing(config.data, "agreement", PAIRS)
    if path.is_dir():
        if any(Path(reading.bare(file.name)).stem in blimp.SETS for file in reading.files(path, _lines)):
            return blimp.blimp(path, config)
        found = [*jsonl.files(path, ".jsonl"), *jsonl.files(path, ".tar")]
        if len(found) != 1:
            what = f"holds {', '.join(one.name for one in found)}: name one" if found else "holds neither"
            raise UsageError(f"{path} {what}: give --data PATH, {PAIRS}")
        path = found[0]
    if path.name.endswith(ARCHIVES) or "sentence_good" in (first := _first(path)):
        return blimp.blimp(path, config)
    if "sents" not in first:
        raise UsageError(f"{path} has neither sents nor sentence_good in its first line: give --data PATH, {PAIRS}")
    return marvin_linzen.marvin_linzen(path, config)


def _lines(entry: Entry) -> bool:
    return reading.ending(entry.label) == ".jsonl"


def _first(path: Path) -> dict[str, Any]:
    first = next(jsonl.rows(jsonl.entry(path), PAIRS), None)
    if first is None:
        raise UsageError(f"{path} is empty: give --data PATH, {PAIRS}")
    return first
