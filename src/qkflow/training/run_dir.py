"""The run folder: begun, found again, checked for being finished, loaded.

RUN/
  config.json            what the run is a function of, written last at the beginning: with it, the folder holds a run
  environment.json       where it was made; one entry more for each time it was resumed
  tokenizer.json         text to tokens and back, so that the run needs nothing but its folder to be used
  initial.safetensors    the weights it began with, where they were given
  metrics.jsonl          a line for each logged step and each evaluation
  checkpoints/           the last two
  documents.npy          loss of each held-out document after the last step
  recall.json            of a task: how the cells of its test grid were answered after the last step
  weights.safetensors    written last: with it, the run is finished
  lock                   held by the process that trains
"""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from qkflow.config import from_dict, to_dict
from qkflow.data import CorpusConfig, Tokenizer, load_tokenizer, save_tokenizer
from qkflow.errors import CheckpointError, DiskError, UsageError
from qkflow.io import discard, replace, write_file, write_json
from qkflow.models import Decoder, DecoderConfig
from qkflow.training import checkpoint
from qkflow.training.callbacks import Result
from qkflow.training.config import TrainConfig
from qkflow.training.environment import pick_device
from qkflow.training.evaluation import DOCUMENT
from qkflow.training.metrics import read_metrics
from qkflow.training.recall import read_recall
from qkflow.training.tensors import (
    digest,
    load_model_tensors,
    load_tensors,
    refuse_foreign,
    save_tensors,
)


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """A run read back, ready to be asked."""

    folder: Path
    """The run folder."""
    config: TrainConfig
    """Its config."""
    corpus: CorpusConfig
    """The corpus it was trained on."""
    model: Decoder
    """Its model, in evaluation mode."""
    tokenizer: Tokenizer
    """What its tokens stand for."""
    step: int
    """Steps the weights have seen."""
    finished: bool
    """Whether these are the final weights, or those of the latest checkpoint."""
    notices: tuple[str, ...]
    """What the user should know: files that were refused."""


def load_run(folder: Path | str, *, device: str = "cpu") -> LoadedRun:
    """The config and the model of a run folder, with its final weights or else those of its latest checkpoint."""
    folder = Path(folder)
    config = read_config(folder)
    if not (isinstance(config.data, CorpusConfig) and isinstance(config.model, DecoderConfig)):
        raise UsageError(f"{folder} is a run of a task with rationales: expected a run of a language model")
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
        found, refused = checkpoint.load_latest(folder)
        notices += refused.values()
        if found is None:
            why = notices[0] if notices else "it has made no checkpoint yet"
            raise CheckpointError(f"{folder} has no weights to load ({why}): run `{resume_command(folder)}` first")
        weights, step = found.weights, found.step
    load_model_tensors(model, weights)
    return LoadedRun(
        folder=folder,
        config=config,
        corpus=config.data,
        model=model.to(pick_device(device)).eval(),
        tokenizer=_read_tokenizer(folder),
        step=step,
        finished=finished,
        notices=tuple(notices),
    )


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        return load_tokenizer(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} is missing or damaged ({error}): restore it from a copy") from error


def holds_run(folder: Path) -> bool:
    """Whether a run was begun in this folder."""
    return (folder / "config.json").is_file()


def refuse_held(folder: Path) -> None:
    """Raise `UsageError` if a new run may not begin here."""
    if folder.is_file():
        raise UsageError(f"{folder} is a file: choose a folder for the run")
    if holds_run(folder):
        raise UsageError(
            f"{folder} already holds a run: go on with `{resume_command(folder)}`, or choose another folder"
        )


