"""`qkflow reproduce`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from qkflow.cli.options import command_line, findable, flag, new_folder, seconds
from qkflow.cli.studies import conduct
from qkflow.data import CorpusConfig
from qkflow.errors import UsageError
from qkflow.recipes import RECIPES, Recipe, direction, recipe
from qkflow.study.engine import make_engine
from qkflow.study.summary import Summary


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Run the study behind a published table, and print what was published beside what was measured.

    For example:
      qkflow reproduce                                  the recipes there are
      qkflow reproduce differential                     ten minutes, on built-in text
      qkflow reproduce differential enwik8 --budget 1h
      qkflow reproduce differential --scale paper --engine ray
    """

    name: Annotated[str | None, tyro.conf.Positional, flag("NAME")] = None
    """The recipe; without one, they are listed."""
    corpus: Annotated[str | None, tyro.conf.Positional, flag("CORPUS", "the recipe's own")] = None
    """Another text than the recipe's."""
    scale: Literal["laptop", "paper"] = "laptop"
    """The paper's size, or what a laptop does in minutes."""
    budget: Annotated[str | None, flag("TIME")] = None
    """Another time than the recipe's, for --scale laptop."""
    engine: Annotated[Literal["local", "ray"], flag("{local,ray}", "local")] = "local"
    """Processes of this machine, or a Ray cluster."""
    data_dir: Annotated[str | None, flag("DIR")] = None
    """Where named corpora lie."""
    out: Annotated[Path | None, flag("STUDY", "a new one in runs/")] = None
    """The study's folder; one that holds this very study is continued."""

    def run(self) -> int:
        """Run the recipe."""
        console = Console()
        if self.name is None:
            console.print(_listed())
            return 0
        found = recipe(self.name)
        own = found.corpora[self.scale]
        corpus = replace(own, source=self.corpus or own.source, data_dir=self.data_dir or own.data_dir)
        if self.corpus is not None:
            corpus = CorpusConfig(source=self.corpus, data_dir=self.data_dir)
        request = found.request(self.scale, findable(corpus))
        if self.budget is not None:
            if self.scale == "paper":
                raise UsageError("--budget is for --scale laptop: the paper's scale has its own tokens and seeds")
            request = replace(request, budget=seconds(self.budget))
        out = self.out or new_folder(f"reproduce-{self.name}-{self.scale}")
        summary = conduct(request, out, engine=make_engine(self.engine), console=console, command=command_line())
        console.print(beside(found, summary))
        for line in (f"published: {found.source}", f"derived: {found.derived}", f"ours: {found.ours}"):
            if not line.endswith("None"):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        return 0


def beside(found: Recipe, summary: Summary) -> Table:
    """Published beside measured, one row an arm."""
    table = Table(title=found.title, title_justify="left", box=None, pad_edge=False)
    for column in ("arm", "published", "measured", "interval", ""):
        table.add_column(column, justify="left" if column in ("arm", "") else "right")
    baseline = next(arm for arm in summary.arms if arm.name == summary.baseline)
    verdicts = {verdict.arm: verdict for verdict in summary.verdicts}
    for comparison in summary.comparisons:
        difference, arm = comparison.difference, comparison.arm
        measured = interval = "-"
        if difference is not None and baseline.mean:
            measured = f"{difference.mean / baseline.mean:+.2%}"
            if difference.low is not None and difference.high is not None:
                interval = f"{difference.low / baseline.mean:+.2%} to {difference.high / baseline.mean:+.2%}"
        published = found.published(arm)
        table.add_row(arm, f"{published:+.2%}", measured, interval, direction(published, verdicts[arm]))
    table.caption = "change of the loss against the baseline; perplexities of other tokens do not compare"
    table.caption_justify = "left"
    return table


def _listed() -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("recipe")
    table.add_column("published table")
    for name, make in RECIPES.items():
        table.add_row(name, make().title)
    return table
