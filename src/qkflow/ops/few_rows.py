r"""Layers of a model for a few rows, as in decoding, where each is one call of a C kernel (`csrc/few_rows.c`).

A decoded token is a matrix-vector product per weight, each of which takes a few microseconds: the calls around it cost
more. These functions replace the modules that they are named after, if `supports` allows it; `plain_weight` returns the
weights of a module whose hooks and subclass do not ask to be called.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from qkflow.errors import NotFiniteError, UsageError
from qkflow.ops.csrc import build
from qkflow.ops.csrc.eager import has_hooks, is_transformed

MAX_ROWS = 8
"""Number of rows up to which these kernels are faster than PyTorch's matrix products."""
SINGLE_THREAD = 1 << 17
"""Number of weights up to which one thread is faster."""
_NOT_FINITE = 2
_TENSORS = (Tensor, nn.Parameter)

Rows = Float[Tensor, "b t d"]


def supports(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether the kernels can be used: one token of a few rows on a CPU, without gradients, tracing and autocast."""
    if (
        torch.is_grad_enabled()
        or x.ndim != 3
        or x.shape[1] != 1
        or x.shape[0] > MAX_ROWS
        or torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or is_transformed()
        or torch.is_autocast_enabled("cpu")
        or not x.is_cpu
        or x.is_neg()
        or x.shape[0] == 0
    ):
        return False
    dtype = x.dtype
    if (dtype is not torch.float32 and dtype is not torch.float64) or type(x) not in _TENSORS:
        return False
    build.load()
    return build.is_loaded() and are_plain(dtype, weights)


def are_plain(dtype: torch.dtype, weights: Iterable[Tensor | None]) -> bool:
    """Whether these are contiguous CPU tensors of one dtype, as the kernels take them."""
    for w in weights:
        if (
            w is None
            or w.dtype is not dtype
            or type(w) not in _TENSORS
            or not w.is_cpu
            or not w.is_contiguous()
            or w.is_neg()
        ):
            return False
    return True


def plain_weight(module: nn.Module | None) -> Tensor | None:
    """The weight of a linear layer without bias and hooks: calling it is the same as multiplying by this weight."""
    if type(module) is not nn.Linear or has_hooks(module):
        return None
    parameters = module._parameters  # attribute access through nn.Module is slow enough to matter here
    return parameters["weight"] if parameters["bias"] is None else None


def have_shapes(tensors: Iterable[Tensor | None], shapes: Iterable[tuple[int, ...]]) -> bool:
    """Whether tensors have these shapes, which the kernels do not check; None has any."""
    return all(x is None or x.shape == shape for x, shape in zip(tensors, shapes, strict=True))


def norm(x: Rows, weight: Float[Tensor, " d"], eps: float) -> Rows:
    """`qkflow.ops.norm.rms_norm`."""
    shape = x.shape
    if len(shape) != 3 or shape[1] != 1 or shape[2:] != weight.shape:
        raise UsageError(f"expected x [b, 1, d] and a weight [d], got {list(shape)} and {list(weight.shape)}")
    x = x.contiguous()
    y = torch.empty_like(x)
    build.call("norm_few", "lld", (x.shape[0], x.shape[2], eps), (x, weight, y))
    return y


def add_swiglu(x: Rows, norm: Tensor | None, eps: float, gate: Tensor, up: Tensor, output: Tensor) -> Rows:
    r"""Add the feed-forward branch: x + W_{output} (silu(W_{gate} u) \odot W_{up} u), where u is the RMS norm of x.

    Without a norm, u is x, or its cosines and sines if the network has twice as many inputs.
    """
    (hidden, inputs), width = gate.shape, x.shape[-1]
    if (
        x.ndim != 3
        or x.shape[1] != 1
        or up.shape != gate.shape
        or output.shape != (width, hidden)
        or (inputs != width and (norm is not None or inputs != 2 * width))
        or (norm is not None and norm.shape != (width,))
    ):
        shapes = [None if w is None else list(w.shape) for w in (norm, gate, up, output)]
        raise UsageError(f"norm, gate, up and output of shapes {shapes} do not fit x of shape {list(x.shape)}")
    x = x.contiguous()
    y = torch.empty_like(x)
    threads = 1 if hidden * inputs <= SINGLE_THREAD else torch.get_num_threads()
    scalars = (x.shape[0], width, inputs, hidden, threads, eps)
    status = build.call("swiglu_few", "llllid", scalars, (x, norm, gate, up, output, y))
    if status == _NOT_FINITE:
        raise NotFiniteError("phases must be finite, got NaN or infinite values")
    _check(status)
    return y


class CouplingStep(NamedTuple):
    """The drift and kick of queries and keys (`qkflow.ops.symplectic`)."""

    dt: float
    coefficients: Any
    """A C array."""
    activation: int
    force: tuple[Tensor, Tensor, Tensor, Tensor]


NO_COUPLING = CouplingStep(0.0, None, 0, cast(Any, ()))


def coupling_arguments(coupling: CouplingStep) -> tuple[tuple[int, int, int], list[int | None]]:
    """Hidden width, activation and steps, and the pointers to coefficients and force, as the kernels take them."""
    _, coefficients, activation, force = coupling
    if coefficients is None:
        return (0, 0, 0), [None] * 5
    sizes = (force[0].shape[0], activation, len(coefficients) - 1)
    return sizes, [ctypes.addressof(coefficients), *[w.data_ptr() for w in force]]


def _check(status: int) -> None:
    if status:
        raise MemoryError("the C kernel of a decoding step could not allocate its buffers")
