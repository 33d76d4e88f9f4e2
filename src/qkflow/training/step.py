"""One optimizer step. It is a function of the config, the data and the last checkpoint, and of nothing else."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qkflow.errors import DivergenceError, Interrupted, NotFiniteError
from qkflow.models import Classifier, ClassifierConfig, Decoder, DecoderConfig
from qkflow.models.one_layer import OneLayer
from qkflow.training.config import ModelConfig, TrainConfig
from qkflow.training.distributed import SingleProcess, first_not_none, mark_on_all_ranks
from qkflow.training.divergence import first_bad_gradient, first_bad_module
from qkflow.training.evaluate import Evaluation, HeldOut, evaluate_held_out
from qkflow.training.logits import Examples, TargetLogits
from qkflow.training.losses import Objective
from qkflow.training.optim import build_optimizer, lr_multiplier, optimizer_tensors, set_rates
from qkflow.training.parallel import (
    average_unsharded_gradients,
    clip_gradients,
    gather_tensors,
    gradient_norm,
    gradient_sync,
    mean_over_ranks,
    n_micro_batches,
    reshard_after,
    validate_parallel,
    wrap,
)
from qkflow.training.reproducibility import step_seed
from qkflow.training.tensors import load_model_tensors, model_tensors


def build_model(config: ModelConfig) -> nn.Module:
    """The model of a config."""
    if isinstance(config, DecoderConfig):
        return Decoder(config)
    return Classifier(config) if isinstance(config, ClassifierConfig) else OneLayer(config)


class _MicroBatch(NamedTuple):
    examples: Examples
    divisor: float
    """What its mean loss is divided by, so that the losses of all micro-batches and ranks average to the step's."""


