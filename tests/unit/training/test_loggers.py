"""Logs in other formats contain every record of metrics.jsonl once, however often a run is stopped."""

from __future__ import annotations

import csv
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from qkflow.errors import DiskError, UsageError
from qkflow.training import Callback, CSVLogger, TensorBoardLogger, TrainConfig, read_metrics, train
from qkflow.training.loggers import Logger, make_loggers
from qkflow.training.metrics import MetricsReader


def csv_rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return [{key: value for key, value in row.items() if value != ""} for row in csv.DictReader(file)]


def expected_rows(folder: Path) -> list[dict[str, str]]:
    return [
        {key: str(value) for key, value in record.items() if value is not None}
        for record in read_metrics(folder / "metrics.jsonl")
    ]


class Writer:
    """Stands in for `SummaryWriter`: an event file that holds the values it was flushed with."""

    opened = 0

    def __init__(self, folder: str) -> None:
        Writer.opened += 1
        self.path = Path(folder) / f"events.out.tfevents.{Writer.opened}"
        self.path.parent.mkdir(exist_ok=True)
        self.path.touch()
        self.values: list[tuple[str, float, int | None, float | None]] = []

    def add_scalar(
        self, tag: str, scalar_value: float, global_step: int | None = None, walltime: float | None = None
    ) -> None:
        self.values.append((tag, scalar_value, global_step, walltime))

    def flush(self) -> None:
        with self.path.open("a") as file:
            file.writelines(f"{tag} {step} {value!r}\n" for tag, value, step, _ in self.values)
        self.values.clear()

    def close(self) -> None:
        self.flush()


def scalars(folder: Path) -> list[str]:
    lines = []
    for path in sorted((folder / "tensorboard").glob("events.out.tfevents.*")):
        lines += path.read_text().splitlines()
    return lines


def expected_scalars(folder: Path) -> list[str]:
    return [
        f"{record['kind']}/{key} {record['step']} {value!r}"
        for record in read_metrics(folder / "metrics.jsonl")
        for key, value in record.items()
        if key not in ("kind", "step") and not isinstance(value, str)
    ]


class Shapes:
    """A measurement with a value that is not a number."""

    def steps(self, config: TrainConfig) -> Collection[int]:
        return (2, config.steps)

    def measure(self, model: nn.Module, step: int) -> Mapping[str, Any]:
        return {"shape, of 'x'": [1, step]}

    def finish(self, model: nn.Module, folder: Path) -> None:
        pass


def test_csv_has_one_row_per_record(configure: Any, tmp_path: Path) -> None:
    config = configure(steps=5, log_every=2, evaluate_every=3)
    train(config, tmp_path / "run", callbacks=[CSVLogger()], measurement=Shapes())
    rows = csv_rows(tmp_path / "run")
    assert rows == expected_rows(tmp_path / "run")
    assert [(row["kind"], row["step"]) for row in rows if row["kind"] != "test"] == [
        ("eval", "0"),
        *[("train", "2"), ("measure", "2"), ("eval", "3"), ("train", "4")],
        *[("train", "5"), ("eval", "5"), ("measure", "5")],
    ]


class FailAt(Callback):
    """Raises after a step, as a crash would: without a checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, record: Mapping[str, Any]) -> None:
        if record["step"] == self.step:
            raise KeyError(self.step)


@pytest.mark.parametrize("kind", ["csv", "tensorboard"])
def test_a_resumed_run_continues_its_log(configure: Any, tmp_path: Path, kind: str) -> None:
    def logger() -> Logger:
        return CSVLogger() if kind == "csv" else TensorBoardLogger(Writer)

    read, expected = (csv_rows, expected_rows) if kind == "csv" else (scalars, expected_scalars)
    config, folder = configure(steps=6, checkpoint_every=2), tmp_path / "run"
    with pytest.raises(KeyError):
        train(config, folder, callbacks=[logger(), FailAt(5)])
    before = read(folder)
    assert before == expected(folder)  # written at once, not when the run ends
    log = next((folder / "tensorboard").iterdir()) if kind == "tensorboard" else folder / "metrics.csv"
    with log.open("a") as file:
        file.write("train,6,")  # torn
    train(config, folder, callbacks=[logger()], resume=True)
    assert read(folder) == expected(folder)
    assert len(read(folder)) > len(before)


def test_times_in_tensorboard_are_seconds_of_training(configure: Any, tmp_path: Path) -> None:
    written: list[Writer] = []

    class Unflushed(Writer):
        def __init__(self, folder: str) -> None:
            super().__init__(folder)
            written.append(self)

        def flush(self) -> None:
            pass

    train(configure(steps=2), tmp_path / "run", callbacks=[TensorBoardLogger(Unflushed)])
    start = (tmp_path / "run" / "config.json").stat().st_mtime
    times = [time for tag, _, _, time in written[0].values if tag == "train/loss"]
    records = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert times == [start + record["seconds"] for record in records]


def test_a_missing_tensorboard_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install 'qkflow\[tensorboard\]'"):
        make_loggers("csv, tensorboard")


@pytest.mark.filterwarnings("ignore")  # tensorboard emits warnings
def test_tensorboard_reads_the_log(configure: Any, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(configure(steps=3), tmp_path / "run", callbacks=[TensorBoardLogger()])
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload().Scalars("train/loss")
    records = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert [event.step for event in events] == [1, 2, 3]
    assert [event.value for event in events] == pytest.approx([record["loss"] for record in records])


def test_a_log_that_cannot_be_written_is_a_disk_error(configure: Any, tmp_path: Path) -> None:
    class Remove(Callback):
        def on_step(self, record: Mapping[str, Any]) -> None:
            if record["step"] == 1:
                (tmp_path / "run" / "metrics.csv").unlink()
                (tmp_path / "run" / "metrics.csv").mkdir()

    with pytest.raises(DiskError, match=r"metrics\.csv .*--resume"):
        train(configure(), tmp_path / "run", callbacks=[CSVLogger(), Remove()])


def test_only_complete_records_are_read_and_each_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "train",')
    assert [record["step"] for record in reader.read()] == [1]
    assert reader.read() == []
    with path.open("a") as file:
        file.write(' "step": 2}\n')
    assert [record["step"] for record in reader.read()] == [2]
    assert reader.read() == []
