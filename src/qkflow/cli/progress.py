"""The progress of a training run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, cast

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from qkflow.cli.console import Console
from qkflow.formatting import escape_unprintable, format_accuracy
from qkflow.models import DecoderConfig
from qkflow.training import Callback, Result, Run
from qkflow.training.loop import SAMPLE_NOTICE

_LINES_EVERY = 5.0
"""Seconds between plain lines."""


class TrainProgress(Callback):
    """Shows the loss, tokens per second and the remaining time, and prints every evaluation."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task = None
        self.steps = 0
        self.shown_at = self.said_at = 0.0

    def on_start(self, run: Run) -> None:
        """Print model, corpus and run, and start the bar."""
        config, model = run.config, cast(DecoderConfig, run.config.model)
        names = ", ".join(dict.fromkeys(model.mechanisms))
        count = sum(parameter.numel() for parameter in run.model.parameters())
        shape = f"width {model.width}, {model.layers} layers, {model.heads} heads"
        self.say(f"model   {names}, {count:,} parameters: {shape}")
        self.say(f"data    {run.data}")
        shared = "" if run.processes == 1 else f" on {run.processes} processes ({run.parallel})"
        self.say(f"run     {run.folder}: {config.steps:,} steps of {config.batch} x {config.context} tokens{shared}")
        if run.step:
            self.say(f"resumed after step {run.step:,}")
        self.steps = config.steps
        self.task = self.bar.add_task("train", total=config.steps, completed=run.step, status="evaluating ·")
        self.bar.start()

    def on_step(self, record: Mapping[str, Any]) -> None:
        """Update the bar, or print a line every few seconds."""
        speed = record["tokens"] / record["seconds"]  # without evaluations and checkpoints
        if not self.bar.disable and self.task is not None:
            status = f"loss {record['loss']:.3f} · {speed:,.0f} tokens/s ·"
            self.bar.update(self.task, completed=record["step"], status=status)
        elif time.monotonic() - self.shown_at > _LINES_EVERY:
            self.shown_at = time.monotonic()
            left = (self.steps - record["step"]) * record["seconds"] / record["step"]
            step = f"step {record['step']:,}/{self.steps:,}"
            self.say(f"{step}  loss {record['loss']:.3f}  {speed:,.0f} tokens/s  {left:.0f} s left")

    def on_evaluation_progress(self, done: int, total: int) -> None:
        """Update the bar, or print a line every few seconds."""
        status = f"evaluating {done / total:.0%} of {total:,} tokens"
        if not self.bar.disable and self.task is not None:
            self.bar.update(self.task, status=f"{status} ·")
        elif time.monotonic() - self.said_at > _LINES_EVERY:
            self.say(status)

    def on_evaluate(self, record: Mapping[str, Any]) -> None:
        """Print the held-out results."""
        perplexity = record["perplexity"]
        if "accuracy" in record:
            unit, extra = "answer token", f"  accuracy {format_accuracy(record['accuracy'])}"
        else:
            unit, extra = "byte", "" if perplexity is None else f"  perplexity {perplexity:,.2f} per token"
        self.say(f"step {record['step']:>6,}  held-out {record['bits_per_byte']:.3f} bits per {unit}{extra}")

    def on_notice(self, text: str) -> None:
        """Print a message for the user."""
        hint = " (--evaluate-all: all of them)" if text.startswith(SAMPLE_NOTICE) else ""
        self.say(f"note: {text}{hint}")

    def on_end(self, result: Result) -> None:
        """Remove the bar."""
        self.close()

    def close(self) -> None:
        """Stop the bar."""
        self.bar.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.said_at = time.monotonic()
        self.console.print(escape_unprintable(text), markup=False, highlight=False, soft_wrap=True)
