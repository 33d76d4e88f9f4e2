"""Training: the loop, checkpoints that can be resumed bit-for-bit, evaluation, and callbacks."""

from qkflow.training.budget import steps_for_budget
from qkflow.training.callbacks import Callback, Measurement, Result, Run
from qkflow.training.config import TrainConfig, task_defaults
from qkflow.training.evaluate import Evaluation, evaluate
from qkflow.training.loggers import CSVLogger, TensorBoardLogger
from qkflow.training.losses import Objective, open_objective
from qkflow.training.metrics import read_metrics
from qkflow.training.recall import CellResult, RecallResult, by_cell, read_recall, together, write_recall
from qkflow.training.run_dir import LoadedRun, load_run, resume_command
from qkflow.training.train import train

__all__ = [
    "CSVLogger",
    "Callback",
    "CellResult",
    "Evaluation",
    "LoadedRun",
    "Measurement",
    "Objective",
    "RecallResult",
    "Result",
    "Run",
    "TensorBoardLogger",
    "TrainConfig",
    "by_cell",
    "evaluate",
    "load_run",
    "open_objective",
    "read_metrics",
    "read_recall",
    "resume_command",
    "steps_for_budget",
    "task_defaults",
    "together",
    "train",
    "write_recall",
]
