"""`qkflow judge`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from qkflow.cli.console import Console
from qkflow.cli.options import flag
from qkflow.io import write_file
from qkflow.judge import judge
from qkflow.report.html import render
from qkflow.report.judgement import judgement_report, judgement_terminal


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Judge runs made with any framework: which arms are better, worse or equivalent, and how many seeds would decide.

    RESULTS is a CSV file with the columns arm, seed and loss, and optionally block and weight (the loss of each
    held-out block). Or it is a folder of runs: ARM/seed-0/metrics.jsonl.

    For example:
      qkflow judge results.csv
      qkflow judge accuracies.csv --baseline adamw --higher-is-better --margin-absolute 0.002
      qkflow judge growing.csv --look 2
    """

    results: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RESULTS")]
    """CSV file, or folder of runs."""
    baseline: Annotated[str | None, flag("NAME", "standard, or else the first arm")] = None
    """The arm to compare with."""
    margin: Annotated[float | None, flag("FRACTION", "0.005")] = None
    """Differences within this fraction of the baseline's mean are equivalent."""
    margin_absolute: Annotated[float | None, flag("DIFFERENCE")] = None
    """The same in the unit of the losses, instead of --margin."""
    higher_is_better: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """The numbers are scores, such as accuracies, and not losses."""
    look: Annotated[int | None, flag("K", "the table is judged once")] = None
    """If a growing table is judged repeatedly, the number of this look, from 1. Each look spends half of the remaining
    error rate."""
    error_rate: float = 0.05
    """The chance of a false better or worse over all arms and looks."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON."""
    out: Annotated[Path | None, flag("PAGE.html")] = None
    """Write a page with the verdicts and every run."""

    def run(self) -> int:
        """Print the verdicts; notices go to standard error."""
        result = judge(
            self.results,
            baseline=self.baseline,
            margin=self.margin,
            margin_absolute=self.margin_absolute,
            higher_is_better=self.higher_is_better,
            look=self.look,
            error_rate=self.error_rate,
        )
        if self.out is not None:
            write_file(self.out, render(judgement_report(result, str(self.results))))
        errors = Console(stderr=True, soft_wrap=True, highlight=False)
        for notice in result.notices:
            errors.print(f"note: {notice}", markup=False)
        if self.json:
            text = json.dumps(result.to_dict(), indent=2, allow_nan=False)
            Console(highlight=False).print(text, markup=False, soft_wrap=True)
        else:
            Console(highlight=False).print(judgement_terminal(result))
        return 0
