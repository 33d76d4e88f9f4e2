"""Recall tasks: generated texts with questions that have one right answer."""

from qkflow.data.recall.base import Instances, RecallCell
from qkflow.data.recall.mqar import MQAR
from qkflow.data.recall.needle import Needle
from qkflow.data.recall.spec import RECALL_TASKS, RecallTask, format_recall_spec, is_recall_task, parse_recall_spec

__all__ = [
    "MQAR",
    "RECALL_TASKS",
    "Instances",
    "Needle",
    "RecallCell",
    "RecallTask",
    "format_recall_spec",
    "is_recall_task",
    "parse_recall_spec",
]