def read_config(folder: Path) -> TrainConfig:
    """The config of a run folder; anything that is not one is a `UsageError`."""
    if not folder.exists():
        raise UsageError(f"{folder} does not exist: expected a run folder, as `qkflow train --out RUN` makes")
    if folder.is_file():
        refuse_foreign(folder)
    if not holds_run(folder):
        raise UsageError(
            f"{folder} holds no run (no config.json): expected a folder that `qkflow train --out RUN` made"
        )
    data = read_json(folder / "config.json")
    if "model_type" in data:
        raise UsageError(
            f"{folder} is an exported model, not a run: `qkflow train --init {folder}` goes on from it, and"
            " transformers loads it after `import qkflow.hf`"
        )
    if "task" in data:
        raise UsageError(
            f"{folder} is a run of `qkflow sharpen`, whose words are not stored: expected a folder that `qkflow train`"
            " made; what it attends to is on the page of its study"
        )
    return from_dict(TrainConfig, data)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a run folder as a table."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON ({error}): restore it from a copy") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds {type(value).__name__}, expected a table of names and values")
    return value


def begin(
    folder: Path,
    config: TrainConfig,
    environment: dict[str, Any],
    tokenizer: Tokenizer,
    initial: Mapping[str, Tensor] | None = None,
) -> None:
    """Make the folder hold a run. The config comes last: before it there is nothing to resume."""
    refuse_held(folder)  # again, now under the lock
    try:
        (folder / "checkpoints").mkdir(exist_ok=True)
    except OSError as error:
        raise DiskError(error.errno, f"could not make {folder / 'checkpoints'} ({error.strerror})") from error
    write_json(folder / "environment.json", {**environment, "resumed": []})
    save_tokenizer(tokenizer, folder / "tokenizer.json")
    if initial is not None:
        replace(folder / "initial.safetensors", lambda path: save_tensors(path, initial))
    write_json(folder / "config.json", to_dict(config))


def sweep(folder: Path) -> None:
    """Remove what earlier processes left under temporary names. Only for the holder of the lock."""
    for place in (folder, folder / "checkpoints"):
        for path in place.glob(".*.tmp"):
            discard(path)


def initial_weights(folder: Path, config: TrainConfig) -> dict[str, Tensor] | None:
    """The weights a run began with; None where the seed drew them. Others than those raise `CheckpointError`."""
    if config.initial is None:
        return None
    weights = load_tensors(path := folder / "initial.safetensors")
    if digest(weights) != config.initial:
        raise CheckpointError(f"{path} is not what {folder} began with: restore it from a copy, or begin a new run")
    return weights


def finish(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the final weights: from here on the run is finished."""
    replace(folder / "weights.safetensors", lambda path: save_tensors(path, weights))


def finished(folder: Path) -> Result | None:
    """The result of a finished run, None for any other; last files that were damaged make it unfinished again."""
    try:
        load_tensors(folder / "weights.safetensors")
    except CheckpointError:
        return None
    return result_of(folder, was_finished=True)


def result_of(folder: Path, *, was_finished: bool) -> Result | None:
    """The last evaluation and its files, if all are there."""
    evaluations = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "eval"]
    documents = read_documents(folder / "documents.npy")
    if not evaluations or documents is None:
        return None
    last = evaluations[-1]
    if "accuracy" in last and read_recall(folder) is None:
        return None
    return Result(folder=folder, step=last["step"], metrics=last, documents=documents, was_finished=was_finished)


def write_documents(path: Path, documents: np.ndarray) -> None:
    """Save a structured array as .npy."""
    content = io.BytesIO()
    np.save(content, documents, allow_pickle=False)
    write_file(path, content.getvalue())


def read_documents(path: Path) -> np.ndarray | None:
    """Read what `write_documents` wrote; None for anything else, such as a file that is cut short or holds a pickle."""
    try:
        documents = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return documents if isinstance(documents, np.ndarray) and documents.dtype == DOCUMENT else None


def resume_command(folder: Path) -> str:
    """What to type to go on with a run.

    >>> resume_command(Path("my runs/a"))
    "qkflow train --resume 'my runs/a'"
    """
    return f"qkflow train --resume {shlex.quote(str(folder))}"
