"""The kernel of `short_conv.c` as operators of torch, opaque to its compiler; products of channels are not counted."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from qkflow.ops.csrc import library

MOST_TAPS = 64
"""The kernel's limit, MOST."""
_ALONE = 1 << 15
"""Numbers up to which waking other threads takes longer than the work."""
_OPS = torch.library.Library("qkflow", "FRAGMENT")
_OPS.define("short_conv(Tensor x, Tensor weight, Tensor? tail) -> Tensor")
_OPS.define("short_conv_backward(Tensor gy, Tensor x, Tensor weight, Tensor? tail) -> Tensor[]")


def native_forward(x: Tensor, weight: Tensor, tail: Tensor | None) -> Tensor:
    """The convolution and its SiLU, `[n t c]`."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return torch.ops.qkflow.short_conv(x, weight, tail)
    return _forward(x, weight, tail)  # nobody watches: straight to it, since decoding would feel the detour


def native_backward(gy: Tensor, x: Tensor, weight: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x, the weights and the tail."""
    gx, gweight, *gtail = torch.ops.qkflow.short_conv_backward(gy, x, weight, tail)
    return gx, gweight, (gtail[0] if gtail else None)


def _forward(x: Tensor, weight: Tensor, tail: Tensor | None) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _call("short_conv", x, weight.shape[1], (x, weight, tail, y))
    return y


def _backward(gy: Tensor, x: Tensor, weight: Tensor, tail: Tensor | None) -> list[Tensor]:
    made = _gradients(gy, x, weight, tail)
    _call(
        "short_conv_backward", x, weight.shape[1], (gy, x, weight, tail, *made[:2], None if tail is None else made[2])
    )
    return made


def _gradients(gy: Tensor, x: Tensor, weight: Tensor, tail: Tensor | None) -> list[Tensor]:
    given = (x, weight) if tail is None else (x, weight, tail)
    return [torch.empty_like(one, memory_format=torch.contiguous_format) for one in given]


def _call(name: str, x: Tensor, taps: int, tensors: tuple[Tensor | None, ...]) -> None:
    """Shapes, and where everything lies, to the kernel of that name."""
    held = [one if one is None or one.is_contiguous() else one.contiguous() for one in tensors]
    threads = 1 if x.numel() <= _ALONE else torch.get_num_threads()
    places = [None if one is None else one.data_ptr() for one in held]
    if _function(name, x.dtype, len(places))(*x.shape, taps, threads, *places):
        raise MemoryError("the short convolution's kernel could not get the memory for its sums")


@cache
def _function(name: str, dtype: torch.dtype, pointers: int) -> Any:
    function = getattr(library(), f"{name}_{'float' if dtype == torch.float32 else 'double'}")
    function.argtypes = [*[ctypes.c_long] * 3, *[ctypes.c_int] * 2, *[ctypes.c_void_p] * pointers]
    return function


_OPS.impl("short_conv", _forward, "CPU")
_OPS.impl("short_conv_backward", _backward, "CPU")
_OPS.impl("short_conv", lambda x, weight, tail: torch.empty_like(x, memory_format=torch.contiguous_format), "Meta")
_OPS.impl("short_conv_backward", _gradients, "Meta")
