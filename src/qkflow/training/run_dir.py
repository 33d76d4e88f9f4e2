"""The run folder: create it, resume it, check whether it is finished, load it.

RUN/
  config.json            the config; written last when a run is created, so a folder with it holds a run
  environment.json       machine and versions; one more entry per resumed session
  tokenizer.json         the tokenizer, so that the run can be used without its corpus
  initial.safetensors    the initial weights, if they were given
  metrics.jsonl          one line per logged step, evaluation and measurement
  checkpoints/           the last two
  documents.npy          the loss of each held-out document after the last step
  recall.json            of a recall task: the accuracy per cell of its test grid after the last step
  checksums.json         SHA-256 of the config and the tokenizer, and after the last step of the results
  weights.safetensors    the final weights; written last, so a folder with them holds a finished run
  lock                   locked by the process that trains
"""

from __future__ import annotations

import hashlib
import io
import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkflow.config import from_dict, to_dict
from qkflow.data import CorpusConfig, Tokenizer, save_tokenizer
from qkflow.data.text.tokenizers import saved_tokenizer
from qkflow.errors import CheckpointError, UsageError
from qkflow.io import (
    BAD_NPY,
    checksum,
    discard,
    disk_errors,
    refuse_special_files,
    render_json,
    replace,
    write_file,
    write_json,
)
from qkflow.models import Decoder, DecoderConfig
from qkflow.training import checkpoint
from qkflow.training.callbacks import Result
from qkflow.training.config import TrainConfig
from qkflow.training.evaluate import DOCUMENT
from qkflow.training.metrics import metrics_checksum, read_metrics, trim_metrics
from qkflow.training.recall import read_recall
from qkflow.training.reproducibility import changes, pick_device
from qkflow.training.tensors import digest, load_model_tensors, load_tensors, refuse_foreign, save_tensors

_CHECKSUMS = "checksums.json"
_START_FILES = ("config.json", "tokenizer.json")
RESULT_FILES = ("metrics.jsonl", "documents.npy", "recall.json")

Notify = Callable[[str], None]
"""Receives messages for the user."""


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """A language model loaded from its run folder."""

    folder: Path
    config: TrainConfig
    data: CorpusConfig
    model: Decoder
    """The model, in evaluation mode."""
    tokenizer: Tokenizer
    step: int
    """Training steps of the weights."""
    finished: bool
    """Whether these are the final weights, or those of the latest checkpoint."""
    notices: tuple[str, ...]
    """Messages for the user about files that could not be used."""


def load_run(folder: Path | str, *, device: str = "cpu") -> LoadedRun:
    """Load the language model of a run folder, with its final weights or else those of its latest checkpoint."""
    folder = Path(folder)
    config = read_config(folder)
    if not (isinstance(config.data, CorpusConfig) and isinstance(config.model, DecoderConfig)):
        raise UsageError(
            f"{folder} is a run on the task {getattr(config.data, 'name', '?')!r}, whose vocabulary is not stored with "
            "it: expected a run of a language model, made by `qkflow train`; see the report of its study"
        )
    refuse_changed(folder, _START_FILES)
    model = Decoder(config.model)
    notices: list[str] = []
    weights, step = None, config.steps
    if (folder / "weights.safetensors").exists():
        try:
            weights = load_tensors(folder / "weights.safetensors")
        except CheckpointError as error:
            notices.append(str(error))
    finished = weights is not None
    if weights is None:
        latest, refused = checkpoint.load_latest(folder)
        notices += refused.values()
        if latest is None:
            reason = notices[0] if notices else "it has no checkpoint yet"
            raise CheckpointError(f"{folder} has no weights to load ({reason}): run `{resume_command(folder)}` first")
        weights, step = latest.weights, latest.step
    load_model_tensors(model, weights)
    return LoadedRun(
        folder=folder,
        config=config,
        data=config.data,
        model=model.to(pick_device(device)).eval(),
        tokenizer=saved_tokenizer(str(folder)),
        step=step,
        finished=finished,
        notices=tuple(notices),
    )


def holds_run(folder: Path) -> bool:
    """Whether the folder holds a run."""
    return (folder / "config.json").is_file()


