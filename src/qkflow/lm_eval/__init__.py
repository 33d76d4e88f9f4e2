"""Run lm-eval tasks on a run folder or an exported model folder (extra `lm-eval`).

    from qkflow.lm_eval import evaluate
    evaluate("runs/mine", ["lambada_openai", "blimp"], limit=100)["results"]

lm-eval's command line, with the model type `qkflow`:

    python -m qkflow.lm_eval run --model qkflow --model_args run=runs/mine --tasks blimp --include_path my/tasks

Every text starts after an end-of-document token, as documents do in training. Texts longer than `max_length` tokens
(default: the context of the run) are truncated on the left. Rolling likelihoods use windows of `max_length`, as
`qkflow eval` does. Only the last window differs: lm-eval extends it to the left to its full length, `qkflow eval` does
not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import lm_eval.models  # noqa: F401 (registers lm-eval's own models, which it omits once another is registered)
except ImportError as error:
    raise ImportError("qkflow.lm_eval needs lm-eval: pip install 'qkflow[lm-eval]'") from error

from qkflow.errors import UsageError
from qkflow.lm_eval.model import QKFlowLM

__all__ = ["QKFlowLM", "evaluate"]


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
    """Evaluate a run with lm-eval and return its results; the metrics of each task are under `results`.

    `tasks` are names or configs of lm-eval tasks, `limit` is the number of examples per task, `shots` the number of
    few-shot examples, and `include_path` a folder of additional tasks. lm-eval seeds the global random generators.

    >>> evaluate("runs/mine", [])
    Traceback (most recent call last):
    qkflow.errors.UsageError: no tasks: give at least one, as in evaluate(run, ['blimp'])
    """
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    if not tasks:
        raise UsageError("no tasks: give at least one, as in evaluate(run, ['blimp'])")
    has_names = any(isinstance(task, str) for task in tasks)  # indexing lm-eval's own tasks takes half a minute
    manager = TaskManager(include_path=None if include_path is None else str(include_path), include_defaults=has_names)
    simple_evaluate: Any = evaluator.simple_evaluate  # its decorator hides its type
    return simple_evaluate(
        model=QKFlowLM(run, batch_size=batch, device=device, max_length=max_length),
        tasks=[task if isinstance(task, str) else dict(task) for task in tasks],
        num_fewshot=shots,
        limit=limit,
        task_manager=manager,
    )
