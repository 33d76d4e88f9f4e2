r"""`attention`: choose a backend and run it as one PyTorch operator.

    o_t = \sum_s softmax_s(q_t \cdot k_s / \sqrt{k}) v_s

| backend | runs on                                   | implementation                                       |
|---------|-------------------------------------------|------------------------------------------------------|
| `cpu`   | CPUs, with a C compiler; float32, float64 | `cpu.py` and `csrc/attention.c`; no `mask`           |
| `torch` | any device                                | `torch.nn.functional.scaled_dot_product_attention`   |

The first backend that can run is used. The `backend` argument, `use_backend(...)` and the environment variable
QKFLOW_ATTENTION override this, in that order. Neither backend holds the t x s map in memory.

`cpu` runs inside the operator `qkflow::attention`, which torch.compile keeps as one node for any length.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from qkflow.errors import UsageError, unknown
from qkflow.ops.attention import cpu
from qkflow.ops.attention.naive import Keys, Mask, Queries, Values, attention_naive, causal_mask
from qkflow.ops.csrc import build
from qkflow.ops.csrc.eager import differentiable_gradients, is_transformed

BACKENDS = ("cpu", "torch")
"""All backends, fastest first."""
_requested: str | None = os.environ.get("QKFLOW_ATTENTION") or None


def attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
) -> Float[Tensor, "b t h v"]:
    """The weighted values of each query. `causal`, `window` and `mask` select the visible keys (`naive.py`).

    `dropout` is the probability that a weight is zero; the others are scaled by 1 / (1 - dropout).

    >>> x = torch.eye(2, dtype=torch.float64).view(1, 2, 1, 2)
    >>> attention(x, x, x, causal=True, scale=1.0)[0, :, 0].round(decimals=2).tolist()
    [[1.0, 0.0], [0.27, 0.73]]
    """
    _check(q, k, v, causal, window, mask)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    if dropout or choose_backend(q, k, v, mask, backend) == "torch":
        return _torch_attention(q, k, v, causal, window, mask, scale, dropout)
    reach = 0 if not causal else cpu.UNLIMITED if window is None else window
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, reach, scale)  # pyright: ignore[reportReturnType]
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return torch.ops.qkflow.attention(q, k, v, reach, scale, False)[0]
    return cpu.outputs(q, k, v, reach, scale)  # bypasses the dispatcher, whose overhead matters in decoding


def _check(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, mask: Tensor | None) -> None:
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise UsageError(f"expected [b, t, h, k], got {[*q.shape]}, {[*k.shape]} and {[*v.shape]}")
    (b, t, h, width), (rows, s, g, key_width), (value_rows, n_values, value_heads, _) = q.shape, k.shape, v.shape
    if rows != b or value_rows != b or n_values != s or key_width != width:
        raise UsageError(f"q {[*q.shape]}, k {[*k.shape]} and v {[*v.shape]} do not fit: expected bthk, bsgk and bsgv")
    if width < 1:
        raise UsageError("queries and keys have no channels: expected at least one")
    if value_heads != g or (h % g if g else h):
        raise UsageError(
            f"{h} query heads, {g} key heads and {value_heads} value heads: expected h, g and g, g divides h"
        )
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise UsageError(
            f"q, k and v are {q.dtype} on {q.device}, {k.dtype} on {k.device} and {v.dtype} on {v.device}:"
            " expected one dtype and one device"
        )
    if causal and (s < t or mask is not None):
        raise UsageError(f"causal attention has no mask and at least as many keys as queries, got {s} and {t}")
    if window is not None and (not causal or window < 1):
        raise UsageError(f"a window of {window}: expected at least 1, and causal=True")


# ---- choice of the backend


@contextmanager
def use_backend(backend: str | None) -> Iterator[None]:
    """Use this backend inside the `with` block, wherever it can run; None restores the automatic choice.

    >>> x = torch.zeros(1, 1, 1, 16)
    >>> with use_backend("torch"):
    ...     choose_backend(x, x, x)
    'torch'
    """
    global _requested
    if backend is not None and backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    previous, _requested = _requested, backend
    try:
        yield
    finally:
        _requested = previous


def requested_backend() -> str | None:
    """The backend that `use_backend` or the environment asks for."""
    return _requested


def choose_backend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, backend: str | None = None) -> str:
    """The backend for these inputs; an explicit `backend` is checked and returned.

    >>> x = torch.zeros(1, 1, 1, 16)
    >>> choose_backend(x, x, x, backend="torch")
    'torch'
    """
    requested = backend or _requested
    if requested is not None and requested not in BACKENDS:
        raise unknown("backend", requested, BACKENDS)
    if requested == "torch":
        return "torch"
    if (reason := _why_not_cpu(q, k, v, mask)) is None:
        return "cpu"
    if backend is not None:
        raise UsageError(f"backend 'cpu' of attention cannot run: {reason}; use backend 'torch'")
    return "torch"


def _why_not_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    """The reason why the C kernel cannot compute this; None if it can."""
    if q.device.type != "cpu" or q.dtype not in (torch.float32, torch.float64):
        return f"the tensors are {q.dtype} on {q.device.type}"
    if torch.is_autocast_enabled("cpu"):
        return "autocast asks for a lower precision"
    if mask is not None:
        return "it takes no mask"
    if q.shape[3] > cpu.MAX_WIDTH or v.shape[3] > cpu.MAX_WIDTH:
        return f"heads are wider than {cpu.MAX_WIDTH}"
    if not build.supports(q):
        return "the C kernels were not loaded before the trace" if torch.compiler.is_compiling() else build.load_error()
    if not torch.compiler.is_compiling() and is_transformed():
        return "it has no forward-mode derivative and no rule for torch.func"
    return None


# ---- PyTorch


def _torch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    mask: Tensor | None,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    t, s = q.shape[1], k.shape[1]
    if window is not None and window >= s:
        window = None
    if causal and (window is not None or t != s):
        keys = torch.arange(s, device=q.device)
        causal, mask = False, causal_mask(keys[s - t :], keys, window)
    is_fused = torch.compiler.is_compiling() or torch.backends.cuda.flash_sdp_enabled()
    if v.shape[3] != q.shape[3] and v.shape[3] % q.shape[3] == 0 and is_fused and not dropout:
        parts = [_fused(q, k, part, causal, mask, scale) for part in v.split(q.shape[3], 3)]
        return torch.cat(parts, 3)  # the fused kernel requires values as wide as keys
    return _fused(q, k, v, causal, mask, scale, dropout)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float, dropout: float = 0.0
) -> Tensor:
    if q.shape[1] == 1:  # a branch, because `causal and t > 1` is symbolic when the compiler keeps lengths dynamic
        causal = False
    is_plain = not torch.compiler.is_compiling() and is_transformed()  # the fused kernels have no rules for it
    with sdpa_kernel(SDPBackend.MATH) if is_plain else nullcontext():
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=causal,
            scale=scale,
            enable_gqa=k.shape[2] != q.shape[2],
        )
    node = None if torch.compiler.is_compiling() else out.grad_fn
    if node is not None and type(node).__name__ == _FUSED_BACKWARD and not dropout:
        node.register_hook(partial(_second_derivative, [q, k, v], causal, mask, scale))
    return out.transpose(1, 2)


_FUSED_BACKWARD = "ScaledDotProductFlashAttentionForCpuBackward0"
"""PyTorch's backward pass, which cannot be differentiated again."""


