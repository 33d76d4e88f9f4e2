"""`qkflow reproduce`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from qkflow.cli.compare import run_and_present
from qkflow.cli.options import command_line, flag, new_folder, parse_duration, with_absolute_paths, without_none
from qkflow.errors import UsageError
from qkflow.experiment.executors.base import make_executor
from qkflow.experiment.summary import ExperimentResult
from qkflow.recipes import RECIPES, Recipe, direction, measured, recipe


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Run the study behind a published table, and print what was published beside what was measured.

    For example:
      qkflow reproduce                                  the recipes there are
      qkflow reproduce differential                     ten minutes, on built-in text
      qkflow reproduce coupled-60m enwik8 --budget 1h
      qkflow reproduce coupled-60m --scale paper --vocabulary-files gpt2 --executor ray
    """

    name: Annotated[str | None, tyro.conf.Positional, flag("NAME")] = None
    """The recipe; without one, they are listed."""
    corpus: Annotated[str | None, tyro.conf.Positional, flag("CORPUS", "the recipe's own")] = None
    """Another text than the recipe's: a file, a folder or a name, read as the same kind of tokens."""
    scale: Literal["laptop", "paper"] = "laptop"
    """The paper's size, or what a laptop does in minutes."""
    budget: Annotated[str | None, flag("TIME")] = None
    """Another time than the recipe's, for --scale laptop."""
    executor: Annotated[Literal["local", "ray"], flag("{local,ray}", "local")] = "local"
    """Processes of this machine, or a Ray cluster."""
    data_dir: Annotated[str | None, flag("DIR")] = None
    """Where named corpora lie."""
    vocabulary_files: Annotated[str | None, flag("DIR")] = None
    """Where GPT-2's two vocabulary files lie, for --scale paper."""
    out: Annotated[Path | None, flag("STUDY", "a new one in runs/")] = None
    """The study's folder; one that holds this very study is continued."""

    def run(self) -> int:
        """Run the recipe."""
        console = Console()
        if self.name is None:
            console.print(_listed())
            return 0
        found = recipe(self.name)
        if self.vocabulary_files is not None and self.scale == "laptop":
            raise UsageError("--vocabulary-files is for --scale paper: a laptop's scale reads bytes")
        if self.vocabulary_files is not None and found.corpora[self.scale].tokens != "gpt2":
            raise UsageError(f"--vocabulary-files is for GPT-2's tokens: {self.name} does not read them")
        corpus = replace(
            found.corpus(self.scale, self.corpus),
            **without_none(data_dir=self.data_dir, vocabulary_files=self.vocabulary_files),
        )
        request = found.spec(self.scale, with_absolute_paths(corpus))
        if self.budget is not None:
            if self.scale == "paper":
                raise UsageError("--budget is for --scale laptop: the paper's scale has its own tokens and seeds")
            request = replace(request, budget=parse_duration(self.budget))
        out = self.out or new_folder(f"reproduce-{self.name}-{self.scale}")
        summary = run_and_present(
            request, out, executor=make_executor(self.executor), console=console, command=command_line()
        )
        console.print(beside(found, summary))
        if found.ratios:
            console.print(ratios_beside(found, summary))
        for line in about(found, summary.corpus):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return 0


def beside(found: Recipe, summary: ExperimentResult) -> Table:
    """Published beside measured, one row an arm."""
    table = _table(found.title, ("arm", "published", "measured", "interval", ""))
    baseline = next(arm for arm in summary.arms if arm.name == summary.baseline)
    verdicts = {verdict.arm: verdict for verdict in summary.verdicts}
    for comparison in summary.comparisons:
        difference, arm = comparison.difference, comparison.arm
        here = interval = "-"
        if difference is not None and baseline.mean:
            here = f"{difference.mean / baseline.mean:+.2%}"
            if difference.low is not None and difference.high is not None:
                interval = f"{difference.low / baseline.mean:+.2%} to {difference.high / baseline.mean:+.2%}"
        table.add_row(arm, _published(found, arm), here, interval, direction(found.finding(arm), verdicts[arm]))
    table.caption = "change of the loss against the baseline's; perplexities of other tokens do not compare"
    table.caption_justify = "left"
    return table


def ratios_beside(found: Recipe, summary: ExperimentResult) -> Table:
    """What was published besides the loss, beside what was measured."""
    table = _table("Besides the loss", ("ratio", "published", "measured", "interval"))
    for ratio in found.ratios:
        value = interval = "-"
        if (here := measured(ratio, summary)) is not None:
            value = f"{here.value:.2f}"
            if here.low is not None and here.high is not None:
                interval = f"{here.low:.2g} to {here.high:.2g}"
        table.add_row(f"{ratio.quantity}, {ratio.arm} / {ratio.against}", f"{ratio.published:g}", value, interval)
    return table


def about(found: Recipe, corpus: str) -> tuple[str, ...]:
    """What a reader of the tables must know: the paper's own figures, where they are from, and what is not theirs."""
    arms: dict[str, list[str]] = {}
    for arm, claim in found.table.items():
        if claim is not None:
            arms.setdefault(claim.words, []).append(arm)
    lines = [f"published: {found.source}", *(f"  {', '.join(named)}: {words}" for words, named in arms.items())]
    told = {"derived": found.derived, "unclear": found.unclear, "ours": found.ours}
    lines += [f"{name}: {text}" for name, text in told.items() if text is not None]
    return (*lines, f"published of {found.text}, measured on {corpus}")


def _published(found: Recipe, arm: str) -> str:
    """The change of the loss: in parts of it, else in nats a token, else only which way it went."""
    if (parts := found.published(arm)) is not None:
        return " to ".join(dict.fromkeys(f"{end:+.2%}" for end in parts))
    if (nats := found.loss_change(arm)) is not None:
        return " to ".join(dict.fromkeys(f"{end:+.4f}" for end in nats)) + " nats a token"
    return found.finding(arm)


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or not column else "right")
    return table


def _listed() -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    table.add_column("published table")
    for name, make in RECIPES.items():
        table.add_row(name, make().title)
    return table
