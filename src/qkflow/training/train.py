"""Where training starts: a new run, or one that goes on, on one process or on all that torchrun has started."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from qkflow.errors import UsageError
from qkflow.io import locked
from qkflow.training.callbacks import Callback, Callbacks, Result
from qkflow.training.config import TrainConfig
from qkflow.training.distributed import Parallel, World, by_torchrun, join, restarted
from qkflow.training.environment import environment
from qkflow.training.learner import Learner, open_checked
from qkflow.training.loop import Loop
from qkflow.training.parallel import quiet, refuse_uneven
from qkflow.training.reproducibility import own_randomness, threads
from qkflow.training.resume import config_of, note_session, restore, threads_of
from qkflow.training.run_dir import begin, finished, holds_run, refuse_held, sweep
from qkflow.training.signals import stop_on_signals
from qkflow.training.tensors import digest


def train(
    config: TrainConfig | None,
    out: Path | str,
    *,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    command: Sequence[str] = (),
    cpu_threads: int | None = None,
    initial: Mapping[str, Tensor] | None = None,
    parallel: Parallel | None = None,
) -> Result:
    """Train into the folder `out`, or go on with the run it holds (`resume`; the config may then be left out).

    Ctrl-C and SIGTERM write a checkpoint and raise `Interrupted`. `command` goes on record. A resumed run takes the
    number of threads it began with, whatever its config and the machine say, unless `cpu_threads` overrules it. A new
    run may begin with `initial` weights. Under torchrun all its processes train together, `ddp` unless `parallel` says
    `fsdp`: the folder must be one that all of them see, and the first alone calls the callbacks. When torchrun has
    started them again, a folder that holds this run is resumed.
    """
    folder = Path(out)
    with join(parallel) as world:
        watch = Callbacks(callbacks if world.leads else ())
        resume = resume or goes_on(folder, world)
        with world.agreed():
            if config is not None:
                config = _with_initial(config, initial, resume=resume)
            config, result = _choose(config, folder, resume=resume)
            refuse_uneven(config, world, begun=resume)
            if result is not None:
                watch.on_notice(f"{folder} is finished ({result.step} steps): there is nothing left to do")
                return result
        with world.agreed():
            device = world.device(config.device)
            corpus = open_checked(config)
        with contextlib.ExitStack() as stack:
            with world.agreed():
                if world.leads:
                    stack.enter_context(locked(folder / "lock"))
                count = cpu_threads or (threads_of(folder, watch) if resume else config.threads)
                stack.enter_context(threads(count))
                stack.enter_context(own_randomness(device))
                stack.enter_context(quiet(world))
                learner = Learner(config, corpus, device, world=world, initial=None if resume else initial)
            learner.spread()
            return _session(folder, learner, watch, command, resume=resume, initial=initial)


def goes_on(folder: Path, world: World) -> bool:
    """Whether torchrun has started these processes again, in the middle of the run that the folder holds.

    Every machine counts its own restarts, and sees a shared folder in its own time: all hear what one of them knows.
    """
    if not (world.any(restarted()) and world.first(holds_run(folder))):
        return False
    world.sees(lambda: holds_run(folder))
    return True


def _session(
    folder: Path,
    learner: Learner,
    watch: Callback,
    command: Sequence[str],
    *,
    resume: bool,
    initial: Mapping[str, Tensor] | None,
) -> Result:
    """Bring the folder and the learner to the same step, and train from there."""
    world, corpus = learner.world, learner.corpus
    with world.agreed():
        if world.leads:
            sweep(folder)
            record = environment(corpus, learner.device, command, processes=world.size, parallel=world.kind)
            if resume:
                note_session(folder, record, watch)
            else:
                begin(folder, learner.config, record, corpus.tokenizer, initial)
    _refuse_unseen(folder, world)
    start = restore(folder, learner, watch) if resume else None
    with stop_on_signals(patient=by_torchrun()) as stop:
        return Loop(folder, learner, watch, stop, start).run()


def _choose(config: TrainConfig | None, folder: Path, *, resume: bool) -> tuple[TrainConfig, Result | None]:
    """The config of the run, and its result where it is finished."""
    if resume:
        return config_of(folder, config), finished(folder)
    if config is None:
        raise UsageError("a new run needs a config: give one, or resume a run that has its own")
    refuse_held(folder)
    return config, None


def _with_initial(config: TrainConfig, initial: Mapping[str, Tensor] | None, *, resume: bool) -> TrainConfig:
    """The config with the weights that are given on record; a new run has to be given those that its config names."""
    own = None if initial is None else digest(initial)
    if config.initial is None:
        return replace(config, initial=own)
    if own != config.initial and not (resume and own is None):
        got = "none" if own is None else own[:12]
        raise UsageError(f"the config begins with the weights {config.initial[:12]}, got {got}: give those as initial")
    return config


def _refuse_unseen(folder: Path, world: World) -> None:
    """Refuse a folder that is not the same one on every machine."""
    with world.agreed():
        if not world.sees(lambda: holds_run(folder)):
            raise UsageError(f"{folder} is not the folder of the first process: give one that all machines share")