def _second_derivative(
    qkv: list[Tensor], causal: bool, mask: Tensor | None, scale: float, gradients: Any, grads: Any
) -> tuple[Tensor | None, ...] | None:
    """Replace gradients that are to be differentiated again; release the tensors after the last backward pass."""
    replaced = None
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        is_needed = [x is not None for x in gradients[:3]]
        new = differentiable_gradients(
            lambda *qkv: (attention_naive(*qkv, causal=causal, mask=mask, scale=scale),),
            qkv,
            is_needed,
            [grads[0].transpose(1, 2)],
        )
        replaced = *(x if x is None else x.transpose(1, 2) for x in new), *gradients[3:]
    if not torch._C._autograd._get_current_graph_task_keep_graph():  # pyright: ignore[reportAttributeAccessIssue]
        qkv.clear()
    return replaced


# ---- the operator qkflow::attention and its backward

_OPS = torch.library.Library("qkflow", "FRAGMENT")
_OPS.define("attention(Tensor q, Tensor k, Tensor v, int window, float scale, bool save) -> (Tensor, Tensor)")
_OPS.define(
    "attention_backward(Tensor go, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, int window, float scale)"
    " -> (Tensor, Tensor, Tensor)"
)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
        o, lse = _forward(q, k, v, window, scale, True)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.settings = (window, scale)
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (go,), (q, k, v, o, lse), (window, scale) = grads, ctx.saved_tensors, ctx.settings
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True: higher derivatives
            gradients = differentiable_gradients(
                lambda *qkv: (attention_naive(*qkv, causal=window > 0, window=window or None, scale=scale),),
                (q, k, v),
                ctx.needs_input_grad[:3],
                grads,
            )
            return *gradients, None, None
        return (*torch.ops.qkflow.attention_backward(go, q, k, v, o, lse, window, scale), None, None)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return torch.ops.qkflow.attention(*args)
    return cpu.forward(*args)


