"""Run `qkflow` twice in one process group of torchrun; in the first run, one process is killed once.

kill_one_process.py STEP RUN OTHER ARGS... runs `qkflow ARGS --out RUN`, in which the last process is killed after STEP
on the first start, and then `qkflow ARGS --out OTHER` without interruption.
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
    """Train one step, then kill the process if it is the one to be killed."""
    record = TRAIN_STEP(self, *args)
    is_first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if is_first_start and self.step == int(sys.argv[1]) and self.group.rank == self.group.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return record


if __name__ == "__main__":
    torch.set_num_threads(1)
    Learner.train_step = train_step
    with join():
        codes = [main([*sys.argv[4:], "--out", folder]) for folder in sys.argv[2:4]]
    sys.exit(max(codes))
