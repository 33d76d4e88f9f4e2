"""Measure the cost of Kuramoto attention: training steps, the attention core, and memory by length.

    python benchmarks/kuramoto.py [--quick] [--json FILE] [--threads N]

float32, two threads by default. A value is our time divided by the peer's, so 1.1 is 10% more. Decoding is measured by
`generate.py`.

- Training: a step with clipping and AdamW, with the learning rates of a phase stream, of models with as many parameters
  as the standard one.
- The core is the mechanism without its query map: angles to points, drift, delay, fused attention, tangent, step. The
  peer is torch's fused causal attention alone, with queries, keys and values of the width of the points (twice the
  width of a head), contiguous in its own layout. Backward goes to the angles and the parameters, for the peer to
  queries, keys and values.
- Memory is the peak of forward and backward of one layer above the inputs. It should double with the length.
"""

from __future__ import annotations

from functools import partial
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from qkflow import Decoder, KuramotoConfig, mechanism, size
from qkflow.data import CorpusConfig
from qkflow.mechanisms.kuramoto import SynchronyMechanism
from qkflow.models import matched, parameters
from qkflow.training import TrainConfig
from qkflow.training.optim import build_optimizer

import memory
from steps import PASSES, Call, Function, forward_backward, next_token_loss, training_step
from tables import Row
from timing import compare, compare_memory, main, time_alternately

SIZE = "1m"
ARMS = {"`kuramoto`": "kuramoto", "`kuramoto:frustrated=True`": "kuramoto:frustrated=True"}
BATCH, CONTEXT = 32, 256
CORE_TARGET = 1.15
MAX_GROWTH = 2.05
"""Slightly above 2, because torch's fused attention uses larger blocks from length 768 on."""


def training(rounds: int) -> list[Row]:
    tokens = torch.randint(0, 256, (BATCH, CONTEXT + 1))
    functions = {}
    for spec in ("standard", *ARMS.values()):
        torch.manual_seed(0)
        config = matched(size(SIZE, mechanism=spec), parameters(size(SIZE)))
        model = Decoder(config)
        optimizer = build_optimizer(model, TrainConfig(data=CorpusConfig(), model=config, steps=1))
        loss = partial(next_token_loss, lambda t, model=model: model(t)[0], tokens)
        functions[spec] = training_step(model, loss, optimizer)
    times = time_alternately(functions, rounds=rounds)
    work, amount = f"training step at `{SIZE}`, against `standard`", BATCH * CONTEXT
    return [
        compare("kuramoto", work, arm, "time", times, spec, "standard", tokens=amount, at_most=1.1)
        for arm, spec in ARMS.items()
    ]


def core(length: int, rounds: int) -> list[Row]:
    torch.manual_seed(0)
    # a phase model has half the heads of standard attention; the peer has the same
    shape, batch = size(SIZE), BATCH * CONTEXT // length
    heads = KuramotoConfig().n_heads(shape.heads)
    qkv = [torch.randn(batch, heads, length, 2 * shape.width // heads, requires_grad=True) for _ in range(3)]
    table = []
    for name, make_pass in PASSES.items():
        functions = {"fused": make_pass(lambda: F.scaled_dot_product_attention(*qkv, is_causal=True), qkv)}
        functions |= {spec: without_queries(make_pass(*call(spec, batch, length))) for spec in ARMS.values()}
        times = time_alternately(functions, rounds=rounds)
        work = f"core, {name}, length {length:,}, against fused attention"
        table += [
            compare("kuramoto", work, arm, "time", times, spec, "fused", at_most=CORE_TARGET)
            for arm, spec in ARMS.items()
        ]
    return table


def call(spec: str, batch: int, length: int) -> tuple[Call, list[Tensor]]:
    """Return a call of the mechanism, and the tensors that need gradients."""
    shape = size(SIZE)
    torch.manual_seed(0)
    layer = mechanism(spec)(shape.width, shape.heads, 0, shape.layers)
    theta = torch.randn(batch, length, shape.width, requires_grad=True)
    return lambda: layer(theta)[0], [theta, *layer.parameters()]


def without_queries(function: Function) -> Function:
    """Return the function with the points themselves as queries."""

    def run() -> None:
        with mock.patch.object(SynchronyMechanism, "_queries", lambda _, points: points):
            function()

    return run


def both_passes(case: tuple[str, int]) -> Function:
    spec, length = case
    return forward_backward(*call(spec, 2, length))


def memory_growth(short: int, long: int) -> list[Row]:
    """Compare the peak memory of forward and backward above the inputs, for one layer."""
    if not memory.IS_SUPPORTED:
        return []
    table = []
    for arm, spec in ARMS.items():
        peaks = memory.peak_megabytes(both_passes, (spec, 64), [(spec, short), (spec, long)])
        work, against = f"memory of a layer, {arm} at `{SIZE}`", f"{long:,} and {short:,} tokens"
        table.append(compare_memory("growth", work, against, peaks[1], peaks[0], at_most=MAX_GROWTH))
    return table


def measure(quick: bool) -> list[Row]:
    rounds = 3 if quick else 15
    return [*training(rounds), *core(256, rounds), *core(1024, rounds), *memory_growth(4096, 8192)]


if __name__ == "__main__":
    main(__doc__, measure)
