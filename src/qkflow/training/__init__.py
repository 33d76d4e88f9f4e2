"""Training that can be killed at any instant: the loop, its checkpoints, its evaluations and those who watch it."""

from qkflow.training.budget import steps_for_budget
from qkflow.training.callbacks import Callback, Result, Run
from qkflow.training.config import TrainConfig
from qkflow.training.evaluation import Evaluation, evaluate
from qkflow.training.metrics import read_metrics
from qkflow.training.recall import CellResult, RecallResult, by_cell, read_recall, together, write_recall
from qkflow.training.run_dir import LoadedRun, load_run, resume_command
from qkflow.training.train import train

__all__ = [
    "Callback",
    "CellResult",
    "Evaluation",
    "LoadedRun",
    "RecallResult",
    "Result",
    "Run",
    "TrainConfig",
    "by_cell",
    "evaluate",
    "load_run",
    "read_metrics",
    "read_recall",
    "resume_command",
    "steps_for_budget",
    "together",
    "train",
    "write_recall",
]
