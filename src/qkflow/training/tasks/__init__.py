"""Training on tasks: classifiers and decoders that answer."""

from qkflow.training.tasks.config import ModelConfig, TaskRunConfig
from qkflow.training.tasks.learner import build_model, learn, task_loss
from qkflow.training.tasks.writing import overlap, write_answers

__all__ = ["ModelConfig", "TaskRunConfig", "build_model", "learn", "overlap", "task_loss", "write_answers"]
