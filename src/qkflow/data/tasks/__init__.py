"""Tasks whose answers rest on words that are known."""

from qkflow.data.tasks.base import Instance, Kind, Task, TaskConfig, TaskName

__all__ = ["Instance", "Kind", "Task", "TaskConfig", "TaskName"]
