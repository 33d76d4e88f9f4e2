"""What is measured on a run that trains on a task with rationales.

metrics.jsonl           loss, attention mass and performance on validation instances along training
instances.safetensors   one number per metric and test instance, at the end
examples.json           attention over the words of a few test instances, at the end
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from qkflow.data.tasks import Task, TaskConfig, open_task
from qkflow.data.tasks.vocab import subsample
from qkflow.experiment.corpus_stats import note
from qkflow.experiment.spec import RationaleSpec
from qkflow.io import write_json
from qkflow.models import Decoder
from qkflow.probes.faithfulness import evaluate_faithfulness
from qkflow.probes.readers import reader
from qkflow.training import TrainConfig
from qkflow.training.answers import token_f1, write_answers
from qkflow.training.tensors import save_tensors

_MONITORED = 256
"""Validation instances that are measured along training."""
_EXAMPLES = 6
_POINTS = 16
"""Measurements along training, besides the one before the first step; denser at its beginning."""


@dataclass(frozen=True, kw_only=True)
class RationaleMeasurement:
    """Measures attention on rationales; a `qkflow.training.Measurement`."""

    data: TaskConfig
    rationale: RationaleSpec

    def steps(self, config: TrainConfig) -> Collection[int]:
        """The steps after which validation instances are measured."""
        return {round(config.steps * (n / _POINTS) ** 1.5) for n in range(_POINTS + 1)}

    def measure(self, model: nn.Module, step: int) -> Mapping[str, Any]:
        """Loss, mass and performance on validation instances; before the first step, attention on the examples."""
        task, pooling = _open(self.data), self.rationale.pooling
        instances = subsample(task.validation, _MONITORED, seed=0)
        result = evaluate_faithfulness(reader(model), instances, pooling=pooling, rankings=())
        values: dict[str, Any] = {
            "loss": float(result.loss.mean()),
            "mass": float(np.nanmean(result.mass)) if np.isfinite(result.mass).any() else 0.0,
            "performance": float(result.correct.mean()),
        }
        if step == 0 and (examples := example_instances(task)):
            shown = [task.test[index] for index in examples]
            attention = evaluate_faithfulness(reader(model), shown, pooling=pooling, rankings=()).attention
            values["attention"] = [row.tolist() for row in attention]
        return values

    def finish(self, model: nn.Module, folder: Path) -> None:
        """Measure all test instances."""
        task = _open(self.data)
        result = evaluate_faithfulness(
            reader(model),
            task.test,
            pooling=self.rationale.pooling,
            fraction=self.rationale.fraction,
            rankings=("attention", "gradient", "random"),
        )
        performance = result.correct.astype(np.float64)
        if isinstance(model, Decoder):
            answers = write_answers(model, task.test, end=task.test[0].answer[-1])
            references = [instance.answer[:-1] for instance in task.test]
            performance = np.array([token_f1(*pair) for pair in zip(answers, references, strict=True)])
        values = {
            "performance": performance,
            "loss": result.loss,
            "mass": result.mass,
            "effective": result.effective,
            "comprehensiveness": result.comprehensiveness,
            "sufficiency": result.sufficiency,
            "random": result.rankings["random"].comprehensiveness,
            "gradient": result.rankings["gradient"].comprehensiveness,
            **{f"mass_{pooling}": mass for pooling, mass in result.masses.items()},
            "comprehensiveness_aopc": result.rankings["attention"].comprehensiveness_aopc,
            "sufficiency_aopc": result.rankings["attention"].sufficiency_aopc,
        }
        tensors = {name: torch.from_numpy(value.copy()) for name, value in values.items()}
        examples = [
            {
                "index": index,
                "attention": result.attention[index].tolist(),
                "predicted": f"{task.classes[int(result.predicted[index])]} ({result.probability[index]:.2f})",
            }
            for index in example_instances(task)
        ]
        write_json(folder / "examples.json", {"examples": examples})
        temporary = folder / ".instances.safetensors.tmp"
        save_tensors(temporary, tensors)
        temporary.replace(folder / "instances.safetensors")


def example_instances(task: Task) -> tuple[int, ...]:
    """The test instances that reports show: with a rationale, of as many kinds as there are, in their order."""
    if not task.is_quotable:
        return ()
    by_kind: dict[str, list[int]] = {}
    for index, instance in enumerate(task.test):
        if instance.rationale:
            by_kind.setdefault(instance.kind, []).append(index)
    chosen: list[int] = []
    for turn in range(_EXAMPLES):
        chosen += [indices[turn] for indices in by_kind.values() if turn < len(indices)]
    return tuple(sorted(chosen[:_EXAMPLES]))


def describe_task(task: Task) -> dict[str, Any]:
    """The content of corpus.json: what the result needs to know about the task."""
    train, validation, test = (f"{len(split):,}" for split in (task.train, task.validation, task.test))
    instances = f"{train} for training, {validation} for validation, {test} for testing"
    return {
        "notes": [note("instances", instances, "learning rates are chosen on validation instances")],
        "excerpts": [],
        "task": {
            "name": task.name,
            "kind": task.kind,
            "instances": len(task.test),
            "with_rationale": sum(bool(instance.rationale) for instance in task.test),
            "skipped": dict(task.skipped),
            "notes": list(task.notes),
            "kinds": [instance.kind for instance in task.test],
            "examples": [
                {
                    "index": index,
                    "words": [task.words[token] for token in task.test[index].tokens],
                    "rationale": list(task.test[index].rationale),
                    "answer": task.classes[task.test[index].label],
                }
                for index in example_instances(task)
            ],
        },
    }


@functools.lru_cache(maxsize=1)
def _open(config: TaskConfig) -> Task:
    return open_task(config)
