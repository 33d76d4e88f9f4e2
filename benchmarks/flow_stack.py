"""Train many one-layer models in one batched computation: one model per arm and seed.

With one-hot tokens a text is the count n_v of each token, and attention over its positions is a softmax of
`score_v + log n_v` over the vocabulary. The gradients are written out. `check` compares the result with `OneLayer`,
`circuit_groups` and torch's SGD.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from qkflow.circuits import RatioSchedule, circuit_groups, circuit_lambdas
from qkflow.data.tasks import Instance, TaskConfig
from qkflow.data.tasks.synthetic import CLASSES, GROUP, LABEL, QUERY, VOCABULARY, synthetic
from qkflow.models.one_layer import Form, OneLayer, OneLayerConfig

Texts = Literal["context", "seen", "even"]
D, RATE, BATCH = VOCABULARY, 1e-2, 32
QUERIES = slice(QUERY, QUERY + CLASSES)


@dataclass(frozen=True)
class Bags:
    """Texts of s seeds as bags of tokens: log counts `logs` [s n d] and class labels `classes` [s n]."""

    logs: Tensor
    classes: Tensor

    def __getitem__(self, index: Tensor) -> Bags:
        """Select the texts `index` [s batch] of each seed."""
        rows = torch.arange(len(index))[:, None]
        return Bags(self.logs[rows, index], self.classes[rows, index])

    def repeat(self, arms: int) -> Bags:
        return Bags(self.logs.repeat(arms, 1, 1), self.classes.repeat(arms, 1))

    @property
    def is_informative(self) -> Tensor:
        """Which tokens belong to the class of the text: [s n d]."""
        return torch.arange(D) // GROUP == self.classes[..., None] + 1


def bags(seeds: Sequence[Sequence[Instance]], texts: Texts = "context") -> Bags:
    """Convert the texts of each seed to bags of the tokens that are attended to.

    `context`: the context; `seen`: the context and the query; `even`: a context in which all tokens of a class are
    equally frequent, as the reduced flow assumes.
    """
    generator, counts = np.random.default_rng(0), []
    for instance in (instance for instances in seeds for instance in instances):
        tokens = np.array(instance.tokens if texts == "seen" else instance.tokens[:-1])
        if texts == "even":
            positions = np.array(instance.rationale)
            tokens[positions] = tokens[positions] // GROUP * GROUP + generator.integers(GROUP, size=len(positions))
        counts.append(np.bincount(tokens, minlength=D))
    return Bags(
        torch.from_numpy(np.array(counts)).double().log().view(len(seeds), -1, D),
        torch.tensor([[instance.label - LABEL for instance in instances] for instances in seeds]),
    )


def data(seeds: Sequence[int], texts: Texts = "context") -> list[Bags]:
    """Return the training, validation and test texts of each seed."""
    tasks = [synthetic(TaskConfig(name="synthetic", seed=seed)) for seed in seeds]
    return [bags([getattr(task, split) for task in tasks], texts) for split in ("train", "validation", "test")]


def batches(texts: Bags, seeds: Sequence[int], steps: int) -> Iterator[Bags]:
    """Yield a batch per step, drawn with replacement; seeds have different batches, arms the same."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    n = texts.classes.shape[1]
    for step in range(steps):
        if step % 1000 == 0:
            drawn = torch.stack([torch.randint(n, (1000, BATCH), generator=g) for g in generators], dim=1)
        yield texts[drawn[step % 1000]]