def _checked_forward(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, save: bool) -> tuple[Tensor, Tensor]:
    _check_operands(q, k, v, window)
    return cpu.forward(q, k, v, window, scale, save)


def _checked_backward(
    go: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check_operands(q, k, v, window)
    _check_saved(go, q, v, o, lse)
    return cpu.backward(go, q, k, v, o, lse, window, scale)


def _check_operands(q: Tensor, k: Tensor, v: Tensor, window: int) -> None:
    _check(q, k, v, window != 0, window or None, None)
    if (reason := _why_not_cpu(q, k, v, None)) is not None:
        raise UsageError(f"the operator qkflow::attention cannot run: {reason}; use qkflow.ops.attention.attention")


def _check_saved(go: Tensor, q: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> None:
    n, t, h, _ = q.shape
    expected = [(n, t, h, v.shape[3])] * 2 + [(n, h, t)]
    tensors = (go, o, lse)
    if [x.shape for x in tensors] != expected or any(x.dtype != q.dtype or x.device != q.device for x in tensors):
        raise UsageError(f"go, o and lse must be {q.dtype} on {q.device} with the shapes {expected}")


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, save: bool) -> tuple[Tensor, Tensor]:
    _check(q, k, v, window != 0, window or None, None)
    n, t, h, _ = q.shape
    return q.new_empty(n, t, h, v.shape[3]), q.new_empty((n, h, t) if save else (0,))


def _backward_shapes(
    go: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, window != 0, window or None, None)
    _check_saved(go, q, v, o, lse)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_OPS.impl("attention", _checked_forward, "CPU")
_OPS.impl("attention_backward", _checked_backward, "CPU")
_OPS.impl("attention", _forward_shapes, "Meta")
_OPS.impl("attention_backward", _backward_shapes, "Meta")


# ---- FLOPs: every pair counts, as in PyTorch's formula for its own kernels


@register_flop_formula(torch.ops.qkflow.attention)
def _forward_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:  # arguments are shapes
    return 2 * q[0] * q[2] * q[1] * k[1] * (q[3] + v[3])


@register_flop_formula(torch.ops.qkflow.attention_backward)
def _backward_flops(go: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """The scores again, their gradients, and the gradients of queries, keys and values."""
    return 2 * q[0] * q[2] * q[1] * k[1] * (3 * q[3] + 2 * v[3])
