"""A model that learns: a step is a function of (config, step, data) and of nothing that is not in a checkpoint."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkflow.data import Corpus, Split, lesson, open_corpus
from qkflow.errors import DivergenceError, Interrupted, NotFiniteError, UsageError
from qkflow.layout import Layout
from qkflow.models import Decoder, parameters
from qkflow.training.config import TrainConfig
from qkflow.training.divergence import first_bad_gradient, first_bad_module
from qkflow.training.evaluation import Evaluation, evaluate, held_out
from qkflow.training.optimizer import build_optimizer, set_rates
from qkflow.training.runtime import step_seed
from qkflow.training.schedule import multiplier


def open_checked(config: TrainConfig) -> Corpus:
    """Open the corpus, and refuse at once what training on it would trip over later."""
    corpus = open_corpus(config.corpus)
    parameters(config.model)  # a shape or a mechanism that cannot be built says so here
    if config.model.vocabulary < corpus.vocabulary:
        raise UsageError(
            f"the model has a vocabulary of {config.model.vocabulary}, the corpus {corpus.name} needs "
            f"{corpus.vocabulary}: set the model's vocabulary to that"
        )
    if corpus.context is not None and config.context != corpus.context:
        raise UsageError(
            f"an instance of {corpus.name} has {corpus.context} tokens, got a context of {config.context}: "
            f"give --context {corpus.context}, or leave it out"
        )
    if corpus.context is not None and config.stride is not None:
        raise UsageError(f"stride cuts text, and instances of {corpus.name} are read whole: leave it out")
    lesson(corpus.train, seed=config.data_seed, step=0, batch=config.batch, context=config.context)
    if not held_out(corpus.validation, context=config.context, stride=config.stride, limit=1):
        raise UsageError(f"the corpus {corpus.name} has no held-out document to evaluate on: give more text")
    return corpus


class _Part(NamedTuple):
    """A micro-batch."""

    tokens: Tensor
    """Its windows `[b, t + 1]`."""
    scored: Tensor | None
    """Which of its targets `[b, t]` count; None: all."""
    share: float
    """How many times as many of them the whole step has."""


class Learner:
    """The model and its optimiser at `step` steps."""

    def __init__(self, config: TrainConfig, corpus: Corpus, device: torch.device) -> None:
        self.config, self.corpus, self.device = config, corpus, device
        self.step = 0
        torch.manual_seed(config.seed)
        self.model = Decoder(config.model).to(device)
        self.optimizer = build_optimizer(self.model, config)
        if config.compile:
            self.model.compile(dynamic=False)

    def learn(self, should_stop: Callable[[], bool]) -> dict[str, Any]:
        """Make one step; its record. A loss or gradient that is not finite moves no weight and raises."""
        config, began = self.config, time.perf_counter()
        tokens, scored = lesson(
            self.corpus.train, seed=config.data_seed, step=self.step, batch=config.batch, context=config.context
        )
        parts = self._parts(tokens, scored)
        torch.manual_seed(step_seed(config.seed, self.step))
        self.model.train()
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for part in parts:
            if should_stop():
                raise Interrupted(f"stopped in step {self.step + 1}")
            try:
                loss = self.loss(part.tokens, part.scored) / part.share
            except NotFiniteError as error:
                raise self._diverged(parts, math.nan) from error
            loss.backward()
            total += loss.detach()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        mean, length = torch.stack([total, norm]).tolist()
        if not (math.isfinite(mean) and math.isfinite(length)):
            raise self._diverged(parts, mean)
        if config.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), config.clip, norm)
        lr, ratio = config.lr * multiplier(config, self.step), config.ratio.at(self.step, config.steps)
        set_rates(self.optimizer.param_groups, lr, ratio)
        self.optimizer.step()
        self.step += 1
        return {
            "kind": "train",
            "step": self.step,
            "loss": mean,
            "lr": lr,
            **({} if ratio == 1 else {"qk_ratio": ratio}),
            "grad_norm": length,
            "tokens": self.step * config.batch * config.context,
            "batch": f"{zlib.crc32(tokens.tobytes()):08x}",
            "seconds": time.perf_counter() - began,
        }

    def evaluate(self, limit: int | None, should_stop: Callable[[], bool]) -> Evaluation:
        """The loss of the validation documents as the config says, of about `limit` tokens of them."""
        return self._evaluate(self.corpus.validation, limit, should_stop)

    def recall(self, limit: int | None, should_stop: Callable[[], bool]) -> Evaluation:
        """The test grid of a task, or about `limit` tokens of it."""
        return self._evaluate(self.corpus.test, limit, should_stop)

    def _evaluate(self, split: Split, limit: int | None, should_stop: Callable[[], bool]) -> Evaluation:
        config = self.config
        # Eagerly: evaluations have other shapes than training, and compiling for them could change its bits.
        with torch.compiler.set_stance("force_eager"):
            return evaluate(
                self.model,
                split,
                context=config.context,
                batch=config.evaluate_batch,
                stride=config.stride,
                limit=limit,
                should_stop=should_stop,
            )

    def loss(self, tokens: Int[Tensor, "b t1"], scored: Bool[Tensor, "b t"] | None = None) -> Float[Tensor, ""]:
        """The mean loss of predicting each token of the windows but the first, or those of them that are `scored`."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            if scored is None:
                # The end token stands before a document as its first context, so a segment begins with it.
                layout = None if self.config.crossing else Layout.segmented(inputs == self.corpus.end)
                logits, targets = self.model(inputs, layout=layout)[0].flatten(0, 1), targets.flatten()
            elif self.config.compile:  # what is compiled is the whole model, and a window holds one document
                logits, targets = self.model(inputs)[0][scored], targets[scored]
            else:
                logits, targets = self.model.logits(self.model.read(inputs)[0][scored]), targets[scored]
        return F.cross_entropy(logits.float(), targets)

    def _parts(self, tokens: np.ndarray, scored: np.ndarray | None) -> list[_Part]:
        """The micro-batches of a step; each weighs as much as it has of the targets that the step scores."""
        rows = torch.from_numpy(tokens).to(self.device).chunk(self.config.accumulate)
        if scored is None:
            return [_Part(part, None, float(len(rows))) for part in rows]
        masks = np.split(scored, len(rows))
        shares = [scored.sum() / mask.sum() for mask in masks]
        there = [torch.from_numpy(mask).to(self.device) for mask in masks]
        return [_Part(*part) for part in zip(rows, there, map(float, shares), strict=True)]

    def _diverged(self, parts: list[_Part], loss: float) -> DivergenceError:
        """Make the step's forward pass again, with the same dropout, and say where it broke."""
        torch.manual_seed(step_seed(self.config.seed, self.step))
        with torch.compiler.set_stance("force_eager"):
            module = first_bad_module(self.model, lambda: [self.loss(part.tokens, part.scored) for part in parts])
        if module is not None:
            where = f"the first output that is not finite is that of {module}"
        elif math.isfinite(loss):
            where = (
                f"every output is finite; the first gradient that is not is that of {first_bad_gradient(self.model)}"
            )
        else:
            where = "every layer's output is finite, the loss made of them is not"
        what = "gradient" if math.isfinite(loss) else "loss"
        return DivergenceError(f"the {what} of step {self.step + 1} is not finite: {where}")
