"""How others watch a study: it calls, and imports nothing of theirs."""

from __future__ import annotations

from qkflow.experiment.design import Design, PlannedRun
from qkflow.experiment.progress import Progress


class Observer:
    """A watcher that does nothing: override what you need. Called in the process that runs the study.

    >>> class Printer(Observer):
    ...     def on_notice(self, text):
    ...         print(text)
    """

    def on_notice(self, text: str) -> None:
        """Something the user should read, on one line."""

    def on_design(self, design: Design) -> None:
        """The design is written, or read from the folder of a study that is gone on with."""

    def on_progress(self, progress: Progress) -> None:
        """About twice a second, and whenever a run has ended."""

    def on_failure(self, job: PlannedRun, reason: str) -> None:
        """A run has failed, and is not tried again in this session; the others go on."""
