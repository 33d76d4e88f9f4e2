"""`qkflow reproduce`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.table import Table

from qkflow.cli.claims import claims_table, run_all, run_claim
from qkflow.cli.compare import exit_code, run_and_present
from qkflow.cli.console import Console
from qkflow.cli.options import (
    command_line,
    flag,
    flags_given,
    new_folder,
    parse_duration,
    with_absolute_paths,
    without_none,
)
from qkflow.errors import UsageError, unknown
from qkflow.experiment.executors.base import make_executor
from qkflow.experiment.result import ExperimentResult
from qkflow.recipes import CLAIMS, RECIPES, Claim, Recipe, claim, direction, is_claim, measure_ratio, recipe


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Test a published claim, or run the study behind a published table.

    For example:
      qkflow reproduce --list                           the claims and the tables
      qkflow reproduce coupled-better --budget 15m      is the claim true here?
      qkflow reproduce --all --data-dir data --budget 8h    every claim; run it again to continue
      qkflow reproduce differential                     ten minutes, on built-in text
      qkflow reproduce coupled-60m enwik8 --budget 1h
      qkflow reproduce coupled-60m --scale paper --vocabulary-files gpt2 --executor ray
    """

    name: Annotated[str | None, tyro.conf.Positional, flag("NAME")] = None
    """Name of a claim or of a table. Default: list them."""
    corpus: Annotated[str | None, tyro.conf.Positional, flag("CORPUS", "its own")] = None
    """Another text: a file, a folder or a name, with the same tokenizer."""
    list: bool = False
    """List the claims and the tables."""
    all: bool = False
    """Test all claims, in one folder that can be resumed."""
    controls: bool = False
    """Also run the control studies of a claim, and those at larger sizes."""
    scale: Literal["laptop", "paper"] = "laptop"
    """Minutes on a laptop, or the size of the paper."""
    budget: Annotated[str | None, flag("TIME")] = None
    """Total time, with shorter runs (--all: with full runs, as many as fit). Default: the full studies of a claim; 5
    minutes per arm of a table."""
    executor: Annotated[Literal["local", "ray"], flag("{local,ray}", "local")] = "local"
    """Run on this machine or on a Ray cluster."""
    data_dir: Annotated[str | None, flag("DIR")] = None
    """Folder with the files of named corpora."""
    vocabulary_files: Annotated[str | None, flag("DIR")] = None
    """Folder with GPT-2's two vocabulary files, for --scale paper."""
    out: Annotated[Path | None, flag("STUDY", "a new one in runs/")] = None
    """Study folder; an interrupted study is resumed."""

    def run(self) -> int:
        """Run the recipe, or list all recipes."""
        console = Console()
        if self.all:
            self._refuse("--all tests every claim on its own text", ("all", "data_dir", "out", "budget"))
            self._refuse_paper_scale()
            out = self.out or Path("runs/claims")
            budget = None if self.budget is None else parse_duration(self.budget)
            run_all(out, executor=make_executor(self.executor), console=console, data_dir=self.data_dir, budget=budget)
            return 0
        if self.name is None or self.list:
            console.print(claims_table())
            table = _table(None, ("recipe", "published table"))
            for name, listed in RECIPES.items():
                table.add_row(name, listed.title)
            console.print("", table)
            return 0
        if is_claim(self.name):
            return self._run_claim(claim(self.name), console)
        if self.name not in RECIPES:
            raise unknown("claim or table", self.name, [*(listed.name for listed in CLAIMS), *RECIPES])
        if self.controls:
            raise UsageError(f"--controls is for claims, but {self.name} is a table: leave it out")
        return self._run_recipe(recipe(self.name), console)

    def _refuse(self, reason: str, allowed: tuple[str, ...]) -> None:
        if flags := flags_given(self, exclude=(*allowed, "executor", "scale")):
            raise UsageError(f"{reason}: leave out {flags.replace('--name', 'NAME')}")

    def _refuse_paper_scale(self) -> None:
        if self.scale != "laptop" or self.vocabulary_files is not None:
            raise UsageError("claims are tested at laptop scale with bytes: leave out --scale and --vocabulary-files")

    def _run_claim(self, chosen: Claim, console: Console) -> int:
        self._refuse_paper_scale()
        run_claim(
            chosen,
            self.out or new_folder(f"reproduce-{chosen.name}"),
            executor=make_executor(self.executor),
            console=console,
            corpus=self.corpus,
            data_dir=self.data_dir,
            budget=None if self.budget is None else parse_duration(self.budget),
            controls=self.controls,
        )
        return 0

    def _run_recipe(self, chosen: Recipe, console: Console) -> int:
        corpus = chosen.corpus(self.scale, self.corpus)
        if self.vocabulary_files is not None and corpus.tokens != "gpt2":
            raise UsageError(
                f"--vocabulary-files is for GPT-2's tokens, but {self.name} at --scale {self.scale} uses "
                f"{corpus.tokens}: omit it"
            )
        if self.budget is not None and self.scale == "paper":
            raise UsageError("--budget is for --scale laptop: the scale of the paper has fixed tokens and seeds")
        corpus = replace(corpus, **without_none(data_dir=self.data_dir, vocabulary_files=self.vocabulary_files))
        spec = chosen.spec(self.scale, with_absolute_paths(corpus))
        if self.budget is not None:
            spec = replace(spec, budget=parse_duration(self.budget))
        out = self.out or new_folder(f"reproduce-{self.name}-{self.scale}")
        executor = make_executor(self.executor)
        result = run_and_present(spec, out, executor=executor, console=console, command=command_line())
        console.print(comparison_table(chosen, result))
        if chosen.ratios:
            console.print(ratio_table(chosen, result))
        for line in notes(chosen, result.data):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return exit_code(result)


