"""Tasks with known rationales, to test whether attention is faithful."""

from qkflow.data.tasks.base import Instance, Kind, Task, TaskConfig, TaskName
from qkflow.data.tasks.open import open_task

__all__ = ["Instance", "Kind", "Task", "TaskConfig", "TaskName", "open_task"]