class Stack:
    """One model per arm and seed (arms first), trained with SGD."""

    def __init__(
        self,
        form: Form,
        arms: Sequence[RatioSchedule],
        seeds: int,
        *,
        start: float,
        rate: float = RATE,
        labels_only: bool = False,
    ) -> None:
        self.form, self.arms, self.seeds, self.rate = form, arms, seeds, rate
        circuits = OneLayer(OneLayerConfig(form=form)).circuits()
        self.size = len(arms) * seeds
        eye = start * torch.eye(D).double()
        self.allowed = torch.zeros(D).double()  # added to the logits; with `labels_only`, only labels can be predicted
        if labels_only:
            self.allowed.fill_(-math.inf)[LABEL : LABEL + CLASSES] = 0
        self.matrices = {name: eye.repeat(self.size, 1, 1) for name in (*circuits.qk, *circuits.ov)}

    def forward(self, texts: Bags) -> tuple[Tensor, Tensor, Tensor]:
        """Return the attention on each token of the vocabulary, the attended values, and the logits."""
        w = self.matrices
        query_keys = w["query"][:, :, QUERIES].mT @ w["key"] if "query" in w else w["qk"][:, QUERIES]
        scores = query_keys.gather(1, texts.classes[..., None].expand(-1, -1, D)) * D**-0.5
        z = (scores + texts.logs).softmax(-1)
        if "ov" in w:
            return z, z, z @ w["ov"].mT + self.allowed
        v = z @ w["value"].mT
        return z, v, v @ w["output"].mT + self.allowed

    def step(self, texts: Bags, step: int, steps: int) -> None:
        """Make one SGD step with all models, each on the batch of its seed."""
        w, rate = self.matrices, self.rate
        texts = texts.repeat(len(self.arms))
        z, v, logits = self.forward(texts)
        error = logits.softmax(-1) / texts.classes.shape[1]
        error.scatter_add_(2, texts.classes[..., None] + LABEL, error.new_full((self.size, BATCH, 1), -1 / BATCH))
        if "ov" in w:
            dz = error @ w["ov"]
            w["ov"].baddbmm_(error.mT, z, alpha=-rate)
        else:
            dv = error @ w["output"]
            dz = dv @ w["value"]
            w["output"].baddbmm_(error.mT, v, alpha=-rate)
            w["value"].baddbmm_(dv.mT, z, alpha=-rate)
        ratios = torch.tensor([arm.at(step, steps) for arm in self.arms], dtype=z.dtype)
        ratio = rate * D**-0.5 * ratios.repeat_interleave(self.seeds)[:, None, None]
        dscore = z * (dz - (z * dz).sum(-1, keepdim=True)) * ratio
        dquery_keys = F.one_hot(texts.classes, CLASSES).to(z.dtype).mT @ dscore
        if "qk" in w:
            w["qk"][:, QUERIES] -= dquery_keys
        else:
            query = w["query"][:, :, QUERIES].clone()
            w["query"][:, :, QUERIES] -= w["key"] @ dquery_keys.mT
            w["key"].baddbmm_(query, dquery_keys, alpha=-1)

    def evaluate(self, texts: Bags) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return loss, attention on the class's tokens and probability of the label, each [arms seeds texts]."""
        texts = texts.repeat(len(self.arms))
        z, _, logits = self.forward(texts)
        log_p = logits.log_softmax(-1).gather(2, texts.classes[..., None] + LABEL)[..., 0]
        shape = (len(self.arms), self.seeds, -1)
        mass = (z * texts.is_informative).sum(-1)
        return (-log_p).view(shape).numpy(), mass.view(shape).numpy(), log_p.exp().view(shape).numpy()


def make_optimizer(model: OneLayer, arm: RatioSchedule, rate: float, steps: int) -> tuple[SGD, LambdaLR]:
    """Return the optimizer and the scheduler that a user would create for one model of an arm."""
    groups = circuit_groups(model, rate, r=arm.start)
    optimizer = SGD(groups)
    return optimizer, LambdaLR(optimizer, circuit_lambdas(groups, lambda step: arm.at(step, steps)))


def check(steps: int = 30) -> float:
    """Return the largest difference from `OneLayer` after some steps of torch's SGD, in float64, over all forms."""
    arms, seeds, worst = (RatioSchedule(), RatioSchedule(start=5.0), RatioSchedule(start=1.0, end=40.0)), (1, 2), 0.0
    tasks = [synthetic(TaskConfig(name="synthetic", seed=seed, train=64, test=4)) for seed in seeds]
    tokens = [torch.tensor([instance.tokens for instance in task.train]) for task in tasks]
    texts = bags([task.train for task in tasks])
    for form in get_args(Form):
        stack = Stack(form, arms, len(seeds), start=0.3, rate=0.3)
        models = [OneLayer(OneLayerConfig(form=form, start=0.3)).double() for _ in range(stack.size)]
        for model in models:
            for name in (*model.circuits().qk, *model.circuits().ov):  # break the symmetry between tokens
                with torch.no_grad():
                    model.get_parameter(name).add_(torch.linspace(-0.3, 0.3, D * D, dtype=torch.float64).view(D, D))
        for name, matrices in stack.matrices.items():
            matrices.copy_(torch.stack([model.get_parameter(name).detach() for model in models]))
        optimizers = [make_optimizer(model, arms[i // len(seeds)], 0.3, steps) for i, model in enumerate(models)]
        for step in range(steps):
            index = torch.randint(64, (len(seeds), BATCH), generator=torch.Generator().manual_seed(step))
            stack.step(texts[index], step, steps)
            for i, (model, (optimizer, scheduler)) in enumerate(zip(models, optimizers, strict=True)):
                seed = i % len(seeds)
                loss = F.cross_entropy(model(tokens[seed][index[seed]]), texts.classes[seed][index[seed]] + LABEL)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
        for name, matrices in stack.matrices.items():
            difference = torch.stack([model.get_parameter(name).detach() for model in models]) - matrices
            worst = max(worst, float(difference.abs().max()))
    return worst if math.isfinite(worst) else math.inf
