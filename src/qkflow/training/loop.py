"""Training: evaluate, checkpoint, step, until the last step; killed at any instant, it goes on to the same bits.

    while not done:   evaluate if due  ->  checkpoint if due  ->  one step

Nothing outlives a step but the weights, the optimiser's memory and the number of steps: batch and dropout are functions
of (seed, step). A checkpoint holds these three; what metrics.jsonl says beyond it is dropped on resume and made again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from qkflow.errors import CheckpointError, DiskError, DivergenceError, Interrupted, UsageError
from qkflow.files import checksum, locked
from qkflow.training import checkpoint
from qkflow.training.callbacks import Callback, Callbacks, Result, Run
from qkflow.training.config import TrainConfig
from qkflow.training.divergence import first_bad_parameter
from qkflow.training.environment import environment, pick_device
from qkflow.training.learner import Learner, open_checked
from qkflow.training.metrics import Metrics
from qkflow.training.optimizer import optimizer_tensors
from qkflow.training.recall import RecallResult, by_cell, read_recall, write_recall
from qkflow.training.resume import config_of, note_session, restore, threads_of
from qkflow.training.run import (
    begin,
    finish,
    finished,
    read_documents,
    refuse_held,
    result_of,
    resume_command,
    sweep,
    write_documents,
)
from qkflow.training.runtime import own_randomness, threads
from qkflow.training.signals import StopRequest, stop_on_signals
from qkflow.training.tensors import model_tensors


def train(
    config: TrainConfig | None,
    out: Path | str,
    *,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    command: Sequence[str] = (),
    cpu_threads: int | None = None,
) -> Result:
    """Train into the folder `out`, or go on with the run it holds (`resume`; the config may then be left out).

    Ctrl-C and SIGTERM write a checkpoint and raise `Interrupted`. `command` goes on record. A resumed run takes the
    number of threads it began with, whatever its config and the machine say, unless `cpu_threads` overrules it.
    """
    folder, watch = Path(out), Callbacks(callbacks)
    if resume:
        config = config_of(folder, config)
        if (result := finished(folder)) is not None:
            watch.on_notice(f"{folder} is finished ({result.step} steps): there is nothing left to do")
            return result
    elif config is None:
        raise UsageError("a new run needs a config: give one, or resume a run that has its own")
    else:
        refuse_held(folder)
    device = pick_device(config.device)
    corpus = open_checked(config)
    with locked(folder / "lock"):
        count = cpu_threads or (threads_of(folder, watch) if resume else config.threads)
        with threads(count), own_randomness(device):
            learner = Learner(config, corpus, device)
            sweep(folder)
            session = environment(corpus, device, command)
            if resume:
                note_session(folder, session, watch)
                start = restore(folder, learner, watch)
            else:
                begin(folder, config, session, corpus.tokenizer)
                start = None
            with stop_on_signals() as stop:
                return Loop(folder, learner, watch, stop, start).run()


class Loop:
    """One session of a run: from where it stands to its end, or to the reason it stops."""

    def __init__(
        self,
        folder: Path,
        learner: Learner,
        watch: Callback,
        stop: StopRequest,
        start: checkpoint.Checkpoint | None,
    ) -> None:
        self.folder, self.learner, self.watch, self.stop = folder, learner, watch, stop
        self.config = learner.config
        self.metrics = Metrics(folder / "metrics.jsonl")
        self.saved = None if start is None else start.path
        self.saved_step = None if start is None else start.step
        self.saved_at = time.monotonic()
        self.seconds = 0.0 if start is None else float(start.extra["seconds"])

    def run(self) -> Result:
        """Go on to the last step. Every way out leaves a folder that can be resumed."""
        try:
            return self._to_the_end()
        except DivergenceError as error:
            raise DivergenceError(f"{error}. {self._after_divergence()}") from error
        except DiskError as error:
            command = resume_command(self.folder)
            raise DiskError(error.errno, f"{error.strerror}: free some space, then go on with `{command}`") from error
        finally:
            self.metrics.close()

    def _to_the_end(self) -> Result:
        self._announce()
        try:
            self._evaluate_if_due()
            while self.learner.step < self.config.steps:
                self._checkpoint_if_due()
                self._step()
                self._evaluate_if_due()
        except Interrupted:
            self._save()
            step, steps, command = self.learner.step, self.config.steps, resume_command(self.folder)
            stopped = Interrupted(f"stopped after step {step} of {steps}, checkpoint written: go on with `{command}`")
            stopped.signal = self.stop.signal or stopped.signal
            raise stopped from None
        return self._finish()

    def _announce(self) -> None:
        corpus = self.learner.corpus
        self.watch.on_start(
            Run(
                folder=self.folder,
                config=self.config,
                model=self.learner.model,
                step=self.learner.step,
                corpus=f"{corpus.name} ({corpus.digest[:12]})",
            )
        )

    def _step(self) -> None:
        record = self.learner.learn(self.stop)
        self.seconds += record["seconds"]
        record["seconds"] = self.seconds
        if self.learner.step % self.config.log_every == 0 or self.learner.step == self.config.steps:
            self.metrics.write(record)
        self.watch.on_step(record)

    def _evaluate_if_due(self) -> None:
        """Before the first step, every so often, and after the last; once, even if a checkpoint came in between."""
        step, config = self.learner.step, self.config
        last = step == config.steps
        known = step in self.metrics.evaluated
        if known and not (last and self._lacks_results()):
            return
        if step % config.evaluate_every and not last:
            return
        began = time.perf_counter()
        try:
            result = self.learner.evaluate(config.final_tokens if last else config.evaluate_tokens, self.stop)
            if last:  # before the record, which says that they are there
                self._answer(again=not known)
                write_documents(self.folder / "documents.npy", result.documents)
        except DivergenceError as error:
            raise DivergenceError(f"after step {step}, {error}") from error
        record = {
            "kind": "eval",
            "step": step,
            "tokens": step * config.batch * config.context,
            **result.summary(),
            "seconds": self.seconds,
            "evaluation_seconds": time.perf_counter() - began,
        }
        if not known:
            self.metrics.write(record)
        self.watch.on_evaluate(record)

    def _lacks_results(self) -> bool:
        """Whether a file that the last evaluation leaves is missing or damaged."""
        missing = self.learner.corpus.task is not None and read_recall(self.folder) is None
        return missing or read_documents(self.folder / "documents.npy") is None

    def _answer(self, *, again: bool) -> None:
        """Answer the test grid of a task and write recall.json; a whole one is kept unless it is made `again`."""
        corpus, task = self.learner.corpus, self.learner.corpus.task
        if task is None or not (again or read_recall(self.folder) is None):
            return
        self.watch.on_notice(f"answering the {len(corpus.test.documents):,} test instances of {corpus.name}")
        cells = by_cell(self.learner.recall(None, self.stop))
        write_recall(self.folder, RecallResult(task=task, split="test", step=self.learner.step, cells=cells))

    def _checkpoint_if_due(self) -> None:
        every, minutes, step = self.config.checkpoint_every, self.config.checkpoint_minutes, self.learner.step
        by_steps = every is not None and step > 0 and step % every == 0
        by_time = minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes
        if by_steps or by_time:
            self._save()

    def _save(self) -> None:
        """Write a checkpoint unless this step has one; never one that is not finite: it would push out a good one."""
        learner = self.learner
        if learner.step == self.saved_step:
            return
        if (name := first_bad_parameter(learner.model)) is not None:
            raise DivergenceError(f"the weights after step {learner.step} are not finite: the first is {name}")
        self.metrics.sync()
        self.saved = checkpoint.save(
            self.folder,
            learner.step,
            model_tensors(learner.model),
            optimizer_tensors(learner.model, learner.optimizer),
            {
                "config": checksum(self.folder / "config.json"),
                "corpus": learner.corpus.digest,
                "seconds": self.seconds,
                "tokens": learner.step * self.config.batch * self.config.context,
            },
        )
        self.saved_step, self.saved_at = learner.step, time.monotonic()
        self.watch.on_checkpoint(self.saved)

    def _finish(self) -> Result:
        self._save()
        finish(self.folder, self.learner.model)
        result = result_of(self.folder, was_finished=False)
        if result is None:
            raise CheckpointError(
                f"the last evaluation vanished from {self.folder} while it was trained: "
                f"`{resume_command(self.folder)}` makes it again"
            )
        self.watch.on_end(result)
        return result

    def _after_divergence(self) -> str:
        kept = "No checkpoint was written yet" if self.saved is None else f"The last good checkpoint is {self.saved}"
        return (
            f"{kept}; `{resume_command(self.folder)}` goes on from there, but meets the same numbers again: "
            f"start a new run with a lower --lr (it was {self.config.lr:g})"
        )
