"""Recall tasks: made texts with questions that have one right answer, to measure what a model keeps of its past."""

from qkflow.data.recall.base import Cell, Instances
from qkflow.data.recall.mqar import MQAR, mqar
from qkflow.data.recall.needle import Needle, needles
from qkflow.data.recall.spec import TASKS, RecallTask, from_spec, is_task, to_spec

__all__ = [
    "MQAR",
    "TASKS",
    "Cell",
    "Instances",
    "Needle",
    "RecallTask",
    "from_spec",
    "is_task",
    "mqar",
    "needles",
    "to_spec",
]
