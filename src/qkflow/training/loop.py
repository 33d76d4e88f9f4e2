"""The training loop.

    while step < steps:   evaluate if due  ->  checkpoint if due  ->  one step

The weights, the optimizer state and the number of steps are all that one step passes to the next: batches and dropout
are functions of (seed, step). A checkpoint holds these three. When a run is resumed, records in metrics.jsonl after the
checkpoint are dropped and computed again, with the same bits.

| `Objective`  | held-out data                    | evaluated                   | results                           |
|--------------|----------------------------------|-----------------------------|-----------------------------------|
| `validation` | validation split                 | every `evaluate_every` steps| "eval" records                    |
| `final`      | test split of a text             | after the last step         | "test" record                     |
| `test`       | test instances of a recall task  | after the last step         | recall.json                       |

documents.npy holds the losses per document of `final`, or of the last validation if there is no `final`.

If several processes train together, rank 0 writes files and calls callbacks (`_Reporter`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qkflow.errors import CheckpointError, DiskError, DivergenceError, Interrupted
from qkflow.io import checksum
from qkflow.training import checkpoint
from qkflow.training.callbacks import Callback, Measurement, Result, Run
from qkflow.training.distributed import SingleProcess, first_not_none, mark_on_all_ranks
from qkflow.training.divergence import first_bad_parameter
from qkflow.training.evaluate import Evaluation, HeldOut
from qkflow.training.metrics import Metrics, metrics_checksum, read_metrics
from qkflow.training.run_dir import finish, read_documents, read_result, resume_command, write_documents
from qkflow.training.signals import StopRequest
from qkflow.training.step import Learner

SAMPLE_NOTICE = "evaluating a sample"
"""How the notice begins that the last evaluation does not use all held-out tokens."""


class _Reporter:
    """Writes metrics.jsonl and calls the callbacks on rank 0; an error there is raised on all ranks."""

    def __init__(self, folder: Path, callbacks: Sequence[Callback], group: SingleProcess) -> None:
        self.callbacks, self.group = callbacks, group
        path = folder / "metrics.jsonl"
        self.metrics = group.on_main(lambda: Metrics(path))
        records = read_metrics(path) if group.is_main else []
        steps = {kind: [r["step"] for r in records if r["kind"] == kind] for kind in ("eval", "measure", "test")}
        self.recorded: dict[str, set[int]] = {kind: set(known) for kind, known in group.broadcast(steps).items()}
        """The steps that metrics.jsonl has evaluations and measurements of."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record to metrics.jsonl, unless it is an evaluation or a measurement that is there already."""
        known = self.recorded.get(record["kind"])
        if known is None or record["step"] not in known:
            self.group.on_main(lambda: self._write(record))
        if known is not None:
            known.add(record["step"])

    def _write(self, record: Mapping[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(record)

    def call(self, event: str, *arguments: Any) -> None:
        """Call a method of all callbacks."""
        self.group.on_main(lambda: [getattr(callback, event)(*arguments) for callback in self.callbacks])

    def sync(self) -> None:
        """Sync metrics.jsonl to disk."""
        self.group.on_main(lambda: None if self.metrics is None else self.metrics.sync())

    def close(self) -> None:
        """Close metrics.jsonl."""
        if self.metrics is not None:
            self.metrics.close()


class Loop:
    """One session of a run: from its current step to the last, or until it is stopped."""

    def __init__(
        self,
        folder: Path,
        learner: Learner,
        callbacks: Sequence[Callback],
        stop: StopRequest,
        *,
        start: checkpoint.Checkpoint | None = None,
        measurement: Measurement | None = None,
    ) -> None:
        self.folder, self.learner, self.stop, self.measurement = folder, learner, stop, measurement
        self.config, self.objective, self.group = learner.config, learner.objective, learner.group
        self.reporter = _Reporter(folder, callbacks, self.group)
        self.measured_steps = () if measurement is None else measurement.steps(self.config)
        self.last_checkpoint = None if start is None else start.path
        self.checkpoint_step = None if start is None else start.step
        self.checkpoint_time = time.monotonic()
        self.seconds = 0.0 if start is None else float(start.extra["seconds"])

    def run(self) -> Result:
        """Train to the last step. However this ends, the run can be resumed."""
        try:
            return self._train()
        except DivergenceError as error:
            raise DivergenceError(f"{error}. {self._divergence_advice()}") from error
        except DiskError as error:
            command = resume_command(self.folder)
            raise DiskError(error.errno, f"{error.strerror}: free some space, then run `{command}`") from error
        finally:
            self.reporter.close()

    def _train(self) -> Result:
        run = Run(
            folder=self.folder,
            config=self.config,
            model=self.learner.model,
            step=self.learner.step,
            data=f"{self.objective.name} ({self.objective.digest[:12]})",
            processes=self.group.size,
            parallel=self.group.kind,
        )
        self.reporter.call("on_start", run)
        try:
            self._evaluate_if_due()
            self._measure_if_due()
            while self.learner.step < self.config.steps:
                self._checkpoint_if_due()
                self._step()
                self._evaluate_if_due()
                self._measure_if_due()
        except Interrupted:
            self._checkpoint()
            raise self._interruption() from None
        return self._finish()

    def _step(self) -> None:
        record = self.learner.train_step(self._should_stop)
        self.seconds += record["seconds"]
        record["seconds"] = self.seconds
        if self.learner.step % self.config.log_every == 0 or self.learner.step == self.config.steps:
            self.reporter.write(record)
        self.reporter.call("on_step", record)

    def _evaluate_if_due(self) -> None:
        """Evaluate before the first step, every `evaluate_every` steps and after the last, each once."""
        step, config = self.learner.step, self.config
        is_last = step == config.steps
        if step in self.reporter.recorded["eval"] and not (is_last and self._lacks_results()):
            return
        if step % config.evaluate_every and not is_last:
            return
        started = time.perf_counter()
        try:
            final = self.objective.final(config.final_tokens) if is_last else None
            limit = config.final_tokens if is_last and final is None else config.evaluate_tokens
            held_out = self.objective.validation(limit)
            if is_last:
                self._say_sample(held_out if final is None else final)
            evaluation = self._evaluate(held_out)
            if is_last:  # the files come before the record, which says that they exist
                self._evaluate_test()
                documents = evaluation.documents if final is None else self._evaluate_final(final)
                self.group.on_main(lambda: write_documents(self.folder / "documents.npy", documents))
        except DivergenceError as error:
            raise DivergenceError(f"after step {step}, {error}") from error
        record = {
            "kind": "eval",
            "step": step,
            "tokens": self.learner.n_tokens(),
            **evaluation.summary(),
            "seconds": self.seconds,
            "evaluation_seconds": time.perf_counter() - started,
        }
        self.reporter.write(record)
        self.reporter.call("on_evaluate", record)

    def _evaluate(self, held_out: HeldOut) -> Evaluation:
        return self.learner.evaluate(
            held_out, self._should_stop, lambda done, total: self.reporter.call("on_evaluation_progress", done, total)
        )

    def _say_sample(self, held_out: HeldOut) -> None:
        """Notify the user if the last evaluation is on a sample."""
        n_tokens, available = held_out.n_tokens(), held_out.n_available()
        if n_tokens < available:
            self.reporter.call("on_notice", f"{SAMPLE_NOTICE} of {n_tokens:,} of {available:,} held-out tokens")

    def _evaluate_final(self, held_out: HeldOut) -> np.ndarray:
        """Evaluate the test documents, and return their losses."""
        evaluation = self._evaluate(held_out)
        step, tokens = self.learner.step, self.learner.n_tokens()
        self.reporter.write({"kind": "test", "step": step, "tokens": tokens, **evaluation.summary()})
        return evaluation.documents

    def _evaluate_test(self) -> None:
        """Evaluate the test data of a recall task; complete results of an earlier session are kept."""
        is_done = self.learner.step in self.reporter.recorded["eval"] and self._has_test_results()
        if is_done or (held_out := self.objective.test(None)) is None:
            return
        text = f"evaluating the {len(held_out.sizes):,} test instances of {self.objective.name}"
        self.reporter.call("on_notice", text)
        evaluation = self._evaluate(held_out)
        self.group.on_main(lambda: self.objective.write_test(self.folder, self.learner.step, evaluation))

    def _has_test_results(self) -> bool:
        return bool(self.group.broadcast(self.objective.has_test_results(self.folder)))

    def _lacks_results(self) -> bool:
        """Whether a file of the last evaluation is missing or damaged."""
        has_documents = read_documents(self.folder / "documents.npy") is not None
        return not (self.group.broadcast(has_documents) and self._has_test_results())

    def _measure_if_due(self) -> None:
        step, measurement = self.learner.step, self.measurement
        if measurement is None or step not in self.measured_steps or step in self.reporter.recorded["measure"]:
            return
        if self._should_stop():
            raise Interrupted(f"stopped after step {step}")
        self.learner.model.eval()
        values = self.group.on_main(lambda: _finite_json(measurement.measure(self.learner.model, step), step))
        self.reporter.write({"kind": "measure", "step": step, **(values or {})})

    def _checkpoint_if_due(self) -> None:
        every, minutes, step = self.config.checkpoint_every, self.config.checkpoint_minutes, self.learner.step
        is_due = every is not None and step > 0 and step % every == 0
        if not is_due and minutes is not None:
            is_late = time.monotonic() - self.checkpoint_time >= 60 * minutes
            is_due = self.group.any(self.group.is_main and is_late)
        if is_due:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Write a checkpoint unless this step has one. Non-finite weights raise: they must not replace good ones."""
        learner = self.learner
        if learner.step == self.checkpoint_step:
            return
        if (name := first_not_none(self.group.gather(first_bad_parameter(learner.model)))) is not None:
            text = f"the weights after step {learner.step} are not finite: the first is {name}"
            raise mark_on_all_ranks(DivergenceError(text))
        self.reporter.sync()
        extra = {
            "config": checksum(self.folder / "config.json"),
            "data": self.objective.digest,
            "metrics": metrics_checksum(self.folder / "metrics.jsonl"),
            "seconds": self.seconds,
            "tokens": learner.n_tokens(),
        }
        self.last_checkpoint = checkpoint.save(
            self.folder, learner.step, learner.weights(), learner.optimizer_state(), extra, self.group
        )
        self.checkpoint_step, self.checkpoint_time = learner.step, time.monotonic()
        self.reporter.call("on_checkpoint", self.last_checkpoint)

    def _finish(self) -> Result:
        self._checkpoint()
        weights = self.learner.gathered_weights()
        if (measurement := self.measurement) is not None:
            self.learner.model.eval()
            self.group.on_main(lambda: measurement.finish(self.learner.model, self.folder))
        self.group.on_main(lambda: finish(self.folder, weights))
        with self.group.raise_on_all_ranks():
            result = self.group.wait_for_file(lambda: read_result(self.folder, was_finished=False))
            if result is None:
                raise CheckpointError(
                    f"the last evaluation was removed from {self.folder} during training: "
                    f"run `{resume_command(self.folder)}` to repeat it"
                )
        self.reporter.call("on_end", result)
        return result

    def _should_stop(self) -> bool:
        """Whether a stop was requested on any rank."""
        return self.group.any(self.stop())

    def _interruption(self) -> Interrupted:
        step, steps, command = self.learner.step, self.config.steps, resume_command(self.folder)
        error = Interrupted(f"stopped after step {step} of {steps}, checkpoint written: resume with `{command}`")
        error.signal = first_not_none(self.group.gather(self.stop.signal)) or error.signal
        return mark_on_all_ranks(error)

    def _divergence_advice(self) -> str:
        path = self.last_checkpoint
        where = "There is no checkpoint yet" if path is None else f"The last good checkpoint is {path}"
        return (
            f"{where}; `{resume_command(self.folder)}` resumes from there, but reaches the same numbers again: "
            f"start a new run with a lower learning rate (--lr, was {self.config.lr:g})"
        )


def _finite_json(values: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The values of a measurement, which must be finite to be written as JSON."""
    try:
        json.dumps(dict(values), allow_nan=False)
    except ValueError as error:
        raise DivergenceError(f"the measurement after step {step} is not finite: {error}") from error
    return dict(values)
