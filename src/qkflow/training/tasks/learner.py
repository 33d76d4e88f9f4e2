"""A model that learns a task: the same bits for the same config."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from qkflow.circuits import RatioSchedule, circuits_by_name, find_circuits
from qkflow.data.tasks import Instance, Task
from qkflow.errors import DivergenceError, Interrupted, UsageError
from qkflow.mechanisms.base import ParamOptions
from qkflow.models import Classifier, ClassifierConfig, Decoder, DecoderConfig, Stack
from qkflow.models.one_layer import OneLayer
from qkflow.training.optim import param_groups, set_rates
from qkflow.training.reproducibility import own_randomness, threads
from qkflow.training.tasks.batches import answered, chosen, rows
from qkflow.training.tasks.config import ModelConfig, TaskRunConfig

Watch = Callable[[int, nn.Module], None]
"""Called with the steps made so far and the model."""


def build_model(config: ModelConfig) -> nn.Module:
    """The model of a config."""
    if isinstance(config, ClassifierConfig):
        return Classifier(config)
    return Decoder(config) if isinstance(config, DecoderConfig) else OneLayer(config)


def task_loss(model: nn.Module, instances: Sequence[Instance]) -> Float[Tensor, ""]:
    """Nats: of the label, or of a token of the answer on the average."""
    if isinstance(model, Decoder):
        made, targets = answered(instances)
        stream, _ = model.read(made.tokens, layout=made.layout)
        asked = targets >= 0
        return F.cross_entropy(model.logits(stream[asked]), targets[asked])
    made = rows([one.tokens for one in instances])
    labels = torch.tensor([one.label for one in instances])
    return F.cross_entropy(model(made.tokens, made.layout), labels)


def learn(
    config: TaskRunConfig,
    task: Task,
    *,
    watch: Watch | None = None,
    moments: Sequence[int] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> nn.Module:
    """Train a model on a task; `watch` sees it after each number of steps in `moments`, 0 among them."""
    refuse_mismatch(config, task)
    with threads(config.threads), own_randomness(torch.device("cpu")):
        torch.manual_seed(config.seed)
        model = build_model(config.model)
        optimizer = build_task_optimizer(model, config)
        r = RatioSchedule(start=config.qk_ratio, end=config.qk_growth)
        called = set(moments) if watch is not None else set()
        for step in range(config.steps + 1):
            if watch is not None and step in called:
                model.eval()
                watch(step, model)
            if step == config.steps:
                break
            if should_stop():
                raise Interrupted(f"stopped in step {step + 1}")
            set_rates(optimizer.param_groups, config.lr, r.at(step, config.steps))
            places = chosen(len(task.train), seed=config.data_seed, step=step, batch=config.batch)
            model.train()
            optimizer.zero_grad()
            loss = task_loss(model, [task.train[place] for place in places])
            if not math.isfinite(loss.item()):
                raise DivergenceError(f"the loss of step {step + 1} is not finite: choose a lower learning rate or r")
            loss.backward()
            if config.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
        if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
            raise DivergenceError("the model after the last step is not finite: choose a lower learning rate or r")
    return model.eval()


def build_task_optimizer(model: nn.Module, config: TaskRunConfig) -> torch.optim.Optimizer:
    """The optimiser of a config over `task_groups`."""
    groups = task_groups(model, config)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=config.lr)


def task_groups(model: nn.Module, config: TaskRunConfig) -> list[dict[str, Any]]:
    """The QK circuit at r times the learning rate, embeddings at their own, the rest at one.

    A mechanism may give parameters a pace of their own, which is a factor on all of that.
    """
    options = model.param_options() if isinstance(model, Stack) else {}
    if config.embedding_ratio != 1:
        for name in _embeddings(model):
            own = options.get(name, ParamOptions())
            options[name] = replace(own, rate=own.rate * config.embedding_ratio)
    circuits = circuits_by_name(find_circuits(model))
    groups = param_groups(model, options, circuits, weight_decay=config.weight_decay)
    set_rates(groups, config.lr, config.qk_ratio)
    return groups


def _embeddings(model: nn.Module) -> list[str]:
    tables = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    if not tables:
        raise UsageError(f"{type(model).__name__} has no embeddings to speed up: leave out the published arm")
    return tables


def refuse_mismatch(config: TaskRunConfig, task: Task) -> None:
    """Refuse a model that cannot answer the task."""
    writes = isinstance(config.model, DecoderConfig)
    if writes != (task.kind == "generation"):
        expected = "a decoder" if task.kind == "generation" else "a classifier"
        raise UsageError(
            f"{task.name} is a task of {task.kind}: it needs {expected}, got {type(config.model).__name__}"
        )
    if config.model.vocabulary < len(task.words):
        raise UsageError(
            f"{task.name} has {len(task.words)} words, the model a vocabulary of {config.model.vocabulary}:"
            " make it that many"
        )
    if isinstance(config.model, ClassifierConfig) and config.model.classes < len(task.classes):
        raise UsageError(f"{task.name} has {len(task.classes)} classes, the model {config.model.classes}")
