"""A run, asked the tasks of lm-eval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qkflow.errors import UsageError
from qkflow.lm_eval.adapter import QKFlowLM


def evaluate(
    run: Path | str,
    tasks: Sequence[str | Mapping[str, Any]],
    *,
    limit: int | None = None,
    shots: int | None = None,
    batch: int = 16,
    device: str = "auto",
    max_length: int | None = None,
    include_path: Path | str | None = None,
) -> dict[str, Any]:
    """What lm-eval finds: its table of results, with each task's figures under `results`.

    `tasks` are names or configs of lm-eval; `limit` takes so many examples of each, `shots` shows so many first;
    `include_path` is a folder with tasks of your own. lm-eval seeds the global generators while it works.

    >>> evaluate("runs/mine", [])
    Traceback (most recent call last):
    qkflow.errors.UsageError: no tasks were given: name some, as in evaluate(run, ['blimp'])
    """
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    if not tasks:
        raise UsageError("no tasks were given: name some, as in evaluate(run, ['blimp'])")
    named = any(isinstance(task, str) for task in tasks)  # to list all that lm-eval has takes it half a minute
    manager = TaskManager(include_path=None if include_path is None else str(include_path), include_defaults=named)
    asked: Any = evaluator.simple_evaluate  # its decorator hides its type
    return asked(
        model=QKFlowLM(run, batch_size=batch, device=device, max_length=max_length),
        tasks=[task if isinstance(task, str) else dict(task) for task in tasks],
        num_fewshot=shots,
        limit=limit,
        task_manager=manager,
    )
