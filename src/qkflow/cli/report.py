"""`qkflow report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from qkflow.cli.compare import present
from qkflow.experiment.summary import read_result


@dataclass(frozen=True, kw_only=True)
class Report:
    """Make the page and the tables of a study again, from its folder; also of one that is not finished.

    For example:
      qkflow report runs/study
    """

    study: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="STUDY")]
    """A folder that `qkflow compare` made."""

    def run(self) -> int:
        """Write report.html, results.json and the tables as CSV into the folder, and show the answer."""
        present(read_result(self.study), self.study, Console())
        return 0
