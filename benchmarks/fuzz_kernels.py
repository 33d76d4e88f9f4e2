"""Compare every C kernel with its definition in float64, for random valid calls, and try invalid ones.

    python benchmarks/fuzz_kernels.py --valid 100000 --invalid 10000

A valid call draws an operator, shapes, memory layouts, dtype, options and threads. Outputs and gradients may differ
from the definition by 1e-4 in float32 and 1e-10 in float64, relative to the largest value of a tensor. Memory from
`torch.empty` holds NaN, so that a value that a kernel does not write shows.

An invalid call changes one argument of a valid call (shape, rank, dtype, device, layout, None, or a number out of
range) and must raise an exception, through the public function and through the registered operators. The native
decoding step of a mechanism may also return None: PyTorch's operators then compute or refuse the call. Invalid calls
run in a process of their own; if it dies, the call that killed it is reported and the run continues after it.

The seed is fixed: a failure prints the number of its call, and `--first NUMBER --valid 1` repeats it.

To add an operator, write a function that returns a random `Call` and add it to `OPERATORS`.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qkflow.layout import Layout
from qkflow.mechanisms.base import Mechanism
from qkflow.mechanisms.coupled import CoupledAttention, CoupledConfig
from qkflow.mechanisms.coupling import CouplingConfig
from qkflow.mechanisms.delta_family import (
    Comba,
    CombaConfig,
    DeltaNet,
    DeltaNetConfig,
    EDAConfig,
    EraseThenDelta,
    GatedDeltaNet,
    GatedDeltaNetConfig,
    KDAConfig,
    KimiDeltaAttention,
    QDelta,
    QDeltaConfig,
)
from qkflow.mechanisms.delta_rule import DeltaMechanism
from qkflow.mechanisms.differential import DifferentialAttention, DifferentialConfig
from qkflow.mechanisms.kuramoto import KuramotoAttention, KuramotoConfig
from qkflow.mechanisms.softmax import SoftmaxMechanism, StandardAttention, StandardConfig
from qkflow.ops import few_rows, kuramoto, newton_schulz
from qkflow.ops.attention import attention, attention_naive
from qkflow.ops.csrc import build
from qkflow.ops.delta_rule import delta_rule
from qkflow.ops.delta_rule.naive import delta_rule_recurrent
from qkflow.ops.linear import linear
from qkflow.ops.norm import add_rms_norm, rms_norm
from qkflow.ops.projection import project_heads
from qkflow.ops.rotary import apply_rotary, rotary_factors
from qkflow.ops.short_conv import short_conv
from qkflow.ops.swiglu import swiglu
from qkflow.ops.symplectic import naive
from qkflow.ops.symplectic.reversible import drift_kick_reversible
from qkflow.state import KVCache, RecurrentState, ShiftedKVCache, State

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-10}
MIN_SIZE = 0.1
"""Errors are relative to the largest value of a tensor, but at least to this; inputs are of order one."""
SIZES = (1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33)
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 32, 33)
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A function with valid arguments, to be made invalid one at a time."""

    function: Callable[..., object]
    arguments: dict[str, Any]
    free: frozenset[str] = frozenset()
    """Changes that are valid: `x.1` (size of a dimension of x), `x.broadcast` (a size of 1), `x.rank`, `x.float`
    (another floating-point dtype), `x.int`, `x.device`, `x.sparse` and `x.None`."""
    wrong: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Invalid values of arguments that are not tensors."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A valid call of an operator."""

    inputs: list[Tensor]
    kernel: Callable[..., Outputs]
    reference: Callable[..., Outputs]
    """The definition; gets the inputs in float64."""
    entries: Callable[[], list[Entry]]
    sizes: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[float]] | None = None
    """Size of the terms that each output and gradient is a sum of, given the inputs and the outputs' gradients."""
    has_operator: bool = True
    """Whether the kernel is also a registered operator."""
    has_backward: bool = True
    """Whether gradients are compared; without, calls run without gradients, as in decoding."""


# ---- random tensors


def strided(rng: random.Random, x: Tensor) -> Tensor:
    """A tensor of the same shape in another memory layout; only `expanded` has other values."""
    kind = rng.choice(("contiguous", "contiguous", "offset", "slice", "permuted", "expanded", "step", "negated"))
    if kind == "offset":
        return torch.cat([x.new_zeros(rng.choice((1, 3))), x.flatten()])[-max(x.numel(), 1) :][: x.numel()].view(
            x.shape
        )
    if kind == "slice":
        starts = [rng.choice((0, 1, 3)) for _ in x.shape]
        big = x.new_zeros([size + start + rng.choice((0, 2)) for size, start in zip(x.shape, starts, strict=True)])
        part = big[tuple(slice(start, start + size) for size, start in zip(x.shape, starts, strict=True))]
        return part.copy_(x)
    if kind == "permuted":
        order = rng.sample(range(x.ndim), x.ndim)
        return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.ndim)])
    if kind == "expanded" and x.ndim and x.numel():
        return x.narrow(rng.randrange(x.ndim), 0, 1).expand(x.shape)
    if kind == "step" and x.ndim:
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]
    return torch._neg_view(-x) if kind == "negated" else x


def unit_vectors(rng: random.Random, dtype: torch.dtype, *shape: int) -> Tensor:
    """Vectors of length 1 in any memory layout: the delta rule amplifies rounding if keys are longer."""
    x = strided(rng, F.normalize(torch.randn(*shape, dtype=dtype), dim=-1))
    is_expanded = x.stride(-1) == 0 and x.shape[-1] > 1
    return (x[..., :1].sign() * x.shape[-1] ** -0.5).expand(x.shape) if is_expanded else x


def noise(rng: random.Random, dtype: torch.dtype, *shape: int) -> Tensor:
    return strided(rng, torch.randn(shape, dtype=dtype))


def uniform(rng: random.Random, dtype: torch.dtype, low: float, high: float, *shape: int) -> Tensor:
    return strided(rng, torch.empty(shape, dtype=dtype).uniform_(low, high))


def rows(rng: random.Random) -> int:
    return rng.choice((0, 1, 1, 1, 2, 2, 3)) if rng.random() < 0.1 else rng.choice((1, 1, 2, 3))


# ---- softmax attention


def attention_call(rng: random.Random, dtype: torch.dtype, tokens: int | None = None) -> Call:
    groups = rng.choice((1, 1, 2, 3))
    n, heads = rows(rng), groups * rng.choice((1, 1, 2, 4))
    t, width, values = (
        rng.choice((*SIZES, 64, 65, 70)) if tokens is None else tokens,
        rng.choice(WIDTHS),
        rng.choice(WIDTHS),
    )
    causal = rng.random() < 0.75
    s = t + rng.choice((0, 0, *SIZES)) if causal else rng.choice(SIZES)
    if tokens is None and rng.random() < 0.02:
        t, s, n = rng.choice((1, 3)), rng.choice((300, 1025)), 1
    window = rng.choice((None, None, 1, 2, 16, 50)) if causal else None
    scale = rng.choice((None, None, 0.0, 0.1, 1.0, -0.5))
    options = {"causal": causal, "window": window, "scale": scale}
    q, k, v = (
        noise(rng, dtype, *shape) for shape in ((n, t, heads, width), (n, s, groups, width), (n, s, groups, values))
    )

    def sizes(inputs: Sequence[Tensor], go: Sequence[Tensor]) -> Sequence[float]:
        q, k, v, g = (largest(x) for x in (*inputs, go[0]))
        dots = (
            g * v * values**0.5 * (abs(scale) if scale is not None else width**-0.5)
        )  # scores' gradients are sums of these
        return v, dots * k, dots * q, g

    def entries() -> list[Entry]:
        reach = (1 << 60 if window is None else window) if causal else 0
        tensors = {"q": q, "k": k, "v": v}
        saved = dict(zip(("o", "lse"), torch.ops.qkflow.attention(q, k, v, reach, 1.0, True), strict=True))
        free = {"v.3", "q.1", "q.2"}
        settings = {"window": reach, "scale": 1.0}
        backward = {"go": torch.zeros_like(saved["o"]), **tensors, **saved, **settings}
        misfits = [q.new_zeros(n, t, groups + 1, width)] if groups > 1 else []
        misfits += [q.new_zeros(n, s + 1, heads, width)] if causal else []
        wrong = {"window": (-1, -7, -(1 << 40)), "q": tuple(misfits)}
        return [
            Entry(
                function=attention,
                arguments={**tensors, "causal": causal, "window": window, "scale": 1.0, "backend": "cpu"},
                free=frozenset(free),
                wrong={**wrong, "backend": ("gpu",), "window": (0, -1)},
            ),
            Entry(
                function=torch.ops.qkflow.attention,
                arguments={**tensors, **settings, "save": True},
                free=frozenset(free),
                wrong=wrong,
            ),
            Entry(function=torch.ops.qkflow.attention_backward, arguments=backward, wrong=wrong),
        ]

    return Call(
        inputs=[q, k, v],
        kernel=lambda *x: (attention(*x, **options, backend="cpu"),),
        reference=lambda *x: (attention_naive(*x, **options),),
        entries=entries,
        sizes=sizes,
    )


