"""`qkflow report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from qkflow.cli.compare import present
from qkflow.cli.console import Console
from qkflow.experiment.summary import read_result


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write the report and the tables of a study again; the study may be unfinished.

    For example:
      qkflow report runs/study
    """

    study: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="STUDY")]
    """Study folder of `qkflow compare`."""

    def run(self) -> int:
        """Write report.html, results.json and results*.csv to the folder, and print the verdicts."""
        present(read_result(self.study), self.study, Console())
        return 0