def refuse_held(folder: Path) -> None:
    """Raise `UsageError` if a new run cannot be created here."""
    if folder.is_file():
        raise UsageError(f"{folder} is a file: choose a folder for the run")
    refuse_special_files(folder)
    if holds_run(folder):
        raise UsageError(
            f"{folder} already holds a run: use `{resume_command(folder)}` to resume it, or choose another folder"
        )


def read_config(folder: Path) -> TrainConfig:
    """The config of a run folder; raises `UsageError` for anything else."""
    if not folder.exists():
        raise UsageError(f"{folder} does not exist: expected a run folder, made by `qkflow train --out RUN`")
    refuse_special_files(folder)
    if folder.is_file():
        refuse_foreign(folder)
    if not holds_run(folder):
        raise UsageError(
            f"{folder} holds no run (it has no config.json): expected a folder made by `qkflow train --out RUN`"
        )
    data = read_json(folder / "config.json")
    if "model_type" in data:
        raise UsageError(
            f"{folder} is an exported model, not a run: use `qkflow train --init {folder}` to train it further, or "
            "load it with transformers after `import qkflow.hf`"
        )
    return from_dict(TrainConfig, data)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file with an object at its top level."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON ({error}): restore it from a copy") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} contains {type(value).__name__}, expected an object")
    return value


def recorded_digest(folder: Path) -> str | None:
    """The SHA-256 of the data that a run was trained on; None if it is not recorded."""
    path = folder / "environment.json"
    data = read_json(path).get("data") if path.is_file() else None
    digest = data.get("digest") if isinstance(data, dict) else None
    return digest if isinstance(digest, str) else None


def begin(
    folder: Path,
    config: TrainConfig,
    environment: dict[str, Any],
    tokenizer: Tokenizer | None = None,
    initial: Mapping[str, Tensor] | None = None,
) -> None:
    """Create a run. The config is written last: without it there is nothing to resume."""
    refuse_held(folder)  # checked again under the lock
    with disk_errors(f"create {folder / 'checkpoints'}"):
        (folder / "checkpoints").mkdir(exist_ok=True)
    write_json(folder / "environment.json", {**environment, "resumed": []})
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder / "tokenizer.json")
    if initial is not None:
        replace(folder / "initial.safetensors", lambda path: save_tensors(path, initial))
    content = render_json(to_dict(config))
    sums = {name: checksum(folder / name) for name in _START_FILES if (folder / name).exists()}
    sums["config.json"] = hashlib.sha256(content.encode()).hexdigest()
    write_json(folder / _CHECKSUMS, sums)
    write_file(folder / "config.json", content)


def refuse_changed(folder: Path, names: Iterable[str]) -> None:
    """Raise `UsageError` if one of the files differs from its checksum; runs of earlier versions have none."""
    sums = read_json(folder / _CHECKSUMS) if (folder / _CHECKSUMS).exists() else {}
    for name in names:
        path = folder / name
        if name in sums and not (path.is_file() and checksum(path) == sums[name]):
            raise UsageError(f"{path} does not match its checksum in {_CHECKSUMS}: restore it from a copy")


def resumed_threads(folder: Path, notify: Notify) -> int | None:
    """The number of threads that the run was started with; a notice if this process has another."""
    recorded = read_json(folder / "environment.json").get("threads")
    if not isinstance(recorded, int) or recorded < 1:
        return None
    if (current := torch.get_num_threads()) != recorded:
        notify(
            f"this process has threads={current}, the run was started with {recorded}: "
            f"using {recorded}, since the last bits of results depend on it"
        )
    return recorded


def record_session(folder: Path, session: dict[str, Any], notify: Notify) -> None:
    """Add a resumed session to environment.json, with notices about differences; raises if the data has changed."""
    record = read_json(folder / "environment.json")
    before, now = record.get("data"), session["data"]
    if before is None or before.get("digest") != now["digest"]:
        raise UsageError(
            f"the data {now['name']} (SHA-256 {now['digest'][:12]}) has changed since {folder} was started: "
            "restore it, or start a new run"
        )
    for notice in changes(record, session):
        notify(notice)
    write_json(folder / "environment.json", {**record, "resumed": [*record.get("resumed", []), session]})