# ---- delta rule


def delta_call(rng: random.Random, dtype: torch.dtype, tokens: int | None = None) -> Call:
    n, heads, width, values = rows(rng), rng.choice((1, 1, 2, 3)), rng.choice(WIDTHS), rng.choice(WIDTHS)
    t = rng.choice((*range(1, 10), 16, 17, 33)) if tokens is None else tokens
    lengths = None
    if rng.random() < 0.25 and t > 1 and n:  # packed: several sequences in one row
        cuts = sorted(rng.sample(range(1, t), min(t - 1, rng.choice((0, 1, 2)))))
        n, lengths = 1, [0, *cuts, t]
    layout = None if lengths is None else Layout.packed(lengths)
    sequences = n if lengths is None else len(lengths) - 1
    q, k = (unit_vectors(rng, dtype, n, t, heads, width) for _ in range(2))
    v, beta = noise(rng, dtype, n, t, heads, values), uniform(rng, dtype, 0.0, rng.choice((1.0, 1.9)), n, t, heads)
    optional: dict[str, Tensor] = {}
    decay = rng.choice((None, (n, t, heads), (n, t, heads, width)))
    if decay is not None:
        optional["log_alpha"] = uniform(rng, dtype, rng.choice((-0.1, -2.0)), 0.0, *decay)
    erase = rng.choice(("none", "weight", "direction"))
    if erase == "weight":
        optional["erase"] = uniform(rng, dtype, -0.3, 0.3, n, t, heads)
    elif erase == "direction":
        optional["erase"] = unit_vectors(rng, dtype, n, t, heads, width)
    if rng.random() < 0.5:
        optional["state"] = noise(rng, dtype, sequences, heads, values, width)
    chunk, scale = rng.choice((None, None, 1, 2, 4, 16, 32)), rng.choice((None, 1.0, 0.3))
    names = ["q", "k", "v", "beta", *optional]

    def kernel(*x: Tensor) -> Outputs:
        return delta_rule(**dict(zip(names, x, strict=True)), layout=layout, scale=scale, chunk=chunk, backend="cpu")  # pyright: ignore[reportArgumentType]

    def reference(*x: Tensor) -> Outputs:
        named = dict(zip(names, x, strict=True))
        state, log_alpha, x_t = (named.pop(name, None) for name in ("state", "log_alpha", "erase"))
        if x_t is not None and x_t.ndim == 3:
            x_t = named["k"] + x_t[..., None] * named["q"]
        factor = width**-0.5 if scale is None else scale
        spans = [(0, t)] if lengths is None else list(pairwise(lengths))
        results = []
        for i, (first, last) in enumerate(spans):
            parts = [y if y is None else y[:, first:last] for y in (*named.values(), log_alpha, x_t)]
            start = state if lengths is None or state is None else state[i : i + 1]
            results.append(delta_rule_recurrent(*parts, start, factor))  # pyright: ignore[reportArgumentType]
        return torch.cat([o for o, _ in results], 1), torch.cat([final for _, final in results])

    def entries() -> list[Entry]:
        tensors = {"q": q, "k": k, "v": v, "beta": beta, "log_alpha": None, "erase": None, **optional}
        state = tensors.pop("state", None)
        floats = {f"{name}.float" for name in (*tensors, "state")}
        alike = {"log_alpha.rank", "erase.rank"} if width == 1 else set()  # flattened, one channel is one per head
        absent = alike | {
            f"{name}.None" for name in ("log_alpha", "erase", "state", "layout", "scale", "chunk", "go", "gfinal")
        }
        alone = frozenset(absent if state is not None else {*absent, "v.3"})
        public = {**tensors, "state": state, "layout": layout, "scale": 1.0, "chunk": chunk, "backend": "cpu"}
        listing = [
            Entry(
                function=delta_rule,
                arguments=public,
                free=frozenset({*alone, *floats}),
                wrong={"chunk": (0, -1, 1000), "backend": ("gpu",)},
            )
        ]
        if layout is None:
            settings = {"scale": 1.0, "chunk": chunk or 0, "backend": "cpu"}
            forward = {**tensors, "state": state, "scale": 1.0, "chunk": chunk or 0, "save": True, "backend": "cpu"}
            o, final, errors, checkpoints = torch.ops.qkflow.delta(*forward.values())
            saved = {"o": o, "errors": errors, "checkpoints": checkpoints}
            backward = {"go": torch.zeros_like(o), "gfinal": torch.zeros_like(final), **tensors, **saved, **settings}
            wrong = {"chunk": (-1, 1000), "backend": ("naive", "gpu", "")}
            listing.append(Entry(function=torch.ops.qkflow.delta, arguments=forward, free=alone, wrong=wrong))
            listing.append(
                Entry(
                    function=torch.ops.qkflow.delta_backward,
                    arguments=backward,
                    free=frozenset(absent),
                    wrong=wrong,
                )
            )
        return listing

    return Call(inputs=[q, k, v, beta, *optional.values()], kernel=kernel, reference=reference, entries=entries)


# ---- drift and kick


