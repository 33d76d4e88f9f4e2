"""What torchrun starts: `qkflow` twice, in one group of processes; once, one of them is killed in the first.

losing_a_process.py STEP RUN OTHER ARGS...      `qkflow ARGS --out RUN`, in which the last process is killed after
STEP, the first time; then the same into OTHER, undisturbed
"""

import os
import signal
import sys
from typing import Any

import torch

from qkflow.cli import main
from qkflow.training.distributed import join
from qkflow.training.step import Learner

TRAIN_STEP = Learner.train_step


def train_step(self: Learner, *args: Any) -> dict[str, Any]:
    """A step that may be the last of its process."""
    record = TRAIN_STEP(self, *args)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and self.step == int(sys.argv[1]) and self.group.rank == self.group.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return record


if __name__ == "__main__":
    torch.set_num_threads(1)
    Learner.train_step = train_step
    with join():
        codes = [main([*sys.argv[4:], "--out", folder]) for folder in sys.argv[2:4]]
    sys.exit(max(codes))
