"""Recall tasks: generated texts with questions that have one right answer."""

from qkflow.data.recall.base import GridCell, Instances
from qkflow.data.recall.mqar import MQAR, mqar
from qkflow.data.recall.needle import Needle, needles
from qkflow.data.recall.spec import TASKS, RecallTask, from_spec, is_task, to_spec

__all__ = [
    "MQAR",
    "TASKS",
    "GridCell",
    "Instances",
    "Needle",
    "RecallTask",
    "from_spec",
    "is_task",
    "mqar",
    "needles",
    "to_spec",
]