def drift_kick_call(rng: random.Random, dtype: torch.dtype, tokens: int | None = None) -> Call:
    width, hidden = rng.choice(WIDTHS), rng.choice(WIDTHS)
    leading = rng.choice(((), (rows(rng),), (rows(rng), rng.choice((1, 3, 40))), (2, rng.choice(SIZES), 2)))
    leading = leading if tokens is None else (2, tokens, 3)
    steps = rng.choice((1, 1, 2, 3))
    coefficients = rng.choice(
        (naive.drift_coefficients("leapfrog", steps), naive.drift_coefficients("symplectic-euler", steps), (0.0,) * 2)
    )
    activation = rng.choice(("silu", "sigmoid"))
    q, k = noise(rng, dtype, *leading, width), noise(rng, dtype, *leading, width)
    w1, w2 = noise(rng, dtype, hidden, width) / width**0.5, noise(rng, dtype, width, hidden) / hidden**0.5
    b1, b2, dt = noise(rng, dtype, hidden), noise(rng, dtype, width), uniform(rng, dtype, -0.3, 0.3)
    inputs = [q, k, strided(rng, w1), b1, strided(rng, w2), b2, dt]

    def kernel(q: Tensor, k: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, dt: Tensor) -> Outputs:
        return drift_kick_reversible(q, k, (w1, b1, w2, b2), dt, coefficients, activation)

    def reference(q: Tensor, k: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, dt: Tensor) -> Outputs:
        phi = F.silu if activation == "silu" else torch.sigmoid
        return naive.drift_kick(q, k, lambda q: F.linear(phi(F.linear(q, w1, b1)), w2, b2), dt, coefficients)

    def public(coefficients: Sequence[float], activation: Any, **x: Tensor) -> Outputs:
        force = (x["w1"], x["b1"], x["w2"], x["b2"])
        return drift_kick_reversible(x["q"], x["k"], force, x["dt"], coefficients, activation)

    def entries() -> list[Entry]:
        tensors = dict(zip(("q", "k", "w1", "b1", "w2", "b2", "dt"), inputs, strict=True))
        force = {name: tensors[name] for name in ("dt", "w1", "b1", "w2", "b2")}
        settings = {"coefficients": list(coefficients), "activation": ("silu", "sigmoid").index(activation)}
        moved = {"q": q, "k": k if any(coefficients) else None, "gq": q, "gk": k}
        wrong = {"coefficients": ([], [1.0]), "activation": (-1, 2, 1 << 20)}
        free = frozenset({"dt.float", "dt.int", "gq.None"} | (set() if any(coefficients) else {"k.None"}))
        return [
            Entry(
                function=public,
                arguments={**tensors, "coefficients": coefficients, "activation": activation},
                free=frozenset({"dt.float", "dt.int"}),
                wrong={**wrong, "activation": ("relu", 0)},
            ),
            Entry(
                function=torch.ops.qkflow.drift_kick,
                arguments={"q": q, "k": k, **force, **settings},
                free=free - {"k.None"},
                wrong=wrong,
            ),
            Entry(
                function=torch.ops.qkflow.drift_kick_backward,
                arguments={**moved, **force, **settings},
                free=free,
                wrong=wrong,
            ),
        ]

    return Call(inputs=inputs, kernel=kernel, reference=reference, entries=entries)


# ---- short convolution


def short_conv_call(rng: random.Random, dtype: torch.dtype, tokens: int | None = None) -> Call:
    n, t, channels = (
        rows(rng),
        rng.choice((0, *SIZES, 130, 260)) if tokens is None else tokens,
        rng.choice((*WIDTHS, 300)),
    )
    taps = rng.choice((1, 2, 3, 4, 4, 4, 5, 64))
    inputs = [noise(rng, dtype, n, t, channels), noise(rng, dtype, channels, taps) / taps**0.5]
    if rng.random() < 0.5:
        inputs.append(noise(rng, dtype, n, taps - 1, channels))

    def reference(x: Tensor, weight: Tensor, state: Tensor | None = None) -> Outputs:
        window = torch.cat([x.new_zeros(n, taps - 1, channels) if state is None else state, x], 1)
        return (F.silu(sum((window[:, j : j + t] * weight[:, j] for j in range(taps)), torch.zeros_like(x))),)

    def entries() -> list[Entry]:
        tensors = {"x": inputs[0], "weight": inputs[1], "state": inputs[2] if len(inputs) > 2 else None}
        backward = {"gy": torch.ones_like(inputs[0]), **tensors}
        many = {"weight": (inputs[1].new_zeros(channels, 65),)} if len(inputs) < 3 else {}
        free = {"state.None"} | (set() if len(inputs) > 2 else {"x.0", "weight.1"}) | {"x.1"}
        return [
            Entry(
                function=short_conv,
                arguments=tensors,
                free=frozenset({*free, "weight.float", "state.float", "x.float"}),
            ),
            Entry(
                function=torch.ops.qkflow.short_conv,
                arguments=tensors,
                free=frozenset(free),
                wrong=many,
            ),
            Entry(
                function=torch.ops.qkflow.short_conv_backward,
                arguments=backward,
                free=frozenset({"state.None"} | (set() if len(inputs) > 2 else {"weight.1"})),
                wrong=many,
            ),
        ]

    return Call(inputs=inputs, kernel=lambda *x: (short_conv(*x),), reference=reference, entries=entries)


# ---- phases


def phase_call(rng: random.Random, dtype: torch.dtype, tokens: int | None = None) -> Call:
    """Points, the phase increment and the shift by one token, from the same phases."""
    n, t, heads, j = (
        rows(rng),
        rng.choice(SIZES) if tokens is None else tokens,
        rng.choice((1, 2, 3)),
        rng.choice(WIDTHS),
    )
    full = (n, t, heads, j)
    named = {
        "theta": 3 * noise(rng, dtype, *full),
        "mean": noise(rng, dtype, *full, 2),
        "tangential": noise(rng, dtype, heads, j),
    }
    if rng.random() < 0.5:
        named["radial"] = noise(rng, dtype, heads, j)
    firsts = rng.choice(((), ("key",), ("value",), ("key", "value")))
    named |= {name: noise(rng, dtype, n, 1, heads, j, 2) for name in firsts}
    n_shifted = 2 if "value" in firsts else rng.choice((1, 2))
    angles = torch.randn(t, heads, j, dtype=dtype)
    rotation = rng.choice((None, strided(rng, torch.stack([angles.cos(), angles.sin()], -1))))

    def kernel(*inputs: Tensor) -> Outputs:
        x = dict(zip(named, inputs, strict=True))
        points = kuramoto.points(x["theta"])
        increment = kuramoto.phase_increment(x["theta"], points, x["mean"], x["tangential"], x.get("radial"))
        starts = (x.get("key"), x.get("value"))[:n_shifted]
        return points, increment, *kuramoto.shift_points(x["theta"], points, rotation, starts)

    def reference(*inputs: Tensor) -> Outputs:
        x = dict(zip(named, inputs, strict=True))
        z, mean = torch.polar(torch.ones_like(x["theta"]), x["theta"]), torch.complex(*x["mean"].unbind(-1))
        y = z.conj() * mean
        increment = x["tangential"] * y.imag + (x["radial"] * y.real if "radial" in x else 0)
        turn = 1 if rotation is None else torch.complex(*rotation.double().unbind(-1))
        shifted = []
        for start, values in ((x.get("key"), z * turn), (x.get("value"), z))[:n_shifted]:
            first = z.new_zeros(n, 1, heads, j) if start is None else torch.complex(*start.unbind(-1))
            shifted.append(torch.cat([first, values], 1)[:, :t])
        pairs = [torch.stack([w.real, w.imag], -1) for w in (z, *shifted)]
        return pairs[0], increment, *pairs[1:]

    def shift(theta: Tensor, points: Tensor, rotation: Tensor | None, key: Tensor, value: Tensor) -> Outputs:
        return kuramoto.shift_points(theta, points, rotation, (key, value))

    def entries() -> list[Entry]:
        theta, floats = (
            named["theta"],
            {f"{name}.float" for name in ("theta", "points", "mean", "tangential", "radial")},
        )
        points, first = kuramoto.points(theta), theta.new_zeros(n, 1, heads, j, 2)
        weights = {"tangential": named["tangential"], "radial": named.get("radial")}
        single = {f"theta.{change}" for change in ("0", "1", "2", "3", "rank", "float", "device")}
        broadcast = {f"{x}.broadcast" for x in ("mean", "tangential", "radial", "rotation", "key", "value")}
        optional = {f"{x}.None" for x in ("radial", "rotation", "key", "value")}
        shift_floats = {f"{name}.float" for name in ("theta", "points", "rotation", "key", "value")}
        return [
            Entry(function=kuramoto.points, arguments={"theta": theta}, free=frozenset(single)),
            Entry(
                function=kuramoto.phase_increment,
                arguments={"theta": theta, "points": points, "mean": named["mean"], **weights},
                free=frozenset({*floats, *broadcast, *optional}),
            ),
            Entry(
                function=shift,
                arguments={"theta": theta, "points": points, "rotation": rotation, "key": first, "value": first},
                free=frozenset({*shift_floats, *broadcast, *optional}),
            ),
        ]

    return Call(inputs=[*named.values()], kernel=kernel, reference=reference, entries=entries)


