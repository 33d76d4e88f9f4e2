"""Open a task by name: generated tasks, or a reader for the given files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from qkflow.data.tasks import blimp, hatexplain, squad, squad_entities, sst2
from qkflow.data.tasks.agreement import agreement
from qkflow.data.tasks.base import Task, TaskConfig
from qkflow.data.tasks.marvin_linzen import marvin_linzen
from qkflow.data.tasks.synthetic import synthetic
from qkflow.data.text import reading
from qkflow.errors import UsageError
from qkflow.io import refuse_special_files

EXPECTED_PAIRS = "Marvin & Linzen's pairs (.jsonl, .jsonl.xz) or BLiMP (.tar.xz or its folder)"
ARCHIVES = (".tar", ".tar.xz", ".tar.gz", ".tar.bz2", ".tgz", ".txz", ".zip")

_READERS: dict[str, tuple[Callable[[Path, TaskConfig], Task], str]] = {
    "hatexplain": (hatexplain.hatexplain, hatexplain.EXPECTED),
    "squad": (squad.squad, squad.EXPECTED),
    "squad-entities": (squad_entities.squad_entities, squad.EXPECTED),
    "sst2": (sst2.sst2, sst2.EXPECTED),
}
"""For each task that reads files: its reader, and what it expects."""


def open_task(config: TaskConfig) -> Task:
    """Read or generate the task that a config names.

    >>> open_task(TaskConfig(name="agreement", train=50, test=10)).name
    'agreement (built-in grammar)'
    """
    if config.name == "agreement":
        return agreement(config) if config.data is None else _read_agreement(config)
    if config.name == "synthetic":
        return synthetic(config)
    read, expected = _READERS[config.name]
    return read(data_path(config, expected), config)


def data_path(config: TaskConfig, expected: str) -> Path:
    """Return the path of a task's data; raise a `UsageError` that describes the expected data if there is none."""
    if config.data is None:
        raise UsageError(f"the task {config.name} needs data: set --data to the path of {expected}")
    if not (path := Path(config.data).expanduser()).exists():
        raise UsageError(f"no file or folder {config.data}: set --data to the path of {expected}")
    if not path.is_dir():
        refuse_special_files(path)
    return path


def _read_agreement(config: TaskConfig) -> Task:
    path = data_path(config, EXPECTED_PAIRS)
    if path.is_dir():
        jsonl = reading.list_files(path, lambda file: reading.content_suffix(file.label) == ".jsonl")
        if any(Path(reading.strip_compression(file.name)).stem in blimp.SETS for file in jsonl):
            return blimp.blimp(path, config)
        candidates = reading.files_with_suffix(path, ".jsonl") + reading.files_with_suffix(path, ".tar")
        if len(candidates) != 1:
            names = ", ".join(file.name for file in candidates)
            problem = f"contains several files ({names}): choose one" if candidates else "contains no such file"
            raise UsageError(f"{path} {problem}; set --data to the path of {EXPECTED_PAIRS}")
        path = candidates[0]
    if path.name.endswith(ARCHIVES) or "sentence_good" in (first := _first_row(path)):
        return blimp.blimp(path, config)
    if "sents" not in first:
        raise UsageError(
            f"the first line of {path} has neither `sents` nor `sentence_good`: "
            f"set --data to the path of {EXPECTED_PAIRS}"
        )
    return marvin_linzen(path, config)


def _first_row(path: Path) -> dict[str, Any]:
    for location, row in reading.iter_json_lines(reading.text_file(path), EXPECTED_PAIRS):
        if not isinstance(row, dict):
            raise UsageError(f"{location} is not a JSON object: expected {EXPECTED_PAIRS}")
        return row
    raise UsageError(f"{path} is empty: set --data to the path of {EXPECTED_PAIRS}")