def latest_checkpoint(folder: Path, notify: Notify) -> checkpoint.Checkpoint | None:
    """The newest valid checkpoint; metrics.jsonl is trimmed to it, and damaged ones are renamed.

    None means that the run was stopped before its first checkpoint: it starts again, with the same bits.
    """
    latest, refused = checkpoint.load_latest(folder)
    for path, reason in refused.items():
        notify(f"checkpoint refused, using the one before it: {reason}")
        checkpoint.set_aside(path)
    if latest is not None and latest.extra.get("config") != checksum(folder / "config.json"):
        raise UsageError(
            f"{folder / 'config.json'} is not the config of {latest.path.name}: restore it, or start a new run"
        )
    refuse_changed(folder, _START_FILES)
    metrics = folder / "metrics.jsonl"
    before = None if latest is None else latest.extra.get("metrics")
    if isinstance(before, dict) and metrics_checksum(metrics, before.get("bytes")) != before:
        notify(f"{metrics} was changed: its records may differ from those that were written")
    checkpoint.prune(folder)  # the process may have been killed between writing a checkpoint and removing an old one
    trim_metrics(metrics, 0 if latest is None else latest.step)
    return latest


def sweep(folder: Path) -> None:
    """Remove temporary files of earlier processes. The caller must hold the lock."""
    for directory in (folder, folder / "checkpoints"):
        for path in directory.glob(".*.tmp"):
            discard(path)


def initial_weights(folder: Path, config: TrainConfig) -> dict[str, Tensor] | None:
    """The initial weights of a run; None if they were drawn from the seed. Altered ones raise `CheckpointError`."""
    if config.initial is None:
        return None
    weights = load_tensors(path := folder / "initial.safetensors")
    if digest(weights) != config.initial:
        raise CheckpointError(
            f"{path} does not contain the initial weights of {folder}: restore it from a copy, or start a new run"
        )
    return weights


def finish(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the checksums of the results and the final weights, which marks the run as finished."""
    sums = read_json(folder / _CHECKSUMS) if (folder / _CHECKSUMS).exists() else {}
    results = {name: checksum(folder / name) for name in RESULT_FILES if (folder / name).exists()}
    write_json(folder / _CHECKSUMS, {**sums, **results})
    replace(folder / "weights.safetensors", lambda path: save_tensors(path, weights))


def finished(folder: Path) -> Result | None:
    """The result of a finished run; None if it is not finished, or if one of its last files is damaged."""
    try:
        load_tensors(folder / "weights.safetensors")
    except CheckpointError:
        return None
    return read_result(folder, was_finished=True)


def read_result(folder: Path, *, was_finished: bool) -> Result | None:
    """The last evaluation and its files; None if one is missing."""
    records = read_metrics(folder / "metrics.jsonl")
    evaluations = [record for record in records if record["kind"] == "eval"]
    final = [record for record in records if record["kind"] == "test"]
    documents = read_documents(folder / "documents.npy")
    if not evaluations or documents is None:
        return None
    last = evaluations[-1]
    if "questions" in last and read_recall(folder) is None:
        return None
    return Result(
        folder=folder,
        step=last["step"],
        metrics={**last, **final[-1]} if final else last,
        documents=documents,
        was_finished=was_finished,
    )


def write_documents(path: Path, documents: np.ndarray) -> None:
    """Write a structured array as .npy."""
    content = io.BytesIO()
    np.save(content, documents, allow_pickle=False)
    write_file(path, content.getvalue())


def read_documents(path: Path) -> np.ndarray | None:
    """Read the result of `write_documents`; None for anything else, such as a truncated file or a pickle."""
    try:
        documents = np.load(path, allow_pickle=False)
    except (OSError, *BAD_NPY):
        return None
    return documents if isinstance(documents, np.ndarray) and documents.dtype == DOCUMENT else None


def resume_command(folder: Path) -> str:
    """The command that resumes a run.

    >>> resume_command(Path("my runs/a"))
    "qkflow train --resume 'my runs/a'"
    """
    return f"qkflow train --resume {shlex.quote(str(folder))}"
