"""`qkflow compare`, and how all studies are shown while they run and presented at the end."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as ProgressBar

from qkflow.cli.console import Console
from qkflow.cli.options import (
    command_line,
    flag,
    flags_given,
    new_folder,
    parse_duration,
    parse_numbers,
    with_absolute_paths,
    without_none,
)
from qkflow.data import CorpusConfig
from qkflow.errors import UsageError
from qkflow.experiment.decisions import Decisions, Round
from qkflow.experiment.design import Design
from qkflow.experiment.executors.base import Executor, make_executor
from qkflow.experiment.planned_runs import PlannedRun
from qkflow.experiment.progress import Observer, Progress
from qkflow.experiment.result import ExperimentResult
from qkflow.experiment.runner import run_experiment
from qkflow.experiment.spec import ExperimentSpec, all_arms, split_arms
from qkflow.experiment.summary import read_result
from qkflow.formatting import escape_unprintable, format_clock
from qkflow.report import export_csv, export_json, terminal, write_report
from qkflow.training.regime import OptimizerName

_LINE_INTERVAL = 10.0
"""Seconds between two lines of progress if the output is not a terminal."""


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare attention mechanisms on a text or a task, with matched models, several seeds and a report.

    For example:
      qkflow compare my.txt                        all mechanisms, ten minutes
      qkflow compare my.txt --arms standard,differential --budget 2h
      qkflow compare my.txt --arms standard,coupled,differential+affine
      qkflow compare enwik8 --arms standard,standard:window=64 --match seconds
      qkflow compare mqar:pairs=4+8+16 --arms standard,qdelta   recall, by number of pairs
      qkflow compare --resume runs/study           after Ctrl-C or a crash
      qkflow compare --extend runs/study --budget 1h  more time, the same error rate
    """

    corpus: Annotated[str | None, tyro.conf.Positional, flag("CORPUS", "python-stdlib")] = None
    """A text file or folder, a named corpus (python-stdlib, enwik8, text8, wikitext-103, hf:NAME), or a recall task
    (mqar, s-niah-1, s-niah-2, s-niah-3) with options, such as mqar:pairs=4+8."""
    arms: Annotated[str | None, flag("A,B,...", "all mechanisms")] = None
    """Mechanisms, the baseline first, such as standard,differential:window=64."""
    budget: Annotated[str | None, flag("TIME", "10m")] = None
    """Time for the whole study, such as 3m, 2h or 3d. Model size, tokens and seeds are chosen to fit."""
    seeds: Annotated[int | None, flag("N", "what fits")] = None
    """The most runs per arm. Arms that are decided earlier have fewer."""
    first_seed: Annotated[int | None, flag("N", "0")] = None
    """The first seed."""
    match: Annotated[Literal["tokens", "flops", "seconds"] | None, flag("{tokens,flops,seconds}", "tokens")] = None
    """What all arms share besides the number of parameters."""
    size: Annotated[str | None, flag("NAME", "what fits")] = None
    """Model size: 100k, 500k, 1m, 5m, 60m, 150m or 350m parameters."""
    train_tokens: Annotated[str | None, flag("N", "what fits")] = None
    """Training tokens per run, such as 2M. With --seeds and --size, no budget applies."""
    rates: Annotated[str | None, flag("LR,LR,...", "by mechanism and size")] = None
    """Learning rates. If there are several, each arm is tuned over all of them first. By default, arms are tuned
    from 30 minutes of budget on."""
    optimizer: Annotated[OptimizerName | None, flag("{muon,adamw}", "muon")] = None
    """Muon for the matrices in blocks and AdamW for the rest, or AdamW for all."""
    context: Annotated[int | None, flag("N", "128 or 256, or the task's")] = None
    """Context length."""
    batch: Annotated[int | None, flag("N", "4 to 64, by tokens")] = None
    """Batch size (sequences)."""
    margin: Annotated[float | None, flag("FRACTION", "0.005")] = None
    """Equivalence margin, as a fraction of the baseline's loss."""
    passes: Annotated[float | None, flag("N", "4")] = None
    """Maximum number of passes over the corpus."""
    executor: Annotated[Literal["local", "ray"] | None, flag("{local,ray}", "local")] = None
    """Where runs are executed: processes on this machine, or a Ray cluster."""
    ray_address: Annotated[str | None, flag("ADDRESS")] = None
    """Address of the Ray cluster. Default: RAY_ADDRESS, or a new cluster on this machine."""
    jobs: Annotated[int | None, flag("N", "one per core")] = None
    """Concurrent runs."""
    threads: Annotated[int | None, flag("N", "1")] = None
    """CPU threads per run."""
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"] | None, flag("{auto,cpu,cuda,mps}", "auto")] = None
    """Device."""
    tokens: Annotated[Literal["bytes", "bpe", "gpt2"] | None, flag("{bytes,bpe,gpt2}", "bytes")] = None
    """Tokenizer: bytes, BPE trained on the corpus, or GPT-2's from local files."""
    vocabulary_files: Annotated[str | None, flag("DIR")] = None
    """Folder with GPT-2's two vocabulary files, for --tokens gpt2."""
    field: Annotated[str | None, flag("NAME", "text")] = None
    """Field of .jsonl lines that holds the text."""
    data_dir: Annotated[str | None, flag("DIR")] = None
    """Folder with the files of named corpora."""
    binary: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Accept bytes that are not text, such as UTF-16 or programs."""
    out: Annotated[Path | None, flag("STUDY", "a new folder in runs/")] = None
    """Folder of the study. If it holds the same study, it is resumed."""
    resume: Annotated[Path | None, flag("STUDY")] = None
    """Resume the study in this folder. No other option is needed."""
    extend: Annotated[Path | None, flag("STUDY")] = None
    """Continue a study that has ended with undecided arms for another --budget."""

    def run(self) -> int:
        """Run the study, print its result and write its report."""
        console = Console()
        executor = make_executor(self.executor or "local", address=self.ray_address)
        if self.resume is not None:
            self._refuse("--resume continues the study unchanged", allowed=("resume",))
            result = run_and_present(None, self.resume, executor=executor, console=console)
        elif self.extend is not None:
            self._refuse("--extend keeps the design of the study", allowed=("extend", "budget"))
            if self.budget is None:
                raise UsageError("--extend needs the additional time: give --budget TIME")
            more = parse_duration(self.budget)
            result = run_and_present(None, self.extend, executor=executor, console=console, more=more)
        else:
            folder = self.out or new_folder(f"compare-{Path(self.corpus or CorpusConfig().source).name}")
            result = run_and_present(self._spec(), folder, executor=executor, console=console, command=command_line())
        return exit_code(result)

    def _refuse(self, reason: str, allowed: tuple[str, ...]) -> None:
        if flags := flags_given(self, exclude=(*allowed, "executor", "ray_address")):
            raise UsageError(f"{reason}: leave out {flags}")

    def _spec(self) -> ExperimentSpec:
        corpus = without_none(
            source=self.corpus,
            tokens=self.tokens,
            vocabulary_files=self.vocabulary_files,
            field=self.field,
            data_dir=self.data_dir,
            binary=self.binary or None,
        )
        return ExperimentSpec(
            data=with_absolute_paths(CorpusConfig(**corpus)),
            arms=all_arms() if self.arms is None else split_arms(self.arms),
            **without_none(
                match=self.match,
                budget=None if self.budget is None else parse_duration(self.budget),
                size=self.size,
                tokens=None if self.train_tokens is None else parse_count(self.train_tokens),
                seeds=self.seeds,
                first_seed=self.first_seed,
                optimizer=self.optimizer,
                learning_rates=None if self.rates is None else parse_numbers(self.rates, "--rates", "1e-3,3e-3"),
                context=self.context,
                batch=self.batch,
                margin=self.margin,
                passes=self.passes,
                jobs=self.jobs,
                threads=self.threads,
                device=self.device,
            ),
        )


def run_and_present(
    spec: ExperimentSpec | None,
    out: Path,
    *,
    executor: Executor,
    console: Console,
    command: Sequence[str] = (),
    quiet: bool = False,
    more: float | None = None,
    reuse: Sequence[Path] = (),
) -> ExperimentResult:
    """Run, resume or extend (by `more` seconds) an experiment with its progress shown, then present the result.

    Runs that the studies in `reuse` have finished with the same config are copied.
    """
    display = ExperimentDisplay(console)
    try:
        result = run_experiment(spec, out, executor=executor, observer=display, command=command, more=more, reuse=reuse)
    finally:
        display.close()
    return present(result, out, console, quiet=quiet)


def exit_code(result: ExperimentResult) -> int:
    """0, or 1 if no run of the study has finished, besides those that tune learning rates."""
    return 0 if any(arm.seeds for arm in result.arms) else 1


def present(result: ExperimentResult, folder: Path, console: Console, *, quiet: bool = False) -> ExperimentResult:
    """Write the report and the tables of a study, and print the answer unless `quiet`."""
    shown = result.rationale or result
    with console.status("writing the report"):
        export_json(shown, folder / "results.json")
        export_csv(shown, folder / "results.csv")
        page = write_report(shown, folder / "report.html")
    if not quiet:
        console.print(terminal(shown))
    console.print(f"report: {page.absolute()}", markup=False, highlight=False, soft_wrap=True)
    return result


class ExperimentDisplay(Observer):
    """Shows a progress bar on a terminal, and lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = ProgressBar(
            TextColumn("runs {task.fields[runs]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[speed]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task = None
        self.last_line = time.monotonic()

    def on_notice(self, text: str) -> None:
        """Print the notice."""
        self.print(text)

    def on_design(self, design: Design) -> None:
        """Start the bar."""
        self.task = self.bar.add_task("study", total=None, runs="", speed="starting")
        self.bar.start()

    def on_progress(self, progress: Progress) -> None:
        """Update the bar, or print a line every few seconds."""
        runs = f"{progress.finished}/{progress.runs}"
        speed = f"{progress.items_per_second:,.0f} {progress.item}/s" if progress.items_per_second else ""
        left = "" if progress.seconds_left is None else f"{format_clock(progress.seconds_left)} left"
        speed = " · ".join(text for text in (speed, left) if text)
        if not self.bar.disable and self.task is not None:
            self.bar.update(self.task, total=progress.all_items, completed=progress.items, runs=runs, speed=speed)
        elif time.monotonic() - self.last_line > _LINE_INTERVAL:
            self.last_line = time.monotonic()
            self.print(
                f"runs {runs}  {progress.items / max(1, progress.all_items):.0%} of all {progress.item}  {speed}"
            )

    def on_round(self, study: Path, design: Design, round_: Round) -> None:
        """Print what is decided, and rewrite the page."""
        verdicts = Decisions(study).verdicts()
        if verdicts:
            kinds = ", ".join(f"{arm} {verdict.kind}" for arm, verdict in verdicts.items())
            self.print(f"round {round_.number}, {_format_seeds(round_)}: {kinds}")
            write_report(read_result(study), study / "report.html")

    def on_failure(self, run: PlannedRun, reason: str) -> None:
        """Print which run failed."""
        self.print(f"failed: {run.arm}, seed {run.seed}: {reason}")

    def close(self) -> None:
        """Remove the bar."""
        self.bar.stop()

    def print(self, text: str) -> None:
        """Print one line, above the bar if there is one."""
        self.console.print(escape_unprintable(text), markup=False, highlight=False, soft_wrap=True)


def _format_seeds(round_: Round) -> str:
    first, last = round_.seeds[0], round_.seeds[-1]
    return f"seed {first}" if first == last else f"seeds {first} to {last}"


def parse_count(text: str) -> int:
    """Parse a number with a suffix.

    >>> parse_count("2M"), parse_count("1.5G"), parse_count("300k"), parse_count("65536")
    (2000000, 1500000000, 300000, 65536)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text.strip().replace("_", ""))
    if match is None:
        raise UsageError(f"expected a number of tokens such as 300k, 2M, 1.5G or 65536, got {text!r}")
    return round(float(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[match[2].lower()])