def tangent_call(rng: random.Random, dtype: torch.dtype, tokens: int | None = None) -> Call:
    shape = (rows(rng), rng.choice(SIZES) if tokens is None else tokens, rng.choice(WIDTHS), 2)
    points, mean = noise(rng, dtype, *shape), noise(rng, dtype, *shape)

    def entries() -> list[Entry]:
        free = {f"{x}.{change}" for x in ("points", "mean") for change in ("float", "broadcast", "rank")}
        return [Entry(function=kuramoto.tangent, arguments={"points": points, "mean": mean}, free=frozenset(free))]

    return Call(
        inputs=[points, mean],
        kernel=lambda points, mean: (kuramoto.tangent(points, mean),),
        reference=lambda points, mean: (points[..., 0] * mean[..., 1] - points[..., 1] * mean[..., 0],),
        entries=entries,
    )


# ---- linear layers, SwiGLU, norms and rotary positions; PyTorch's operators compute what the kernels do not


def stream(rng: random.Random, dtype: torch.dtype, tokens: int | None, width: int) -> Tensor:
    """An input [b, t, d]; kernels of linear layers start at 64 rows."""
    return noise(rng, dtype, rows(rng), rng.choice((*SIZES, 70, 130)) if tokens is None else tokens, width)


def weight_matrix(rng: random.Random, dtype: torch.dtype, outputs: int, inputs: int) -> Tensor:
    return noise(rng, dtype, outputs, inputs) / inputs**0.5


def linear_call(rng: random.Random, dtype: torch.dtype, tokens: int | None = None) -> Call:
    width, outputs = rng.choice((*WIDTHS, 100)), rng.choice((*WIDTHS, 100))
    x, weight = stream(rng, dtype, tokens, width), weight_matrix(rng, dtype, outputs, width)

    def entries() -> list[Entry]:
        free = frozenset(
            {
                "x.0",
                "x.1",
                "x.rank",
                "x.sparse",
                "x.device",
                "weight.0",
                "weight.rank",
                "weight.sparse",
                "weight.device",
            }
        )
        return [Entry(function=linear, arguments={"x": x, "weight": weight}, free=free)]

    return Call(
        inputs=[x, weight],
        kernel=lambda *a: (linear(*a),),
        reference=lambda *a: (F.linear(*a),),
        entries=entries,
        has_operator=False,
    )


def swiglu_call(rng: random.Random, dtype: torch.dtype, tokens: int | None = None) -> Call:
    width, hidden = rng.choice((*WIDTHS, 100)), rng.choice((*WIDTHS[1:], 100))
    x = stream(rng, dtype, tokens, width)
    gate, up = (weight_matrix(rng, dtype, hidden, width) for _ in range(2))

    def reference(x: Tensor, gate: Tensor, up: Tensor) -> Outputs:
        return (F.silu(F.linear(x, gate)) * F.linear(x, up),)

    def entries() -> list[Entry]:
        free = {"x.0", "x.1", "x.rank", "gate.broadcast", "up.broadcast"}
        free |= {f"{name}.{change}" for name in ("x", "gate", "up") for change in ("sparse", "device")}
        return [Entry(function=swiglu, arguments={"x": x, "gate": gate, "up": up}, free=frozenset(free))]

    return Call(
        inputs=[x, gate, up], kernel=lambda *a: (swiglu(*a),), reference=reference, entries=entries, has_operator=False
    )


def norm_call(rng: random.Random, dtype: torch.dtype, tokens: int | None = None) -> Call:
    width, has_branch = rng.choice((*WIDTHS[1:], 100)), rng.random() < 0.5
    inputs = [stream(rng, dtype, tokens, width), noise(rng, dtype, width)]
    if has_branch:
        inputs.insert(1, strided(rng, torch.randn_like(inputs[0])))

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    def reference(x: Tensor, *others: Tensor) -> Outputs:
        return (x + others[0], normed(x + others[0], others[1])) if has_branch else (normed(x, *others),)

    def entries() -> list[Entry]:
        names = ("x", "branch", "weight") if has_branch else ("x", "weight")
        valid = ("0", "1", "rank", "int", "float", "sparse", "broadcast", "device")
        free = frozenset(f"{name}.{change}" for name in names for change in valid) - {"weight.0"}
        function = add_rms_norm if has_branch else rms_norm
        return [Entry(function=function, arguments=dict(zip(names, inputs, strict=True)), free=free)]

    def kernel(*tensors: Tensor) -> Outputs:
        return add_rms_norm(*tensors) if has_branch else (rms_norm(*tensors),)

    return Call(inputs=inputs, kernel=kernel, reference=reference, entries=entries, has_operator=False)


