"""The losses of all runs below a folder, from their metrics.jsonl."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from qkflow.errors import UsageError
from qkflow.io import refuse_special_files
from qkflow.judge.loss_table import LossRow, LossTable, arrange

_METRICS = ("bits_per_byte", "eval_loss", "val_loss", "loss")
_SEED_NAME = re.compile(r"(?P<arm>.*?)[-_.]?(?:seed[-_=]?|s)?(?P<seed>\d+)$", re.IGNORECASE)


def read_folder(folder: Path) -> LossTable:
    """The last evaluation of every run below a folder, with the losses of its documents where all runs have them.

    The run folder gives the arm and the seed: `ARM/seed-3`, `ARM/3`, `ARM-seed-3`, `ARM_s3` or `ARM-3`.
    """
    refuse_special_files(folder)
    root = folder / "runs" if (folder / "runs").is_dir() else folder
    files = sorted(root.rglob("metrics.jsonl"))
    if not files:
        raise UsageError(f"{folder} has no runs: expected folders with metrics.jsonl, or give a CSV file")
    runs = [_read_run(root, path) for path in files]
    notices = []
    longest: dict[str, float] = {}
    for run in runs:
        longest[run.row.arm] = max(longest.get(run.row.arm, -math.inf), run.step)
    complete = [run for run in runs if run.step == longest[run.row.arm]]
    if left_out := [run for run in runs if run.step < longest[run.row.arm]]:
        names = ", ".join(f"{run.row.arm} seed {run.row.seed}" for run in left_out)
        notices.append(f"left out, because other runs of the arm are longer: {names}")
    documents = [run.documents for run in complete]
    first = documents[0]
    if first is not None and all(d is not None and np.array_equal(d["bytes"], first["bytes"]) for d in documents):
        rows = [
            run.row._replace(loss=nats / math.log(2) / size if size else 0.0, block=str(n), weight=size)
            for run in complete
            if run.documents is not None
            for n, (nats, size) in enumerate(zip(run.documents["nats"].tolist(), first["bytes"].tolist(), strict=True))
        ]
    else:
        rows = [run.row for run in complete]
    table = arrange(rows)
    return table._replace(notices=tuple(notices))


class _RunFolder(NamedTuple):
    row: LossRow
    step: float
    documents: np.ndarray | None


def _read_run(root: Path, path: Path) -> _RunFolder:
    run = path.parent
    names = run.relative_to(root).parts
    match = _SEED_NAME.fullmatch(names[-1]) if names else None
    arm = "/".join(filter(None, (*names[:-1], match["arm"]))) if match else ""
    if match is None or not arm:
        raise UsageError(f"{run}: cannot tell the arm and the seed: name run folders ARM/seed-0, ARM/seed-1, ...")
    loss = step = None
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line) if line.strip() else {}
            if record.get("kind", "eval") != "train" and (key := next((m for m in _METRICS if m in record), None)):
                loss, step = record[key], record.get("step", 0)
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} cannot be read as JSON lines ({error})") from None
    if loss is None:
        raise UsageError(f"{path} has no evaluation: expected a line with one of {', '.join(_METRICS)}")
    return _RunFolder(LossRow(str(path), arm, match["seed"], loss), float(step or 0), _read_documents(run))


def _read_documents(run: Path) -> np.ndarray | None:
    """The losses of the held-out documents of a qkflow run; None if there are none."""
    path = run / "documents.npy"
    if not path.exists():
        return None
    try:
        documents = np.load(path, allow_pickle=False)
        return documents if {"nats", "bytes"} <= set(documents.dtype.names or ()) else None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}): remove it to use metrics.jsonl") from None
