"""Training on tasks: classifiers and decoders that answer."""

from qkflow.training.answers import token_f1 as overlap
from qkflow.training.answers import write_answers
from qkflow.training.tasks.config import ModelConfig, TaskRunConfig
from qkflow.training.tasks.learner import build_model, learn, task_loss

__all__ = ["ModelConfig", "TaskRunConfig", "build_model", "learn", "overlap", "task_loss", "write_answers"]