def projection_call(rng: random.Random, dtype: torch.dtype, tokens: int | None = None) -> Call:
    heads, key_heads, width = rng.choice((2, 3, 4)), rng.choice((1, 2)), 2 * rng.choice((1, 2, 4, 8, 9))
    x = stream(rng, dtype, tokens, rng.choice(WIDTHS))
    outputs = heads * width, key_heads * width, rng.choice((1, 2)) * 5
    weights = [weight_matrix(rng, dtype, size, x.shape[2]) for size in outputs]
    widths = (width, width, 5)
    offset = 3 if rng.random() < 0.5 else torch.arange(len(x))
    factors = rotary_factors(offset, x.shape[1], heads=heads, width=width, base=100.0, like=x)
    turns = torch.view_as_real(
        rotary_factors(offset, x.shape[1], heads=heads, width=width, base=100.0, like=x.double())
    )

    def rotated(y: Tensor) -> Tensor:
        even, odd = y.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = turns[..., : y.shape[2], :, :].unbind(-1)
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    def reference(x: Tensor, *weights: Tensor) -> Outputs:
        q, k, v = (F.linear(x, w).unflatten(-1, (-1, size)) for w, size in zip(weights, widths, strict=True))
        return rotated(q), rotated(k), v

    def call(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Outputs:
        return project_heads(x, [q, k, v], widths, factors)

    def entries() -> list[Entry]:
        arguments = {"x": x, **dict(zip("qkv", weights, strict=True))}
        free = frozenset({"x.0", "k.0", "v.0", "q.0"})
        free |= {f"{name}.{change}" for name in "xqkv" for change in ("sparse", "device")}
        free |= {"x.1"} if 1 in x.shape[:2] else frozenset()  # the factors of one token are broadcast
        queries = project_heads(x, weights, widths)[0].detach()
        valid = (str(factors.ndim - 2), "broadcast", "rank", "int", "float", "device", "sparse")  # more heads are valid
        rotary = Entry(
            function=lambda factors: apply_rotary(queries, factors),
            arguments={"factors": factors},
            free=frozenset(f"factors.{change}" for change in valid),
        )
        return [Entry(function=call, arguments=arguments, free=free), rotary]

    return Call(inputs=[x, *weights], kernel=call, reference=reference, entries=entries, has_operator=False)


# ---- the Newton-Schulz iteration of Muon


def newton_schulz_call(rng: random.Random, dtype: torch.dtype, tokens: int | None = None) -> Call:
    batch = rng.choice(((), (rows(rng),), (2, rows(rng)), (5,)))
    m, n = (rng.choice((*SIZES, 64, 65, 100)) for _ in range(2))
    x = noise(rng, dtype, *batch, m if tokens is None else tokens, n) * rng.choice((1.0, 1e-3, 100.0))
    is_float = dtype == torch.float32  # the public function computes in float32

    def kernel(x: Tensor) -> Outputs:
        if is_float or x.numel() == 0:
            return (newton_schulz.newton_schulz(x),)
        return (newton_schulz.by_kernel(x.reshape(-1, *x.shape[-2:])).view(x.shape),)

    def reference(x: Tensor) -> Outputs:
        if x.numel() == 0:
            return (x,)
        x = x / (x.square().sum((-2, -1), keepdim=True).sqrt() + 1e-7)
        x = x.mT if m > n else x
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return (x.mT if m > n else x,)

    def entries() -> list[Entry]:
        valid = (*map(str, range(x.ndim)), "rank", "float", "device")
        batched = x.reshape(-1, *x.shape[-2:])
        return [
            Entry(
                function=newton_schulz.newton_schulz,
                arguments={"matrices": x},
                free=frozenset(f"matrices.{change}" for change in valid),
                wrong={"matrices": (torch.zeros(3), torch.zeros(()))},
            ),
            Entry(
                function=newton_schulz.by_kernel,
                arguments={"x": batched},
                free=frozenset({"x.0", "x.1", "x.2", "x.float"}),
                wrong={"x": (batched.half(),)},
            ),
        ]

    return Call(
        inputs=[x],
        kernel=kernel,
        reference=reference,
        entries=entries,
        sizes=lambda inputs, go: [1.0],  # singular values are close to 1
        has_operator=False,
        has_backward=False,
    )


# ---- layers for a few rows


def few(rng: random.Random, tokens: int | None) -> int:
    """A number of rows that the kernels for a few rows take; without tokens, none."""
    return 0 if tokens == 0 else rng.choice((1, 1, 2, 3, few_rows.MAX_ROWS))


def norm_few_call(rng: random.Random, dtype: torch.dtype, tokens: int | None = None) -> Call:
    width, eps = rng.choice((*WIDTHS, 100)), rng.choice((1e-5, 1e-3))
    x, weight = noise(rng, dtype, few(rng, tokens), 1, width), noise(rng, dtype, width)

    def reference(x: Tensor, weight: Tensor) -> Outputs:
        return (root_mean_square_norm(x, weight, eps),)

    def entries() -> list[Entry]:
        arguments = {"x": x, "weight": weight, "eps": eps}
        return [Entry(function=few_rows.norm, arguments=arguments, free=frozenset({"x.0"}), wrong={"eps": ("x", None)})]

    return Call(
        inputs=[x, weight],
        kernel=lambda x, weight: (few_rows.norm(x, weight, eps),),
        reference=reference,
        entries=entries,
        has_operator=False,
        has_backward=False,
    )


def swiglu_few_call(rng: random.Random, dtype: torch.dtype, tokens: int | None = None) -> Call:
    width, hidden = rng.choice((*WIDTHS, 100)), rng.choice((*WIDTHS, 100))
    kind = rng.choice(("norm", "points", "plain"))
    inputs = 2 * width if kind == "points" else width
    gate, up = (weight_matrix(rng, dtype, hidden, inputs) for _ in range(2))
    tensors = [noise(rng, dtype, few(rng, tokens), 1, width), gate, up, weight_matrix(rng, dtype, width, hidden)]
    if kind == "norm":
        tensors.append(noise(rng, dtype, width))

    def kernel(x: Tensor, gate: Tensor, up: Tensor, output: Tensor, norm: Tensor | None = None) -> Outputs:
        return (few_rows.add_swiglu(x, norm, 1e-5, gate, up, output),)

    def reference(x: Tensor, gate: Tensor, up: Tensor, output: Tensor, norm: Tensor | None = None) -> Outputs:
        u = x if norm is None else root_mean_square_norm(x, norm, 1e-5)
        if kind == "points":
            u = torch.stack([x.cos(), x.sin()], -1).flatten(-2)
        return (x + F.linear(F.silu(F.linear(u, gate)) * F.linear(u, up), output),)

    def entries() -> list[Entry]:
        arguments = {**dict(zip(("x", "gate", "up", "output", "norm"), (*tensors, None), strict=False)), "eps": 1e-5}
        free = {"x.0", "norm.None"}
        infinite = (tensors[0].new_full(tensors[0].shape, torch.inf),) if kind == "points" else ()
        return [
            Entry(
                function=few_rows.add_swiglu,
                arguments=arguments,
                free=frozenset(free),
                wrong={"eps": ("x", None), "x": infinite},
            )
        ]

    return Call(
        inputs=tensors, kernel=kernel, reference=reference, entries=entries, has_operator=False, has_backward=False
    )


# ---- decoding steps: one token of a whole layer


def root_mean_square_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def turned(x: Tensor, position: int, base: float | None) -> Tensor:
    """Every pair of adjacent coordinates rotated by its angle at a position."""
    if base is None:
        return x
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    angles = position * base ** -(torch.arange(pairs.shape[-1], dtype=x.dtype) / pairs.shape[-1])
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def coupled(x: dict[str, Tensor], q: Tensor, k: Tensor, config: CouplingConfig | None) -> tuple[Tensor, Tensor]:
    """Queries and keys after the drifts and kicks of the coupling."""
    if config is None:
        return q, k
    w1, b1, w2, b2 = (x[f"coupling.force.{name}"] for name in ("inner", "inner_bias", "outer", "outer_bias"))
    coefficients = naive.drift_coefficients(config.integrator, config.steps)
    return naive.drift_kick(
        q, k, lambda q: F.linear(F.silu(F.linear(q, w1, b1)), w2, b2), x["coupling.dt"], coefficients
    )


def random_coupling(rng: random.Random) -> CouplingConfig | None:
    integrator: Any = rng.choice(("leapfrog", "symplectic-euler"))
    config = CouplingConfig(integrator=integrator, steps=rng.choice((1, 2)), hidden=rng.choice((None, 3, 9)))
    return rng.choice((None, config))


def random_parameters(rng: random.Random, layer: Mechanism, dtype: torch.dtype) -> dict[str, Tensor]:
    """New values for the parameters of a layer, whose matrices are sometimes not contiguous."""
    result = {}
    for name, parameter in layer.named_parameters():
        scale, shift = (0.3, -1.0) if name in ("temperature",) else (0.3, 0.0) if "lambda" in name else (1.0, 0.0)
        if parameter.ndim > 1 and "conv" not in name and "step" not in name and "lag" not in name:
            scale = parameter.shape[-1] ** -0.5
        value = scale * torch.randn(parameter.shape, dtype=dtype) + shift
        result[name] = strided(rng, value) if parameter.ndim > 1 and rng.random() < 0.02 else value
    if "coupling.dt" in result:
        result["coupling.dt"] = torch.empty((), dtype=dtype).uniform_(-0.3, 0.3)
    return result


def set_parameters(layer: Mechanism, tensors: dict[str, Any]) -> None:
    for name, value in tensors.items():
        module, _, leaf = name.rpartition(".")
        layer.get_submodule(module)._parameters[leaf] = value


def step_call(
    rng: random.Random,
    layer: Any,
    x: Tensor,
    stored: dict[str, Tensor],
    state: Callable[[dict[str, Tensor]], State],
    outputs: Callable[[Any], Sequence[Tensor]],
    reference: Callable[[Tensor, dict[str, Tensor]], Outputs],
    free: frozenset[str] = frozenset(),
) -> Call:
    """A decoding step of a layer after a state made of the tensors `stored`.

    `reference` gets the input, and the parameters and tensors of the state by name; it returns the output and the
    tensors of the next state that `outputs` selects. `free`: changes of the input and the state that PyTorch takes.
    """
    parameters = random_parameters(rng, layer.eval(), x.dtype)
    tensors = {**parameters, **stored}

    def prepared(x: Any, named: dict[str, Any]) -> State:
        set_parameters(layer, {name: named[name] for name in parameters})
        return state({name: named[name] for name in stored})

    def kernel(x: Tensor, *values: Tensor) -> Outputs:
        past = prepared(x, dict(zip(tensors, values, strict=True)))
        step = layer._step(x, past)
        if (step is None) == few_rows.supports(x, *values):
            raise AssertionError("the native step was skipped, or used for operands that it cannot read")
        y, after = layer(x, past) if step is None else step
        return y, *outputs(after)

    def native(x: Any, **named: Any) -> object:
        with torch.no_grad():
            step = layer._step(x, prepared(x, {name.replace("__", "."): value for name, value in named.items()}))
        if step is None:
            raise TypeError("not computed by the native step")
        return step

    def public(x: Any, **named: Any) -> object:
        with torch.no_grad():
            return layer(x, prepared(x, {**parameters, **named}))

    def entries() -> list[Entry]:
        arguments = {name.replace(".", "__"): value for name, value in tensors.items()}
        lambdas = [name for name in parameters if "lambda" in name]
        changes = ("broadcast", "float", "rank", "0", "int")
        scalars = {"coupling__dt.rank", "lag.None", *(f"{name}.{change}" for name in lambdas for change in changes)}
        return [
            Entry(function=native, arguments={"x": x, **arguments}, free=frozenset(scalars)),
            Entry(function=public, arguments={"x": x, **stored}, free=free),
        ]

    return Call(
        inputs=[x, *tensors.values()],
        kernel=kernel,
        reference=lambda x, *values: reference(x, dict(zip(tensors, values, strict=True))),
        entries=entries,
        has_operator=False,
        has_backward=False,
    )


def stored_slots(rng: random.Random, dtype: torch.dtype, n: int, used: int, *shape: int) -> Tensor:
    """The buffer of a cache, with or without free slots, sometimes not contiguous."""
    free = rng.choice((0, 1, 5))
    x = torch.randn(n, used + free, *shape, dtype=dtype)
    return strided(rng, x) if not free and rng.random() < 0.1 else x


def attention_step_call(rng: random.Random, dtype: torch.dtype, tokens: int | None = None) -> Call:
    kind, n, heads = rng.choice(("standard", "coupled", "differential")), few(rng, tokens), rng.choice((1, 2, 4, 6))
    heads = heads + heads % 2 if kind == "differential" else heads
    width, head_width, base = rng.choice(WIDTHS), 2 * rng.choice(WIDTHS), rng.choice((None, 100.0, 10000.0))
    used, window = tokens or rng.choice(SIZES), rng.choice((None, None, 1, 3, 20))
    coupling = None if kind == "standard" else random_coupling(rng)
    options: dict[str, Any] = {"head_width": head_width, "rotary_base": base, "window": window, "coupling": coupling}
    layer: SoftmaxMechanism
    if kind == "differential":
        layer = DifferentialAttention(width, heads, rng.randrange(3), 4, config=DifferentialConfig(**options))
    elif kind == "coupled":
        layer = CoupledAttention(width, heads, config=CoupledConfig(**options))
    else:
        groups = rng.choice([g for g in (1, 2, 3, 4, 6) if heads % g == 0])
        layer = StandardAttention(width, heads, config=StandardConfig(**options, key_heads=groups))
    shape, seen = layer.shape, used + (0 if window is None else rng.choice((0, 7)))
    visible = used + 1 if window is None else min(used + 1, window)
    x = noise(rng, dtype, n, 1, width)
    keys = stored_slots(rng, dtype, n, used, shape.keys, shape.key_width)
    values = noise_like_slots(rng, keys, shape.values, shape.value_width)

    def reference(x: Tensor, named: dict[str, Tensor]) -> Outputs:
        q, k, v = (F.linear(x, named[f"{name}.weight"]) for name in ("query", "key", "value"))
        q, k = q.unflatten(-1, (shape.queries, -1)), k.unflatten(-1, (shape.keys, -1))
        q, k = (turned(y, seen, base) for y in coupled(named, q, k, coupling))
        past = named["keys"][:, :used], named["values"][:, :used]
        new = k, v.unflatten(-1, (shape.values, -1))
        k, v = (torch.cat(pair, 1)[:, -visible:] for pair in zip(past, new, strict=True))
        if isinstance(layer, DifferentialAttention):
            first, second = (attention_naive(q[:, :, i::2], k[:, :, i::2], v, causal=True) for i in (0, 1))
            a, b = (named[f"lambda_q{i}"] @ named[f"lambda_k{i}"] for i in (1, 2))
            z = first - (a.exp() - b.exp() + layer.lambda_init) * second
            z = (1 - layer.lambda_init) * root_mean_square_norm(z, named["head_norm"], 1e-5)
        else:
            z = attention_naive(q, k, v, causal=True)
        return F.linear(z.flatten(2), named["output.weight"]), k, v

    def state(stored: dict[str, Tensor]) -> KVCache:
        cache = KVCache((stored["keys"], stored["values"]), used, seen, window)
        cache.extent.filled = used
        return cache

    return step_call(
        rng,
        layer,
        x,
        {"keys": keys, "values": values},
        state,
        lambda cache: [y[:, -visible:] for y in cache.tensors],
        reference,
        frozenset({"x.1", "x.device", "keys.1", "values.1"}),
    )


def noise_like_slots(rng: random.Random, keys: Tensor, *shape: int) -> Tensor:
    """A buffer with as many slots as another."""
    return torch.randn(*keys.shape[:2], *shape, dtype=keys.dtype)


def kuramoto_step_call(rng: random.Random, dtype: torch.dtype, tokens: int | None = None) -> Call:
    n, heads, angles = few(rng, tokens), rng.choice((1, 2, 3)), rng.choice(WIDTHS)
    used, window, base = tokens or rng.choice(SIZES), rng.choice((None, None, 1, 3, 20)), rng.choice((None, 100.0))
    is_frustrated = rng.random() < 0.5
    config = KuramotoConfig(frustrated=is_frustrated, rotary_base=base, window=window)
    layer, size = KuramotoAttention(heads * angles, heads, config=config), 2 * heads * angles
    seen = used + (0 if window is None else rng.choice((0, 7)))
    visible = used + 1 if window is None else min(used + 1, window)
    x, keys = 2 * noise(rng, dtype, n, 1, heads * angles), stored_slots(rng, dtype, n, used, heads, 2 * angles)
    stored = {"keys": keys, "values": noise_like_slots(rng, keys, heads, 2 * angles)}
    names = ("last_key",) if is_frustrated else ("last_key", "last_value")
    stored |= {name: torch.randn(n, 1, size, dtype=dtype) for name in names}

    def reference(x: Tensor, named: dict[str, Tensor]) -> Outputs:
        point = torch.stack([x.cos(), x.sin()], -1).view(n, 1, heads, 2 * angles)
        q = F.linear(point.flatten(2), named["query.weight"]).view_as(point) * named["temperature"].exp()[:, None]
        q, key = turned(q, seen, base), turned(point, seen, base)
        new = named["last_key"].view_as(point), point if is_frustrated else named["last_value"].view_as(point)
        past = named["keys"][:, :used], named["values"][:, :used]
        k, v = (torch.cat(pair, 1)[:, -visible:] for pair in zip(past, new, strict=True))
        mean = attention_naive(q, k, v, causal=True, scale=1.0)
        (c, s), (a, b) = (y.unflatten(-1, (-1, 2)).unbind(-1) for y in (point, mean))
        lag = named["lag"][0] if is_frustrated else torch.zeros_like(named["step"])
        y = named["step"] * (lag.cos() * (c * b - s * a) + lag.sin() * (c * a + s * b))
        following = (key.flatten(2), point.flatten(2))[: len(names)]
        return y.flatten(2), k, v, *following

    def state(stored: dict[str, Tensor]) -> ShiftedKVCache:
        cache = KVCache((stored["keys"], stored["values"]), used, seen, window)
        cache.extent.filled = used
        return ShiftedKVCache(cache, tuple(stored[name] for name in names))

    free = frozenset({"x.1", "x.device", "keys.1", "values.1", *(f"{name}.float" for name in names)})

    def outputs(state: ShiftedKVCache) -> list[Tensor]:
        return [*(y[:, -visible:] for y in state.cache.tensors), *state.last]

    return step_call(rng, layer, x, stored, state, outputs, reference, free)


def random_delta_layer(rng: random.Random) -> DeltaMechanism:
    heads, key_width = rng.choice((1, 2, 3)), rng.choice(WIDTHS)
    options: dict[str, Any] = {
        "key_width": key_width,
        "value_expansion": rng.choice((1, 2, 3)),
        "conv": rng.choice((2, 3, 4, 4, 7)),
        "gate": rng.random() < 0.7,
        "coupling": random_coupling(rng),
    }
    kind = rng.choice(("deltanet", "gated", "qdelta", "qdelta", "kda", "eda", "comba"))
    width = rng.choice(WIDTHS)
    if kind == "qdelta":
        lam = rng.choice((None, None, 0.5, 1.0))
        erase: Any = rng.choice(("query", "own"))
        config = QDeltaConfig(decay=rng.random() < 0.5, lam=lam, erase=erase, **options)
        return QDelta(width, heads, config=config)
    if kind == "deltanet":
        return DeltaNet(width, heads, config=DeltaNetConfig(**options))
    if kind == "gated":
        return GatedDeltaNet(width, heads, config=GatedDeltaNetConfig(**options))
    if kind == "kda":
        return KimiDeltaAttention(width, heads, config=KDAConfig(**options))
    if kind == "eda":
        return EraseThenDelta(width, heads, config=EDAConfig(**options))
    return Comba(width, heads, config=CombaConfig(**options))


def delta_step_call(rng: random.Random, dtype: torch.dtype, tokens: int | None = None) -> Call:
    layer, n = random_delta_layer(rng), few(rng, tokens)
    heads, width, values = layer.heads, layer.key_width, layer.value_width
    names = ["query", "key", "value"] if layer.own is None else ["query", "key", "value", "own"]
    stored = {"memory": 0.5 * torch.randn(n, heads, values, width, dtype=dtype)}
    for name in names:
        channels = heads * (values if name == "value" else width)
        stored[f"{name}_tail"] = torch.randn(n, layer.config.conv - 1, channels, dtype=dtype)

    def reference(x: Tensor, named: dict[str, Tensor]) -> Outputs:
        def mapped(name: str) -> Tensor:
            return F.linear(x[:, 0], named[f"{name}.weight"])

        streams, tails = {}, []
        for name in names:
            window = torch.cat([named[f"{name}_tail"], mapped(name)[:, None]], 1)
            stream = F.silu(torch.einsum("n t c, c t -> n c", window, named[f"{name}_conv"]))
            streams[name] = stream.unflatten(-1, (heads, -1))
            tails.append(window[:, 1:])
        q, k = coupled(named, streams["query"], streams["key"], layer.config.coupling)
        v, e = streams["value"], streams.get("own", k)
        q, k, e = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k, e))
        beta, S = mapped("beta").sigmoid()[..., None, None], named["memory"]
        if "decay.dt_bias" in named:
            has_channels = "decay.up.weight" in named
            rate = F.linear(mapped("decay.down"), named["decay.up.weight"]) if has_channels else mapped("decay.rate")
            rate = (rate + named["decay.dt_bias"]).exp().log1p().unflatten(-1, (heads, -1))
            S = S * (-named["decay.A_log"].exp()[:, None] * rate).exp().unsqueeze(-2)
        erase = k
        if isinstance(layer, QDelta):
            lam = (mapped("lam") - 0.9).sigmoid()[..., None] if layer.lam is not None else layer.config.lam or 0.0
            erase = k + lam * (q if layer.own is None else e)
        elif isinstance(layer, Comba):
            erase = k * named["feedback"].sigmoid()[:, None]
            q = q - named["correction"][:, None] * erase
        elif isinstance(layer, EraseThenDelta):
            gamma = mapped("gamma").sigmoid()[..., None, None]
            S = S - gamma * torch.einsum("n h v k, n h k, n h j -> n h v j", S, e, e)
        read = torch.einsum("n h v k, n h k -> n h v", S, erase)
        S = S + beta * torch.einsum("n h v, n h k -> n h v k", v - read, k)
        z = torch.einsum("n h v k, n h k -> n h v", S, q) * width**-0.5
        z = root_mean_square_norm(z, named["head_norm"], 1e-5).flatten(1)
        if layer.gate is not None:
            z = z * F.silu(mapped("gate"))
        return F.linear(z, named["output.weight"])[:, None], S, *tails

    def state(stored: dict[str, Tensor]) -> RecurrentState:
        memory, *tails = stored.values()
        return RecurrentState(memory, tuple(tails), 9)

    return step_call(
        rng,
        layer,
        noise(rng, dtype, n, 1, layer.width),
        stored,
        state,
        lambda state: [state.matrix, *state.conv_state],
        reference,
        frozenset({"x.1", "x.device", *(f"{name}.float" for name in stored)}),
    )


