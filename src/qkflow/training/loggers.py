"""Callbacks that copy the records of metrics.jsonl to CSV or TensorBoard files in the run folder.

metrics.jsonl is correct after a crash at any instant: a resumed run removes the records after its checkpoint. A logger
therefore reads the records from there, and each session first writes the log again from the first record, so that no
record is missing or appears twice.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from qkflow.errors import UsageError, unknown
from qkflow.io import disk_errors, write_file
from qkflow.training.callbacks import Callback, Result, Run
from qkflow.training.metrics import MetricsReader

Record = Mapping[str, Any]


class Logger(Callback):
    """Base class for loggers: calls `begin` with all records at the start of a session, then `append` with new ones."""

    folder: Path

    def write(self, folder: Path) -> None:
        """Write the log of a run folder, also of a finished run, and replace an earlier log."""
        self.folder = folder
        self._reader = MetricsReader(folder / "metrics.jsonl")
        self.begin(self._reader.read())

    def begin(self, records: Sequence[Record]) -> None:
        """Replace the log by one with these records."""
        raise NotImplementedError

    def append(self, records: Sequence[Record]) -> None:
        """Add records to the log."""
        raise NotImplementedError

    def _update(self) -> None:
        if records := self._reader.read():
            self.append(records)

    def on_start(self, run: Run) -> None:
        """Write the records of earlier sessions."""
        self.write(run.folder)

    def on_step(self, record: Record) -> None:
        """Write new records, if this step is in metrics.jsonl."""
        self._update()

    def on_evaluate(self, record: Record) -> None:
        """Write new records."""
        self._update()

    def on_checkpoint(self, path: Path) -> None:
        """Write new records: a measurement may have been made after the last step."""
        self._update()

    def on_end(self, result: Result) -> None:
        """Write new records."""
        self._update()


class CSVLogger(Logger):
    """Writes `metrics.csv` in the run folder: one row per record, with empty cells for keys that a record lacks.

    >>> logger = CSVLogger()  # train(config, "runs/mine", callbacks=[logger])
    """

    FILE = "metrics.csv"

    def begin(self, records: Sequence[Record]) -> None:
        """Replace the file. Its columns are the keys of all records, in the order in which they appear."""
        self._columns = list(dict.fromkeys(key for record in records for key in record))
        header = {key: key for key in self._columns}
        write_file(self.folder / self.FILE, self._rows([header, *records] if records else []))

    def append(self, records: Sequence[Record]) -> None:
        """Append rows; records with new keys need a new header, and the file is written again."""
        if not {key for record in records for key in record} <= set(self._columns):
            self.write(self.folder)
            return
        path = self.folder / self.FILE
        with disk_errors(f"write {path}"), open(path, "ab") as file:
            file.write(self._rows(records).encode())

    def _rows(self, records: Iterable[Record]) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([_cell(record.get(key)) for key in self._columns] for record in records)
        return text.getvalue()


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value


class ScalarWriter(Protocol):
    """The methods of `torch.utils.tensorboard.SummaryWriter` that a log needs."""

    def add_scalar(
        self, tag: str, scalar_value: float, global_step: int | None = None, walltime: float | None = None
    ) -> None:
        """Add a value to the curve `tag`."""

    def flush(self) -> None:
        """Write all values to disk."""

    def close(self) -> None:
        """Write all values to disk and close the file."""


class TensorBoardLogger(Logger):
    """Writes the curves `train/loss`, `eval/bits_per_byte` and so on to `tensorboard` in the run folder.

    Relative times in TensorBoard are seconds of training, without evaluations and pauses between sessions.

    Args:
        open_writer: Opens a writer for a folder; by default `SummaryWriter`, which needs the extra `tensorboard`.
    """

    FOLDER = "tensorboard"

    def __init__(self, open_writer: Callable[[str], ScalarWriter] | None = None) -> None:
        self._open_writer = _summary_writer() if open_writer is None else open_writer
        self._writer: ScalarWriter | None = None

    def begin(self, records: Sequence[Record]) -> None:
        """Replace the event files."""
        self._close()
        folder = self.folder / self.FOLDER
        with disk_errors(f"write {folder}"):
            for path in folder.glob("events.out.tfevents.*"):
                path.unlink()
            self._started, self._seconds = (self.folder / "config.json").stat().st_mtime, 0.0
            self._writer = self._open_writer(str(folder))
        self.append(records)

    def append(self, records: Sequence[Record]) -> None:
        """Add the numbers in the records, and write them to disk."""
        if self._writer is None:
            return
        with disk_errors(f"write {self.folder / self.FOLDER}"):
            for record in records:
                self._seconds = record.get("seconds", self._seconds)
                for key, value in record.items():
                    if key not in ("kind", "step") and isinstance(value, int | float):
                        tag, time = f"{record['kind']}/{key}", self._started + self._seconds
                        self._writer.add_scalar(tag, value, record["step"], time)
            self._writer.flush()

    def on_end(self, result: Result) -> None:
        """Write new records and close the file."""
        super().on_end(result)
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _summary_writer() -> Callable[[str], ScalarWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError(
            "TensorBoard logs need the package tensorboard: pip install 'qkflow[tensorboard]', or use --log csv"
        ) from error
    return SummaryWriter


LOGGERS: Mapping[str, Callable[[], Logger]] = {"csv": CSVLogger, "tensorboard": TensorBoardLogger}


def make_loggers(names: str) -> dict[str, Logger]:
    """The loggers with these names, separated by commas.

    >>> list(make_loggers("csv"))
    ['csv']
    >>> make_loggers("wandb")
    Traceback (most recent call last):
    qkflow.errors.UsageError: unknown log 'wandb': Known: csv, tensorboard
    """
    kinds = list(dict.fromkeys(name.strip() for name in names.split(",")))
    for kind in kinds:
        if kind not in LOGGERS:
            raise unknown("log", kind, LOGGERS)
    return {kind: LOGGERS[kind]() for kind in kinds}


def existing_logs(folder: Path) -> list[str]:
    """The names of the loggers that have written to a run folder.

    >>> existing_logs(Path("no such folder"))
    []
    """
    paths = {"csv": CSVLogger.FILE, "tensorboard": TensorBoardLogger.FOLDER}
    return [kind for kind, path in paths.items() if (folder / path).exists()]
