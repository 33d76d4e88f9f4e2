"""A model that learns: a step is a function of (config, step, data) and of nothing that is not in a checkpoint."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkflow.data import Batch, Corpus, CorpusConfig, Split, get_batch, open_corpus
from qkflow.errors import DivergenceError, Interrupted, NotFiniteError, UsageError
from qkflow.layout import Layout
from qkflow.models import Decoder, DecoderConfig, parameters
from qkflow.training.config import TrainConfig
from qkflow.training.distributed import ALONE, World, first_of, known_to_all
from qkflow.training.divergence import first_bad_gradient, first_bad_module
from qkflow.training.dtensor import put_together
from qkflow.training.evaluation import Evaluation, evaluate_together, held_out
from qkflow.training.lm_logits import Scores, exact
from qkflow.training.optim import build_optimizer, optimizer_tensors, set_rates
from qkflow.training.parallel import (
    average_whole,
    clip_gradients,
    gradient_norm,
    gradients_travel,
    mean_over,
    micro_batches,
    pieces_after,
    refuse_uneven,
    spread,
)
from qkflow.training.reproducibility import step_seed
from qkflow.training.schedule import multiplier
from qkflow.training.tensors import load_model_tensors, model_tensors


def open_checked(config: TrainConfig) -> Corpus:
    """Open the corpus, and refuse at once what training on it would trip over later."""
    if not (isinstance(config.data, CorpusConfig) and isinstance(config.model, DecoderConfig)):
        raise UsageError("a task with rationales is not a corpus")
    corpus = open_corpus(config.data)
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
    get_batch(corpus.train, seed=config.data_seed, step=0, batch_size=config.batch, context=config.context)
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
    """How many times as many of them the whole step has, for each of its processes."""


class Learner:
    """The model and its optimiser at `step` steps; `initial` weights come before those that the seed would draw."""

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        device: torch.device,
        *,
        world: World = ALONE,
        initial: Mapping[str, Tensor] | None = None,
    ) -> None:
        refuse_uneven(config, world)
        self.config, self.corpus, self.device, self.world = config, corpus, device, world
        self.step = 0
        torch.manual_seed(config.seed)
        self.model = Decoder(cast(DecoderConfig, config.model)).to(device)
        if initial is not None:
            load_model_tensors(self.model, initial)
        self.optimizer = build_optimizer(self.model, config)
        if config.compile:
            self.model.compile(dynamic=False)
        self.scores = Scores(self.model, compiled=config.compile)
        self._called = self.scores

    def spread(self) -> None:
        """Be one of several processes that train the model, from here on. All of them have to come here."""
        if self.world.size == 1:
            return
        if self.sharded:
            self._called = spread(self.scores, self.world, self.device)
            self.optimizer = build_optimizer(self.model, self.config)  # the parameters are others now
            return
        part, unused = self._parts(*self._lesson(0))[0], False
        with self.world.agreed():
            self._loss(self.scores, part.tokens, part.scored).backward()
            unused = any(parameter.grad is None for parameter in self.model.parameters())
        unused = self.world.any(unused)
        self._called = spread(self.scores, self.world, self.device, unused=unused)
        if not unused:
            # The first way back decides in which order gradients are summed from then on. It is made here, so that the
            # first step of a session has the bits that the same step has in the middle of another one.
            self.loss(part.tokens, part.scored).backward()
        self.optimizer.zero_grad()

    def _lesson(self, step: int) -> Batch:
        config = self.config
        return get_batch(
            self.corpus.train, seed=config.data_seed, step=step, batch_size=config.batch, context=config.context
        )

    @property
    def sharded(self) -> bool:
        """Whether each process has only a piece of the model."""
        return self.world.kind == "fsdp"

    def weights(self) -> dict[str, Tensor]:
        """The model by name; sharded, its pieces."""
        return model_tensors(self.model)

    def memory(self) -> dict[str, Tensor]:
        """The optimiser's memory by name; sharded, its pieces."""
        return optimizer_tensors(self.model, self.optimizer)

    def whole_weights(self) -> dict[str, Tensor]:
        """The model by name, whole, on the first process; on the others nothing. All of them have to come here."""
        return put_together(self.weights(), self.world) if self.sharded else self.weights()

    def learn(self, should_stop: Callable[[], bool]) -> dict[str, Any]:
        """Make one step; its record. A loss or gradient that is not finite moves no weight and raises.

        With several processes, `should_stop` must say the same to all of them.
        """
        config, began = self.config, time.perf_counter()
        tokens, scored = self._lesson(self.step)
        parts = self._parts(tokens, scored)
        torch.manual_seed(step_seed(config.seed, self.step, self.world.rank))
        self.model.train()
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for number, part in enumerate(parts, 1):
            if should_stop():
                raise Interrupted(f"stopped in step {self.step + 1}")
            with gradients_travel(self._called, self.world, last=number == len(parts)):
                loss = self._forward(part, parts)
                loss.backward()
            total += loss.detach()
        average_whole(self.model, self.world)
        norm = gradient_norm(self.model, self.world)
        mean, length = torch.stack([mean_over(self.world, total), norm]).tolist()
        if not (math.isfinite(mean) and math.isfinite(length)):
            raise self._diverged(parts, mean)
        if config.clip is not None:
            clip_gradients(self.model, config.clip, norm, self.world)
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
        with torch.compiler.set_stance("force_eager"), pieces_after(self.scores, self.world):
            return evaluate_together(
                self.scores,
                split,
                context=config.context,
                batch=config.evaluate_batch,
                stride=config.stride,
                limit=limit,
                should_stop=should_stop,
                world=self.world,
            )

    def loss(self, tokens: Int[Tensor, "b t1"], scored: Bool[Tensor, "b t"] | None = None) -> Float[Tensor, ""]:
        """The mean loss of predicting each token of the windows but the first, or those of them that are `scored`."""
        return self._loss(self._called, tokens, scored)

    def _loss(self, scores: nn.Module, tokens: Tensor, scored: Tensor | None) -> Float[Tensor, ""]:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            if scored is None:
                # The end token stands before a document as its first context, so a segment begins with it.
                layout = None if self.config.crossing else Layout.segmented(inputs == self.corpus.end)
                logits, targets = scores(inputs, None, layout).flatten(0, 1), targets.flatten()
            else:
                logits, targets = scores(inputs, scored), targets[scored]
        return F.cross_entropy(exact(logits), targets)

    def _forward(self, part: _Part, parts: list[_Part]) -> Tensor:
        """The loss of a micro-batch as a part of the step's; numbers that are not finite may end it on the way."""
        loss = failure = None
        try:
            loss = self.loss(part.tokens, part.scored) / part.share
        except NotFiniteError as error:
            failure = error
        if self.sharded and failure is not None:  # the others may be waiting for this process's pieces: it has to leave
            raise DivergenceError(f"the loss of step {self.step + 1} is not finite: {failure}") from failure
        if self.world.any(failure is not None) or loss is None:
            raise self._diverged(parts, math.nan) from failure
        return loss

    def _parts(self, tokens: np.ndarray, scored: np.ndarray | None) -> list[_Part]:
        """Our micro-batches of a step; each weighs as much as it has of the targets that the step scores."""
        config, world = self.config, self.world
        count = config.batch // world.size
        own = slice(world.rank * count, (world.rank + 1) * count)
        pieces = micro_batches(count, config.batch // config.accumulate)
        rows = torch.from_numpy(tokens[own]).to(self.device).chunk(pieces)
        if scored is None:
            return [_Part(part, None, float(len(rows))) for part in rows]
        masks = np.split(scored[own], len(rows))
        shares = [scored.sum() / (mask.sum() * world.size) for mask in masks]
        there = [torch.from_numpy(mask).to(self.device) for mask in masks]
        return [_Part(*part) for part in zip(rows, there, map(float, shares), strict=True)]

    def _diverged(self, parts: list[_Part], loss: float) -> DivergenceError:
        """Make the step's forward pass again, with the same dropout, and say where it broke."""
        torch.manual_seed(step_seed(self.config.seed, self.step, self.world.rank))
        with torch.compiler.set_stance("force_eager"):
            module = first_bad_module(
                self.model, lambda: [self._loss(self.scores, part.tokens, part.scored) for part in parts]
            )
        found = first_of(self.world.gather(module))
        if found is not None:
            where = f"the first output that is not finite is that of {found[1]}"
        elif math.isfinite(loss):
            gradient = first_of(self.world.gather(first_bad_gradient(self.model)))
            name = None if gradient is None else gradient[1]
            where = f"every output is finite; the first gradient that is not is that of {name}"
        else:
            where = "every layer's output is finite, the loss made of them is not"
        what = "gradient" if math.isfinite(loss) else "loss"
        return known_to_all(DivergenceError(f"the {what} of step {self.step + 1} is not finite: {where}"))