def comparison_table(chosen: Recipe, result: ExperimentResult) -> Table:
    """Published and measured changes of the loss, one row per arm."""
    table = _table(chosen.title, ("arm", "published", "measured", "interval", ""))
    baseline = next(arm for arm in result.arms if arm.name == result.baseline)
    verdicts = {verdict.arm: verdict for verdict in result.verdicts}
    for comparison in result.comparisons:
        difference, arm = comparison.difference, comparison.arm
        measured = interval = "-"
        if difference is not None and baseline.mean:
            measured = f"{difference.mean / baseline.mean:+.2%}"
            if difference.low is not None and difference.high is not None:
                interval = f"{difference.low / baseline.mean:+.2%} to {difference.high / baseline.mean:+.2%}"
        published = chosen.finding(arm)
        if (relative := chosen.relative_change(arm)) is not None:
            published = " to ".join(dict.fromkeys(f"{end:+.2%}" for end in relative))
        elif (nats := chosen.loss_change(arm)) is not None:
            published = " to ".join(dict.fromkeys(f"{end:+.4f}" for end in nats)) + " nats per token"
        table.add_row(arm, published, measured, interval, direction(chosen.finding(arm), verdicts[arm]))
    table.caption = "change of the loss relative to the baseline; perplexities depend on the tokenizer"
    table.caption_justify = "left"
    return table


def ratio_table(chosen: Recipe, result: ExperimentResult) -> Table:
    """Published and measured ratios, such as training time."""
    table = _table("Besides the loss", ("ratio", "published", "measured", "interval"))
    for ratio in chosen.ratios:
        value = interval = "-"
        if (measured := measure_ratio(ratio, result)) is not None:
            value = f"{measured.value:.2f}"
            if measured.low is not None and measured.high is not None:
                interval = f"{measured.low:.2g} to {measured.high:.2g}"
        table.add_row(f"{ratio.quantity}, {ratio.arm} / {ratio.against}", f"{ratio.published:g}", value, interval)
    return table


def notes(chosen: Recipe, corpus: str) -> tuple[str, ...]:
    """The notes below the tables: the figures of the paper, and what is derived, unclear or ours."""
    arms: dict[str, list[str]] = {}
    for arm, figure in chosen.table.items():
        if figure is not None:
            arms.setdefault(figure.text, []).append(arm)
    lines = [f"published: {chosen.source}", *(f"  {', '.join(names)}: {text}" for text, names in arms.items())]
    remarks = {"derived": chosen.derived, "unclear": chosen.unclear, "ours": chosen.ours}
    lines += [f"{name}: {text}" for name, text in remarks.items() if text is not None]
    return (*lines, f"published on {chosen.text}, measured on {corpus}")


def _table(title: str | None, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        is_text = number == 0 or column in ("", "published table")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=column == "recipe")
    return table
