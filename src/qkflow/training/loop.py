"""Training: evaluate, checkpoint, step, until the last step; killed at any instant, it goes on to the same bits.

    while not done:   evaluate if due  ->  checkpoint if due  ->  one step

Nothing outlives a step but the weights, the optimiser's memory and the number of steps: batch and dropout are functions
of (seed, step). A checkpoint holds these three; what metrics.jsonl says beyond it is dropped on resume and made again.

Several processes go through it in step. The first one writes and talks; what it alone can see or fail at, all of them
learn before they go on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkflow.errors import CheckpointError, DiskError, DivergenceError, Interrupted
from qkflow.io import checksum
from qkflow.training import checkpoint
from qkflow.training.callbacks import Callback, Result, Run
from qkflow.training.distributed import first_of, known_to_all
from qkflow.training.divergence import first_bad_parameter
from qkflow.training.learner import Learner
from qkflow.training.metrics import Metrics
from qkflow.training.recall import RecallResult, by_cell, read_recall, write_recall
from qkflow.training.run_dir import finish, read_documents, result_of, resume_command, write_documents
from qkflow.training.signals import StopRequest


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
        self.config, self.world = learner.config, learner.world
        self.metrics: Metrics | None = None
        with self.world.agreed():
            if self.world.leads:
                self.metrics = Metrics(folder / "metrics.jsonl")
        self.evaluated: set[int] = set(self.world.first(sorted(self.metrics.evaluated) if self.metrics else None))
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
            if self.metrics is not None:
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
            signals = [signal for signal in self.world.gather(self.stop.signal) if signal is not None]
            stopped.signal = signals[0] if signals else stopped.signal
            raise known_to_all(stopped) from None
        return self._finish()

    def _announce(self) -> None:
        corpus, world = self.learner.corpus, self.world
        run = Run(
            folder=self.folder,
            config=self.config,
            model=self.learner.model,
            step=self.learner.step,
            corpus=f"{corpus.name} ({corpus.digest[:12]})",
            processes=world.size,
            parallel=world.kind,
        )
        with world.agreed():
            self.watch.on_start(run)

    def _asked_to_stop(self) -> bool:
        """Whether any process was asked to."""
        return self.world.any(self.stop())

    def _write(self, record: Mapping[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(record)

    def _step(self) -> None:
        record = self.learner.learn(self._asked_to_stop)
        self.seconds += record["seconds"]
        record["seconds"] = self.seconds
        with self.world.agreed():
            if self.learner.step % self.config.log_every == 0 or self.learner.step == self.config.steps:
                self._write(record)
            self.watch.on_step(record)

    def _evaluate_if_due(self) -> None:
        """Before the first step, every so often, and after the last; once, even if a checkpoint came in between."""
        step, config = self.learner.step, self.config
        last = step == config.steps
        known = step in self.evaluated
        if known and not (last and self.world.any(self.world.leads and self._lacks_results())):
            return
        if step % config.evaluate_every and not last:
            return
        began = time.perf_counter()
        try:
            limit = config.final_tokens if last else config.evaluate_tokens
            result = self.learner.evaluate(limit, self._asked_to_stop)
            if last:  # before the record, which says that they are there
                self._answer(again=not known)
                with self.world.agreed():
                    if self.world.leads:
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
        with self.world.agreed():
            if not known:
                self._write(record)
            self.watch.on_evaluate(record)
        self.evaluated.add(step)

    def _lacks_results(self) -> bool:
        """Whether a file that the last evaluation leaves is missing or damaged."""
        missing = self.learner.corpus.task is not None and read_recall(self.folder) is None
        return missing or read_documents(self.folder / "documents.npy") is None

    def _answer(self, *, again: bool) -> None:
        """Answer the test grid of a task and write recall.json; a whole one is kept unless it is made `again`."""
        corpus, task, world = self.learner.corpus, self.learner.corpus.task, self.world
        if task is None or not world.any(world.leads and (again or read_recall(self.folder) is None)):
            return
        with world.agreed():
            self.watch.on_notice(f"answering the {len(corpus.test.documents):,} test instances of {corpus.name}")
        cells = by_cell(self.learner.recall(None, self._asked_to_stop))
        with world.agreed():
            if world.leads:
                write_recall(self.folder, RecallResult(task=task, split="test", step=self.learner.step, cells=cells))

    def _checkpoint_if_due(self) -> None:
        every, minutes, step = self.config.checkpoint_every, self.config.checkpoint_minutes, self.learner.step
        by_steps = every is not None and step > 0 and step % every == 0
        late = minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes
        if by_steps or (minutes is not None and self.world.any(self.world.leads and late)):
            self._save()

    def _save(self) -> None:
        """Write a checkpoint unless this step has one; never one that is not finite: it would push out a good one."""
        learner, world = self.learner, self.world
        if learner.step == self.saved_step:
            return
        if (bad := first_of(world.gather(first_bad_parameter(learner.model)))) is not None:
            text = f"the weights after step {learner.step} are not finite: the first is {bad[1]}"
            raise known_to_all(DivergenceError(text))
        with world.agreed():
            if self.metrics is not None:
                self.metrics.sync()
        self.saved = self._write_checkpoint()
        self.saved_step, self.saved_at = learner.step, time.monotonic()
        with world.agreed():
            self.watch.on_checkpoint(self.saved)

    def _write_checkpoint(self) -> Path:
        learner, world = self.learner, self.world
        weights, memory = learner.weights(), learner.memory()
        extra = {
            "config": checksum(self.folder / "config.json"),
            "corpus": learner.corpus.digest,
            "seconds": self.seconds,
            "tokens": learner.step * self.config.batch * self.config.context,
        }
        if learner.sharded:
            return checkpoint.save_sharded(self.folder, learner.step, weights, memory, extra, world)
        path = None
        with world.agreed():
            if world.leads:
                path = str(checkpoint.save(self.folder, learner.step, weights, memory, extra))
        return Path(world.first(path))

    def _finish(self) -> Result:
        self._save()
        weights = self.learner.whole_weights()
        with self.world.agreed():
            if self.world.leads:
                finish(self.folder, weights)
        with self.world.agreed():
            result = self.world.sees(lambda: result_of(self.folder, was_finished=False))
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
