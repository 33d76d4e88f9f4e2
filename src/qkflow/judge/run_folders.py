"""The losses of all runs below a folder, from their metrics.jsonl."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from qkflow.errors import UsageError, short_repr
from qkflow.io import BAD_NPY, refuse_special_files
from qkflow.judge.loss_table import LossRow, LossTable, arrange

_METRICS = ("bits_per_byte", "eval_loss", "val_loss", "loss")
_MAX_STEP = 1e18
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
    has_documents = [d is not None for d in documents]
    if first is not None and all(d is not None and np.array_equal(d["bytes"], first["bytes"]) for d in documents):
        rows = [
            run.row._replace(where=where, loss=nats / math.log(2) / size if size else 0.0, block=str(n), weight=size)
            for run in complete
            if run.documents is not None
            for where in [str(Path(run.row.where).with_name("documents.npy"))]
            for n, (nats, size) in enumerate(zip(run.documents["nats"].tolist(), first["bytes"].tolist(), strict=True))
        ]
    else:
        rows = [run.row for run in complete]
        if any(has_documents):
            why = "hold different documents" if all(has_documents) else "are missing in some runs"
            notices.append(f"the files documents.npy {why}: the losses in metrics.jsonl are compared, without blocks")
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
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON lines ({error})") from None
    if loss is None:
        raise UsageError(f"{path} has no evaluation: expected a line with one of {', '.join(_METRICS)}")
    if not isinstance(step, int | float) or not abs(step) <= _MAX_STEP:
        raise UsageError(f"{path}: the step is {short_repr(step)}: expected a number")
    return _RunFolder(LossRow(str(path), arm, match["seed"], loss), float(step), _read_documents(run))


def _read_documents(run: Path) -> np.ndarray | None:
    """The losses of the held-out documents of a qkflow run; None if there are none."""
    path = run / "documents.npy"
    if not path.exists():
        return None
    try:
        documents = np.load(path, mmap_mode="r", allow_pickle=False)  # a header may claim more than the file holds
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error}): remove it to use metrics.jsonl") from None
    except BAD_NPY:
        reason = "it is truncated, or not a .npy file of numbers"
        raise UsageError(f"{path} cannot be read ({reason}): remove it to use metrics.jsonl") from None
    if not isinstance(documents, np.ndarray) or not {"nats", "bytes"} <= set(documents.dtype.names or ()):
        return None
    if documents.ndim != 1 or any(documents.dtype[name].kind not in "fiu" for name in ("nats", "bytes")):
        raise UsageError(
            f"{path} has shape {documents.shape} and type {short_repr(documents.dtype.descr)}: expected one number of "
            "nats and of bytes per document; remove it to use metrics.jsonl"
        )
    return np.array(documents)