OPERATORS: dict[str, Callable[..., Call]] = {
    "attention": attention_call,
    "delta": delta_call,
    "drift_kick": drift_kick_call,
    "short_conv": short_conv_call,
    "phases": phase_call,
    "tangent": tangent_call,
    "linear": linear_call,
    "swiglu": swiglu_call,
    "norm": norm_call,
    "projection": projection_call,
    "newton_schulz": newton_schulz_call,
    "norm_few": norm_few_call,
    "swiglu_few": swiglu_few_call,
    "attention_step": attention_step_call,
    "delta_step": delta_step_call,
    "kuramoto_step": kuramoto_step_call,
}


# ---- valid calls


class ThroughOperators(TorchDispatchMode):
    """Inside it, functions call the registered operators instead of the kernels directly."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` returns NaN inside the block."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def draw(number: int) -> tuple[str, random.Random, torch.dtype]:
    """Operator, generator and dtype of a call."""
    rng = random.Random(number)
    torch.manual_seed(number)
    return rng.choice([*OPERATORS]), rng, rng.choice((torch.float32, torch.float64))


def outputs_and_gradients(
    function: Callable[..., Outputs],
    inputs: Sequence[Tensor],
    gradients: Callable[[Outputs], Sequence[Tensor]],
    has_backward: bool = True,
) -> tuple[list[Tensor], list[Tensor], Sequence[Tensor]]:
    if not has_backward:
        with torch.no_grad():
            return [*function(*inputs)], [], []
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    go = gradients(outputs)
    grads = torch.autograd.grad(outputs, leaves, go, allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
    return [x.detach() for x in outputs], zeros, go


def largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def error(actual: Tensor, expected: Tensor, size: float) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    return largest(actual.double() - expected) / max(largest(expected), size) if actual.numel() else 0.0


def largest_error(call: Call, rng: random.Random) -> float:
    """The largest relative error of the outputs, with and without gradients, and of the gradients; NaN if any is."""
    torch.set_num_threads(rng.choice((1, 1, 1, 2)))
    with poisoned_memory(), ThroughOperators() if call.has_operator and rng.random() < 0.2 else torch.enable_grad():
        outputs, gradients, go = outputs_and_gradients(
            call.kernel,
            call.inputs,
            lambda outputs: [noise(rng, x.dtype, *x.shape) for x in outputs],
            call.has_backward,
        )
        with torch.no_grad():
            without = call.kernel(*call.inputs)  # often another kernel
    torch.set_num_threads(1)
    doubles = [x.detach().double() for x in call.inputs]
    expected, expected_gradients, _ = outputs_and_gradients(
        call.reference, doubles, lambda _: [x.double() for x in go], call.has_backward
    )
    sizes = call.sizes(doubles, go) if call.sizes else [0.0] * (len(outputs) + len(gradients))
    sizes = [max(size, MIN_SIZE) for size in sizes]
    n = len(outputs)
    errors = [error(a, b, s) for a, b, s in zip(without, expected, sizes[:n], strict=True)]
    pairs = zip([*outputs, *gradients], [*expected, *expected_gradients], sizes, strict=True)
    errors += [error(a, b, s) for a, b, s in pairs]
    return max(errors, key=lambda e: float("inf") if e != e else e)


def describe(call: Call) -> str:
    return ", ".join(f"{[*x.shape]} strides {[*x.stride()]}" for x in call.inputs)


def fuzz_valid(first: int, count: int) -> tuple[list[str], dict[str, str]]:
    """Run valid calls. Returns a line per failure, and a summary per operator."""
    failures, calls, worst = [], Counter(), Counter()
    start = time.process_time()
    for number in range(first, first + count):
        name, rng, dtype = draw(number)
        call = OPERATORS[name](rng, dtype)
        try:
            e = largest_error(call, rng)
        except Exception as exception:  # a valid call must not raise
            failures.append(f"call {number} ({name}, {dtype}) raised {exception!r}: {describe(call)}")
            continue
        kind = f"{name} {str(dtype).removeprefix('torch.')}"
        calls[kind] += 1
        worst[kind] = max(worst[kind], e)
        if not e <= TOLERANCES[dtype]:
            failures.append(f"call {number} ({name}, {dtype}): error {e:.1e}: {describe(call)}")
        if (number + 1 - first) % 5000 == 0:
            seconds = time.process_time() - start
            print(f"{number + 1 - first} valid calls, {len(failures)} failures, {seconds:.0f} CPU s", flush=True)
    return failures, {kind: f"{calls[kind]} calls, largest error {worst[kind]:.1e}" for kind in sorted(calls)}


# ---- invalid calls


def changes(entry: Entry) -> list[tuple[str, str, Any]]:
    """All single changes of an entry's arguments that make it invalid: argument, description, new value."""
    listing: list[tuple[str, str, Any]] = [
        (name, f"= {str(value)[:40]}", value) for name, values in entry.wrong.items() for value in values
    ]
    for name, x in entry.arguments.items():
        if not isinstance(x, Tensor):
            continue
        broadcast = f"{name}.broadcast" in entry.free
        for dim, size in enumerate(x.shape):
            if f"{name}.{dim}" not in entry.free:
                for wrong in {size + 1, size - 1, 2 * size, 0} - {size, -1} - ({1} if broadcast else set()):
                    shape = [wrong if i == dim else old for i, old in enumerate(x.shape)]
                    if not (broadcast and size == 1):
                        listing.append((name, f"of shape {shape}", x.new_zeros(shape)))
        if f"{name}.rank" not in entry.free and not broadcast:
            listing.append((name, "with one more dimension", x.unsqueeze(0)))
            if x.ndim:
                listing.append((name, "with one dimension less", x.flatten() if x.ndim == 1 else x.flatten(-2)))
        listing += [(name, f"as {dtype}", x.to(dtype)) for dtype in (torch.complex64, torch.bool, torch.int64)]
        if f"{name}.int" in entry.free:
            del listing[-3:]
        if f"{name}.float" not in entry.free:
            other = torch.float64 if x.dtype == torch.float32 else torch.float32
            listing += [(name, f"as {dtype}", x.to(dtype)) for dtype in (torch.float16, other)]
        if f"{name}.device" not in entry.free:
            listing.append((name, "on meta", x.to("meta")))
        if f"{name}.None" not in entry.free:
            listing.append((name, "= None", None))
        if x.ndim > 1 and x.numel() and f"{name}.sparse" not in entry.free:
            listing.append((name, "sparse", x.to_sparse()))
        listing.append((name, "= a string", "x"))
    return [change for change in listing if not _is_unchanged(entry.arguments[change[0]], change[2])]