class Learner:
    """A model and its optimizer after `step` steps. `initial` weights replace those drawn from the seed."""

    def __init__(
        self,
        config: TrainConfig,
        objective: Objective,
        device: torch.device,
        *,
        group: SingleProcess | None = None,
        initial: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.config, self.objective, self.device = config, objective, device
        self.group = group or SingleProcess()
        validate_parallel(config, self.group)
        self.step = 0
        torch.manual_seed(config.seed)
        self.model = build_model(config.model).to(device)
        if initial is not None:
            load_model_tensors(self.model, initial)
        self.optimizer = build_optimizer(self.model, config)
        if config.compile:
            self.model.compile(dynamic=False)
        self.module = TargetLogits(self.model, compiled=config.compile)
        self._wrapped: nn.Module = self.module

    def parallelize(self) -> None:
        """Wrap the model for training on all processes of the group. All of them must call this."""
        group = self.group
        if group.size == 1:
            return
        if group.is_sharded:
            self._wrapped = wrap(self.module, group, self.device)
            self.optimizer = build_optimizer(self.model, self.config)  # the parameters have been replaced
            return
        examples = self._micro_batches(self.objective.batch(0))[0].examples
        has_unused = False
        with group.raise_on_all_ranks():
            self.objective.loss(self.module, examples).backward()
            has_unused = any(parameter.grad is None for parameter in self.model.parameters())
        has_unused = group.any(has_unused)
        self._wrapped = wrap(self.module, group, self.device, find_unused=has_unused)
        if not has_unused:
            # The first backward pass fixes the order in which gradients are summed. Doing it here gives the first step
            # of a session the same bits as the same step in the middle of another session.
            self.objective.loss(self._wrapped, examples).backward()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors by name; shards, if it is sharded."""
        return model_tensors(self.model)

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer state by name; shards, if it is sharded."""
        return optimizer_tensors(self.model, self.optimizer)

    def gathered_weights(self) -> dict[str, Tensor]:
        """The whole model by name, on rank 0 only. All processes must call this."""
        return gather_tensors(self.weights(), self.group) if self.group.is_sharded else self.weights()

    def train_step(self, should_stop: Callable[[], bool]) -> dict[str, Any]:
        """Make one step and return its record. A non-finite loss or gradient raises and changes no weight.

        `should_stop` must return the same on all ranks.
        """
        config, group, started = self.config, self.group, time.perf_counter()
        batch = self.objective.batch(self.step)
        micro_batches = self._micro_batches(batch)
        torch.manual_seed(step_seed(config.seed, self.step, group.rank))
        self.model.train()
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for number, micro_batch in enumerate(micro_batches, 1):
            if should_stop():
                raise Interrupted(f"stopped in step {self.step + 1}")
            with gradient_sync(self._wrapped, group, enabled=number == len(micro_batches)):
                loss = self._loss(micro_batch, micro_batches)
                loss.backward()
            total += loss.detach()
        average_unsharded_gradients(self.model, group)
        norm = gradient_norm(self.model, group)
        mean_loss, grad_norm = torch.stack([mean_over_ranks(total, group), norm]).tolist()
        if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
            raise self._divergence(micro_batches, mean_loss)
        if config.clip is not None:
            clip_gradients(self.model, config.clip, norm, group)
        lr, ratio = config.lr * lr_multiplier(config, self.step), config.ratio.at(self.step, config.steps)
        set_rates(self.optimizer.param_groups, lr, ratio)
        self.optimizer.step()
        self.step += 1
        return {
            "kind": "train",
            "step": self.step,
            "loss": mean_loss,
            "lr": lr,
            **({} if ratio == 1 else {"qk_ratio": ratio}),
            "grad_norm": grad_norm,
            "tokens": self.n_tokens(),
            "batch": batch.checksum,
            "seconds": time.perf_counter() - started,
        }

    def n_tokens(self) -> int:
        """Training tokens so far."""
        return round(self.step * self.objective.tokens_per_step)

    def evaluate(
        self,
        held_out: HeldOut,
        should_stop: Callable[[], bool],
        progress: Callable[[int, int], object] = lambda done, total: None,
    ) -> Evaluation:
        """Evaluate held-out data on all processes."""
        # Not compiled: evaluations have other shapes than training, and compiling for them could change its bits.
        with torch.compiler.set_stance("force_eager"), reshard_after(self.module, self.group):
            return evaluate_held_out(
                self.module,
                held_out,
                batch=self.config.evaluate_batch,
                should_stop=should_stop,
                group=self.group,
                progress=progress,
            )

    def _micro_batches(self, batch: Examples) -> list[_MicroBatch]:
        """The micro-batches of this rank, weighted by the number of targets they score."""
        config, group = self.config, self.group
        n_rows = config.batch // group.size
        own = batch[group.rank * n_rows : (group.rank + 1) * n_rows]
        size = n_rows // n_micro_batches(n_rows, config.batch // config.accumulate)
        parts = [own[start : start + size] for start in range(0, n_rows, size)]
        return [_MicroBatch(part.to(self.device), batch.n_scored / (part.n_scored * group.size)) for part in parts]

    def _loss(self, micro_batch: _MicroBatch, micro_batches: list[_MicroBatch]) -> Tensor:
        """The contribution of a micro-batch to the step's loss."""
        loss = failure = None
        try:
            loss = self.objective.loss(self._wrapped, micro_batch.examples) / micro_batch.divisor
        except NotFiniteError as error:
            failure = error
        if self.group.is_sharded and failure is not None:  # the other ranks may wait for shards of this one: exit
            raise DivergenceError(f"the loss of step {self.step + 1} is not finite: {failure}") from failure
        if self.group.any(failure is not None) or loss is None:
            raise self._divergence(micro_batches, math.nan) from failure
        return loss

    def _divergence(self, micro_batches: list[_MicroBatch], loss: float) -> DivergenceError:
        """Repeat the forward pass with the same dropout to find the first non-finite value."""
        torch.manual_seed(step_seed(self.config.seed, self.step, self.group.rank))
        with torch.compiler.set_stance("force_eager"):
            bad_module = first_bad_module(
                self.model, lambda: [self.objective.loss(self.module, part.examples) for part in micro_batches]
            )
        if (name := first_not_none(self.group.gather(bad_module))) is not None:
            where = f"the first non-finite output is that of {name}"
        elif math.isfinite(loss):
            name = first_not_none(self.group.gather(first_bad_gradient(self.model)))
            where = f"all outputs are finite; the first non-finite gradient is that of {name}"
        else:
            where = "all outputs are finite, only the loss is not"
        what = "gradient" if math.isfinite(loss) else "loss"
        return mark_on_all_ranks(DivergenceError(f"the {what} of step {self.step + 1} is not finite: {where}"))
