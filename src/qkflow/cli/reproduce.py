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
from qkflow.experiment.result import ExperimentResult
from qkflow.recipes import RECIPES, Recipe, direction, measure_ratio, recipe


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Run the study behind a published table, and print what was published beside what was measured.

    For example:
      qkflow reproduce                                  list the recipes
      qkflow reproduce differential                     ten minutes, on built-in text
      qkflow reproduce coupled-60m enwik8 --budget 1h
      qkflow reproduce coupled-60m --scale paper --vocabulary-files gpt2 --executor ray
    """

    name: Annotated[str | None, tyro.conf.Positional, flag("NAME")] = None
    """Name of the recipe. Default: list all recipes."""
    corpus: Annotated[str | None, tyro.conf.Positional, flag("CORPUS", "the recipe's own")] = None
    """Another text: a file, a folder or a name, with the tokenizer of the recipe."""
    scale: Literal["laptop", "paper"] = "laptop"
    """The size of the paper, or what a laptop can do in minutes."""
    budget: Annotated[str | None, flag("TIME")] = None
    """Total time at --scale laptop; default: 5 minutes per arm."""
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
        if self.name is None:
            table = _table(None, ("recipe", "published table"))
            for name, listed in RECIPES.items():
                table.add_row(name, listed.title)
            console.print(table)
            return 0
        chosen = recipe(self.name)
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
        return 0


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
    for arm, claim in chosen.table.items():
        if claim is not None:
            arms.setdefault(claim.text, []).append(arm)
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
