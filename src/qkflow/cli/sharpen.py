"""`qkflow sharpen`."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from qkflow.cli.options import command_line, flag, new_folder, parse_numbers, without_none
from qkflow.data.tasks import Task, TaskConfig, TaskName, open_task
from qkflow.errors import UsageError
from qkflow.experiment.sharpen.presets import preset_for
from qkflow.experiment.sharpen.request import RationaleRequest
from qkflow.experiment.sharpen.run import run_sharpen
from qkflow.experiment.sharpen.summarise import read_result
from qkflow.models.one_layer import Form
from qkflow.probes.attention import Pooling
from qkflow.report import export_csv, export_json, terminal, write_report

_LINES_EVERY = 10.0
"""Seconds between two plain lines."""


@dataclass(frozen=True, kw_only=True)
class Sharpen:
    """Find out whether faster query-key learning sharpens attention on a task: one page with the answer.

    Each arm trains W_Q and W_K r times as fast as the rest, and is tuned over the same learning rates. Attention is
    then measured on words that are known to decide the answer.

    For example:
      qkflow sharpen                                   subject-verb agreement, two minutes
      qkflow sharpen --ratios 1,10,100 --growth 40
      qkflow sharpen --task synthetic --form CACO --ratios 1,2,5
      qkflow sharpen --data lm_syneval.jsonl.xz --published
      qkflow sharpen --task hatexplain --data hatexplain/
      qkflow sharpen --task squad --data squad/
    """

    task: TaskName = "agreement"
    """What is to be answered."""
    data: Annotated[str | None, flag("PATH", "the built-in grammar")] = None
    """Its files: Marvin and Linzen's or BLiMP's for agreement, the folder of SQuAD or of HateXplain."""
    ratios: Annotated[str | None, flag("R,R,...", "those of the task")] = None
    """How many times as fast W_Q and W_K learn, an arm each; the first is the baseline."""
    growth: Annotated[str | None, flag("R,R,...")] = None
    """Further arms, whose r grows from 1 to this over the steps."""
    published: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Another arm as it was published: embeddings are sped up too."""
    seeds: int = 5
    """Runs of each arm."""
    rates: Annotated[str | None, flag("LR,LR,...", "those of the task")] = None
    """Learning rates that each arm is tuned over."""
    steps: Annotated[int | None, flag("N", "those of the task")] = None
    """Steps of a run."""
    batch: Annotated[int | None, flag("N", "that of the task")] = None
    """Instances a step."""
    train: Annotated[int | None, flag("N", "all")] = None
    """Training instances, at most."""
    test: Annotated[int | None, flag("N", "all")] = None
    """Test instances, at most."""
    longest: Annotated[int | None, flag("N", "that of the task")] = None
    """Tokens of an instance, at most; longer ones are skipped and counted."""
    mechanism: str = "standard"
    """What attends, as in standard:window=8 or differential."""
    form: Form = "FAFO"
    """For the synthetic task: which circuits are factorised."""
    tau: float = 0.5
    """Mass on the rationale from which on attention counts as confident."""
    pooling: Pooling = "average"
    """How layers become one."""
    part: float = 0.05
    """Part of the tokens that is deleted to see whether an answer rests on them."""
    jobs: Annotated[int | None, flag("N", "one a core")] = None
    """Runs at a time."""
    out: Annotated[Path | None, flag("STUDY", "a new one in runs/")] = None
    """The study's folder; one that holds this very study is continued."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the results as JSON instead of a table."""

    def run(self) -> int:
        """Run the study, then show and write what it found."""
        console = Console(stderr=self.json)
        request = self._request()
        with console.status("reading the task"):
            task = open_task(request.task)
        folder = self.out or new_folder(re.sub(r"[^\w.=-]+", "_", f"sharpen-{self.task}"))
        watch = Watch(console)
        watch.say(_told(task))
        try:
            design = run_sharpen(request, task, folder, notice=watch.say, progress=watch.progress)
        finally:
            watch.close()
        with console.status("reading the runs"):
            found = read_result(folder, design, task, command=command_line())
            export_json(found, folder / "results.json")
            export_csv(found, folder / "results.csv")
            page = write_report(found, folder / "report.html")
        if self.json:
            Console(soft_wrap=True).print((folder / "results.json").read_text(), markup=False, highlight=False, end="")
        else:
            console.print(terminal(found))
        console.print(f"report: {page.absolute()}", markup=False, highlight=False, soft_wrap=True)
        return 0

    def _request(self) -> RationaleRequest:
        data = None if self.data is None else _absolute(self.data)
        task = TaskConfig(
            name=self.task, **without_none(data=data, train=self.train, test=self.test, longest=self.longest)
        )
        ratios = None if self.ratios is None else parse_numbers(self.ratios, "--ratios", "1,5,20")
        return RationaleRequest(
            task=task,
            ratios=ratios or preset_for(task).ratios,
            growths=() if self.growth is None else parse_numbers(self.growth, "--growth", "10,40"),
            published=self.published,
            seeds=self.seeds,
            rates=None if self.rates is None else parse_numbers(self.rates, "--rates", "1e-3,3e-3"),
            steps=self.steps,
            batch=self.batch,
            mechanism=self.mechanism,
            form=self.form,
            tau=self.tau,
            pooling=self.pooling,
            part=self.part,
            jobs=self.jobs,
        )


class Watch:
    """A bar over the whole study on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            TextColumn("runs {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task("study", total=1)
        self.shown_at = time.monotonic()

    def progress(self, done: int, every: int) -> None:
        """Move the bar, or write a line now and then."""
        if not self.bar.disable:
            self.bar.start()
            self.bar.update(self.task, completed=done, total=every)
        elif time.monotonic() - self.shown_at > _LINES_EVERY:
            self.shown_at = time.monotonic()
            self.say(f"runs {done}/{every}")

    def say(self, text: str) -> None:
        """One line, above the bar if there is one."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Give the terminal back."""
        self.bar.stop()


def _told(task: Task) -> str:
    parts = f"{len(task.train):,} to learn from, {len(task.validation):,} to tune on, {len(task.test):,} to test on"
    left = "".join(f"; {count:,} skipped: {reason}" for reason, count in task.skipped.items())
    return f"{task.name}: {parts}{left}"


def _absolute(path: str) -> str:
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError:
        raise UsageError(f"--data {path} names the home of a user that is not there: give the path in full") from None
