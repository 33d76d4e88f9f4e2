"""Going on with a run: the same config, the same corpus, the same threads, from the newest checkpoint that passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qkflow.errors import UsageError
from qkflow.io import checksum, write_json
from qkflow.training import checkpoint
from qkflow.training.callbacks import Callback
from qkflow.training.config import TrainConfig
from qkflow.training.environment import changes
from qkflow.training.learner import Learner
from qkflow.training.metrics import trim_metrics
from qkflow.training.optim import load_optimizer
from qkflow.training.run_dir import initial_weights, read_config, read_json
from qkflow.training.tensors import load_model_tensors


def config_of(folder: Path, given: TrainConfig | None) -> TrainConfig:
    """The run's own config; a different one that is given is refused, since a run is a function of its config."""
    config = read_config(folder)
    if given is not None and given != config:
        raise UsageError(f"the config given is not the one of {folder}: resume without a config, or begin a new run")
    return config


def threads_of(folder: Path, watch: Callback) -> int | None:
    """The number of threads the run began with; a notice if this process has another."""
    recorded = read_json(folder / "environment.json").get("threads")
    if not isinstance(recorded, int) or recorded < 1:
        return None
    if (here := torch.get_num_threads()) != recorded:
        watch.on_notice(
            f"this process has threads={here}, the run began with {recorded}: "
            f"{recorded} is set again, since the last bits depend on it"
        )
    return recorded


def note_session(folder: Path, session: dict[str, Any], watch: Callback) -> None:
    """Add this session to environment.json; say what bits may depend on, and refuse a corpus that has changed."""
    record = read_json(folder / "environment.json")
    before, now = record.get("corpus"), session["corpus"]
    if before is None or before.get("digest") != now["digest"]:
        raise UsageError(
            f"the corpus {now['name']} is not the text {folder} began with (its hash is {now['digest'][:12]}): "
            "restore that text, or begin a new run"
        )
    for notice in changes(record, session):
        watch.on_notice(notice)
    write_json(folder / "environment.json", {**record, "resumed": [*record.get("resumed", []), session]})


def newest(folder: Path, watch: Callback) -> checkpoint.Checkpoint | None:
    """The newest checkpoint that passes, and metrics.jsonl as it was then; refused ones are named and set aside.

    None means that the run was stopped before its first checkpoint: it begins again, with the same bits.
    """
    found, refused = checkpoint.load_latest(folder)
    for path, why in refused.items():
        watch.on_notice(f"checkpoint refused, the one before it is used: {why}")
        checkpoint.set_aside(path)
    if found is not None and found.extra.get("config") != checksum(folder / "config.json"):
        raise UsageError(
            f"{folder / 'config.json'} is not the config of {found.path.name}: put it back, or begin a new run"
        )
    checkpoint.prune(folder)  # a kill may have come between a new checkpoint and the removal of an old one
    trim_metrics(folder / "metrics.jsonl", 0 if found is None else found.step)
    return found


def restore(folder: Path, learner: Learner, watch: Callback) -> checkpoint.Checkpoint | None:
    """Bring the learner to the newest checkpoint, which the first process chooses, or to where the run begins."""
    world, found = learner.world, None
    with world.agreed():
        found = newest(folder, watch) if world.leads else None
    path = world.first(None if found is None else str(found.path))
    with world.agreed():
        if path is None:
            if (initial := initial_weights(folder, learner.config)) is not None:
                load_model_tensors(learner.model, initial)
            return None
        if found is None:
            world.sees(Path(path).is_dir)
            found = checkpoint.load(Path(path))
        load_model_tensors(learner.model, found.weights)
        load_optimizer(learner.model, learner.optimizer, found.optimizer)
        learner.step = found.step
    return found