def _is_unchanged(old: Any, new: Any) -> bool:
    return (
        isinstance(old, Tensor)
        and isinstance(new, Tensor)
        and (old.shape, old.dtype, old.device, old.layout)
        == (
            new.shape,
            new.dtype,
            new.device,
            new.layout,
        )
    )


def invalid_call(number: int) -> tuple[str, Callable[[], object]]:
    name, rng, dtype = draw(number)
    with torch.no_grad():
        call = OPERATORS[name](rng, dtype)
        while any(x.numel() == 0 for x in call.inputs):  # with no elements, more shapes are valid
            call = OPERATORS[name](rng, dtype)
        entry = rng.choice(call.entries())
        argument, change, value = rng.choice(changes(entry))
    function = getattr(entry.function, "__name__", str(entry.function))
    text = f"invalid call {number} ({name}): {function} with {argument} {change}, {dtype}"
    arguments = {**entry.arguments, argument: value}
    if rng.random() < 0.5 and not str(entry.function).startswith("qkflow."):  # also with gradients
        arguments = {
            key: x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
            for key, x in arguments.items()
        }
    return text, lambda: entry.function(**arguments)


def fuzz_invalid(first: int, count: int, report: Callable[[str], object] = lambda line: None) -> list[str]:
    """Run invalid calls in this process. Returns a line per call that raised nothing, and reports progress."""
    failures = []
    for number in range(first, first + count):
        text, call = invalid_call(number)
        report(f"CALL {number}")
        try:
            call()
        except Exception:  # any exception will do
            continue
        failures.append(f"{text}: raised nothing")
        report(f"FAIL {failures[-1]}")
    return failures


