"""Which questions of a task were answered right. Every token of an answer counts: half an answer is a wrong one."""

from __future__ import annotations

import numpy as np

from qkflow.data import Split, Window
from qkflow.data.text.corpus import CELL_DTYPE

ANSWERED = np.dtype([*CELL_DTYPE.descr, ("questions", "<i8"), ("right", "<i8")])
"""One instance of a task: its cell of the grid, its questions, and how many of them were answered right."""


class Marks:
    """The marks of every instance of a task's split."""

    def __init__(self, split: Split) -> None:
        self.answers, places = np.asarray(split.answers), np.asarray(split.cells)
        self.of_document = np.searchsorted(np.ascontiguousarray(self.answers[:, 0]), split.documents)
        self.cells = np.zeros(len(places), ANSWERED)
        """One row an instance."""
        for name in CELL_DTYPE.names or ():
            self.cells[name] = places[name]
        self.cells["questions"] = np.diff(self.of_document).ravel()

    def mark(self, window: Window, hits: np.ndarray) -> None:
        """Count the right answers of an instance; `hits[j]` says whether target j of its window was the likeliest."""
        first, last = self.of_document[window.document]
        spans = self.answers[first:last] - (window.begin + 1)
        missed = np.concatenate([[0], np.cumsum(~hits)])
        self.cells["right"][window.document] = int((missed[spans[:, 0]] == missed[spans[:, 1]]).sum())
