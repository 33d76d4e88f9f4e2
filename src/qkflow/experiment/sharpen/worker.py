"""What happens in the process of one run: learn the task, look at the test instances, and write down what was seen.

RUN/                    whole, or not there
  config.json           what the run is a function of
  path.json             loss, mass and performance on validation instances along training
  instances.safetensors what was seen of each test instance
  examples.json         attention over the words of a few of them, before and after
  weights.safetensors   the model
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from qkflow.config import to_dict
from qkflow.data.tasks import Task
from qkflow.data.tasks.vocab import subsample
from qkflow.errors import DiskError, DivergenceError, Interrupted
from qkflow.experiment.executors.base import describe_error
from qkflow.experiment.metrics.rationale import TrainingPoint
from qkflow.io import write_folder
from qkflow.models import Decoder
from qkflow.probes.attention import Pooling
from qkflow.probes.faithfulness import Faithfulness, evaluate_faithfulness
from qkflow.probes.readers import reader
from qkflow.training.reproducibility import flushed_denormals, threads
from qkflow.training.signals import stop_on_signals
from qkflow.training.tasks import TaskRunConfig, learn, overlap, write_answers
from qkflow.training.tensors import model_tensors, save_tensors

_WATCHED = 256
"""Validation instances that are looked at along training: drawn from all, since files have their templates in a row."""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run to be made."""

    folder: str
    config: TaskRunConfig
    task: Task
    tuning: bool
    """A tuning run is looked at on validation instances only, at its end."""
    moments: tuple[int, ...]
    examples: tuple[int, ...]
    pooling: Pooling
    part: float


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended."""

    kind: Literal["finished", "diverged", "disk full", "stopped", "crashed"]
    reason: str = ""


def make_run(order: RunSpec) -> RunOutcome:
    """Make a run; whatever goes wrong comes back as an `RunOutcome`, and a loss that is not finite is put on record."""
    folder = Path(order.folder)
    try:
        with stop_on_signals() as stop, threads(order.config.threads), flushed_denormals():
            _make(order, folder, stop)
    except DivergenceError as error:
        record_failure(folder, str(error))
        return RunOutcome(kind="diverged", reason=str(error))
    except DiskError as error:
        return RunOutcome(kind="disk full", reason=str(error.strerror))
    except Interrupted as error:
        return RunOutcome(kind="stopped", reason=str(error))
    except Exception as error:  # a mechanism may be anyone's code
        return RunOutcome(kind="crashed", reason=describe_error(error))
    return RunOutcome(kind="finished")


def record_failure(folder: Path, reason: str) -> None:
    """Leave a run that is not tried again on record."""

    def fill(made: Path) -> None:
        (made / "failed.json").write_text(json.dumps({"reason": reason}))

    write_folder(folder, fill)


def _make(order: RunSpec, folder: Path, should_stop: Any) -> None:
    task, config = order.task, order.config
    path: list[TrainingPoint] = []
    before: dict[str, Any] = {}
    watched = subsample(task.validation, _WATCHED, seed=0)

    def watch(step: int, model: nn.Module) -> None:
        if step == 0:
            before["attention"] = _attention(model, order)
        seen = evaluate_faithfulness(reader(model), watched, pooling=order.pooling, rankings=())
        path.append(_point(step, seen))

    moments = () if order.tuning else order.moments
    model = learn(config, task, watch=watch, moments=moments, should_stop=should_stop)
    if order.tuning:
        whole = evaluate_faithfulness(reader(model), task.validation, pooling=order.pooling, rankings=())
        path.append(_point(config.steps, whole))
    if not math.isfinite(path[-1].loss):
        raise DivergenceError("the validation loss is not finite: choose a lower learning rate or r")
    tensors, examples = ({}, []) if order.tuning else _looked(model, order, before["attention"])

    def fill(made: Path) -> None:
        (made / "config.json").write_text(json.dumps(to_dict(config), indent=2, sort_keys=True))
        (made / "path.json").write_text(json.dumps([asdict(point) for point in path]))
        if not order.tuning:
            save_tensors(made / "instances.safetensors", tensors)
            (made / "examples.json").write_text(json.dumps(examples))
            save_tensors(made / "weights.safetensors", model_tensors(model))

    write_folder(folder, fill)


def _point(step: int, seen: Faithfulness) -> TrainingPoint:
    return TrainingPoint(
        step=step,
        loss=float(seen.loss.mean()),
        mass=float(np.nanmean(seen.mass)) if np.isfinite(seen.mass).any() else 0.0,
        performance=float(seen.correct.mean()),
    )


def _looked(model: nn.Module, order: RunSpec, before: Sequence[Any]) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """What was seen of every test instance, and of the examples."""
    task = order.task
    seen = evaluate_faithfulness(
        reader(model),
        task.test,
        pooling=order.pooling,
        fraction=order.part,
        rankings=("attention", "gradient", "random"),
    )
    performance = seen.correct.astype(np.float64)
    if isinstance(model, Decoder):
        answers = write_answers(model, task.test, end=task.test[0].answer[-1])
        performance = np.array([overlap(a, one.answer[:-1]) for a, one in zip(answers, task.test, strict=True)])
    values = {
        "performance": performance,
        "loss": seen.loss,
        "mass": seen.mass,
        "effective": seen.effective,
        "comprehensiveness": seen.comprehensiveness,
        "sufficiency": seen.sufficiency,
        "random": seen.rankings["random"].comprehensiveness,
        "gradient": seen.rankings["gradient"].comprehensiveness,
        **{f"mass_{how}": mass for how, mass in seen.masses.items()},
        "comprehensiveness_aopc": seen.rankings["attention"].comprehensiveness_aopc,
        "sufficiency_aopc": seen.rankings["attention"].sufficiency_aopc,
    }
    examples = [
        {
            "place": place,
            "before": list(start),
            "after": seen.attention[place].tolist(),
            "predicted": f"{task.classes[int(seen.predicted[place])]} ({seen.probability[place]:.2f})",
        }
        for place, start in zip(order.examples, before, strict=True)
    ]
    return {name: torch.from_numpy(value.copy()) for name, value in values.items()}, examples


def _attention(model: nn.Module, order: RunSpec) -> list[list[float]]:
    if not order.examples:
        return []
    some = [order.task.test[place] for place in order.examples]
    return [
        row.tolist() for row in evaluate_faithfulness(reader(model), some, pooling=order.pooling, rankings=()).attention
    ]
