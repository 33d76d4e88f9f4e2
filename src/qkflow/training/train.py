"""`train`: start or resume a run, in one process or in all processes that torchrun has started."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from qkflow.errors import UsageError
from qkflow.io import locked
from qkflow.training import checkpoint
from qkflow.training.callbacks import Callback, Measurement, Result
from qkflow.training.config import TrainConfig
from qkflow.training.distributed import Parallel, SingleProcess, is_torchrun, join, was_restarted
from qkflow.training.loop import Loop
from qkflow.training.losses import Objective, open_objective
from qkflow.training.optim import load_optimizer
from qkflow.training.parallel import ignore_view_warnings, validate_parallel
from qkflow.training.reproducibility import flushed_denormals, own_randomness, platform_record, threads
from qkflow.training.run_dir import (
    RESULT_FILES,
    Notify,
    begin,
    finished,
    holds_run,
    initial_weights,
    latest_checkpoint,
    read_config,
    record_session,
    refuse_changed,
    refuse_held,
    resumed_threads,
    sweep,
)
from qkflow.training.signals import stop_on_signals
from qkflow.training.step import Learner
from qkflow.training.tensors import digest, load_model_tensors


def train(
    config: TrainConfig | None,
    out: Path | str,
    *,
    callbacks: Sequence[Callback] = (),
    measurement: Measurement | None = None,
    objective: Objective | None = None,
    resume: bool = False,
    command: Sequence[str] = (),
    cpu_threads: int | None = None,
    initial: Mapping[str, Tensor] | None = None,
    parallel: Parallel | None = None,
) -> Result:
    """Train into the folder `out`, or resume the run in it.

    Ctrl-C and SIGTERM write a checkpoint and raise `Interrupted`. Under torchrun, all processes train together; `out`
    must be a folder that all machines share. If torchrun has restarted them, the run in `out` is resumed.

    Args:
        config: The config; may be None to resume a run.
        out: The run folder.
        callbacks: Called on rank 0 only.
        measurement: What to measure on the model besides its held-out loss.
        objective: The objective, if it is open already; by default that of the config.
        resume: Whether to resume the run in `out`.
        command: The command line, for environment.json.
        cpu_threads: CPU threads of this session. By default those of the config, or of the run that is resumed.
        initial: Initial weights of a new run.
        parallel: How torchrun's processes share the model: "ddp" (the default) or "fsdp".
    """
    folder = Path(out)
    with join(parallel) as group, contextlib.ExitStack() as stack:
        callbacks = callbacks if group.is_main else ()

        def notify(text: str) -> None:
            for callback in callbacks:
                callback.on_notice(text)

        resume = resume or is_restart(folder, group)
        with group.raise_on_all_ranks():
            config = _resolve_config(config, folder, initial, resume=resume)
            validate_parallel(config, group, resume=resume)
            if measurement is not None and group.is_sharded:
                raise UsageError("a measurement needs the whole model on one process: use parallel='ddp'")
            if resume and (result := finished(folder)) is not None:
                refuse_changed(folder, RESULT_FILES)
                notify(f"{folder} is finished ({result.step} steps): nothing to do")
                return result
        with group.raise_on_all_ranks():
            device = group.device(config.device)
            objective = objective or open_objective(config)
            for notice in objective.notices:
                notify(notice)
        with group.raise_on_all_ranks():
            if group.is_main:
                stack.enter_context(locked(folder / "lock"))
            n_threads = cpu_threads or (resumed_threads(folder, notify) if resume else config.threads)
            stack.enter_context(threads(n_threads))
            stack.enter_context(flushed_denormals(config.flush_denormals))
            stack.enter_context(own_randomness(device))
            stack.enter_context(ignore_view_warnings(group))
            learner = Learner(config, objective, device, group=group, initial=None if resume else initial)
        learner.parallelize()
        group.on_main(lambda: _prepare_folder(folder, learner, notify, command, resume=resume, initial=initial))
        with group.raise_on_all_ranks():
            if not group.wait_for_file(lambda: holds_run(folder)):
                raise UsageError(f"{folder} is not the folder of rank 0: use a folder that all machines share")
        start = _restore(folder, learner, notify) if resume else None
        with stop_on_signals(patient=is_torchrun()) as stop:
            return Loop(folder, learner, callbacks, stop, start=start, measurement=measurement).run()


def is_restart(folder: Path, group: SingleProcess) -> bool:
    """Whether torchrun has restarted these processes during the run in the folder.

    Machines count restarts separately, and may see a shared folder at different times: all ranks must agree.
    """
    if not (group.any(was_restarted()) and group.broadcast(holds_run(folder))):
        return False
    group.wait_for_file(lambda: holds_run(folder))
    return True


def _resolve_config(
    config: TrainConfig | None, folder: Path, initial: Mapping[str, Tensor] | None, *, resume: bool
) -> TrainConfig:
    """The config of the run, with the hash of the initial weights, which must be those that it names, if any."""
    if config is not None:
        own = None if initial is None else digest(initial)
        if config.initial is None:
            config = replace(config, initial=own)
        elif own != config.initial and not (resume and own is None):
            expected, got = config.initial[:12], "none" if own is None else own[:12]
            raise UsageError(f"the config starts from the weights {expected}, got {got}: pass those as initial")
    if resume:
        stored = read_config(folder)
        if config is not None and config != stored:
            raise UsageError(f"the config differs from that of {folder}: resume without a config, or start a new run")
        return stored
    if config is None:
        raise UsageError("a new run needs a config: pass one, or resume an existing run")
    refuse_held(folder)
    return config


def _prepare_folder(
    folder: Path,
    learner: Learner,
    notify: Notify,
    command: Sequence[str],
    *,
    resume: bool,
    initial: Mapping[str, Tensor] | None,
) -> None:
    """Create the run, or add a session to its record."""
    objective, group = learner.objective, learner.group
    sweep(folder)
    environment = {
        "command": list(command),
        "data": {"name": objective.name, "digest": objective.digest},
        "processes": group.size,
        "parallel": group.kind,
        **platform_record(learner.device),
    }
    if resume:
        record_session(folder, environment, notify)
    else:
        begin(folder, learner.config, environment, objective.tokenizer, initial)


def _restore(folder: Path, learner: Learner, notify: Notify) -> checkpoint.Checkpoint | None:
    """Load the newest valid checkpoint, chosen by rank 0, or the initial weights if there is none."""
    group = learner.group
    start = group.on_main(lambda: latest_checkpoint(folder, notify))
    path = group.broadcast(None if start is None else str(start.path))
    with group.raise_on_all_ranks():
        if path is None:
            if (initial := initial_weights(folder, learner.config)) is not None:
                load_model_tensors(learner.model, initial)
            return None
        if start is None:
            group.wait_for_file(Path(path).is_dir)
            start = checkpoint.load(Path(path))
        load_model_tensors(learner.model, start.weights)
        load_optimizer(learner.model, learner.optimizer, start.optimizer)
        learner.step = start.step
    return start