def fuzz_invalid_in_process(first: int, count: int) -> list[str]:
    """The same in a process of its own, which is restarted after the call that killed it."""
    failures, end = [], first + count
    environment = {**os.environ, "MALLOC_PERTURB_": "165"}  # fills memory from malloc and after free
    while first < end:
        command = [sys.executable, __file__, "--worker", "--first", str(first), "--invalid", str(end - first)]
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        lines = result.stdout.splitlines()
        failures += [line.removeprefix("FAIL ") for line in lines if line.startswith("FAIL ")]
        started = [int(line.split()[1]) for line in lines if line.startswith("CALL ")]
        if result.returncode == 0:
            break
        last = started[-1] if started else first
        failures.append(f"invalid call {last} ended the process with code {result.returncode}: {result.stderr[-300:]}")
        first = last + 1
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--valid", type=int, default=1000, help="valid calls")
    parser.add_argument("--invalid", type=int, default=1000, help="invalid calls")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if build.load_error() is not None:
        print(f"no C kernels: {build.load_error()}")
        return 1
    if args.worker:
        fuzz_invalid(args.first, args.invalid, lambda line: print(line, flush=True))
        return 0
    failures, summary = fuzz_valid(args.first, args.valid)
    failures += fuzz_invalid_in_process(args.first, args.invalid)
    print("\n".join(f"{kind}: {text}" for kind, text in summary.items()))
    print("\n".join(failures[:50]))
    print(f"{args.valid} valid and {args.invalid} invalid calls, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
