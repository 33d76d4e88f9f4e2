"""The fast forms as one operator of torch, with its backward: a compiled graph holds it whole, for any length.

`qkflow::delta` is opaque to torch's compiler and known to its FLOP counter, which counts the products of chunks of 64
tokens, triangular ones by half.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from qkflow.ops.delta_rule import chunked
from qkflow.ops.delta_rule import cpu as kernel
from qkflow.ops.delta_rule.chunked import Kept
from qkflow.ops.delta_rule.inputs import Inputs

CHUNK = chunked.CHUNK
"""Tokens of a chunk by which products are counted, whatever the chunks of the form that runs."""
_OPS = torch.library.Library("qkflow", "FRAGMENT")
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? log_alpha, Tensor? lam"
_OPS.define(f"delta({_INPUTS}, Tensor? state, float scale, int chunk, bool keep, str form) -> Tensor[]")
_OPS.define(
    f"delta_backward(Tensor? go, Tensor? gfinal, {_INPUTS}, Tensor o, Tensor errors, Tensor marks,"
    " float scale, int chunk, str form) -> Tensor[]"
)


def run(given: Inputs, state: Tensor | None, scale: float, chunk: int, form: str) -> tuple[Tensor, Tensor]:
    """Outputs and the memory after the last token, by a form of `backends` other than the reference."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*given, state)):
        return _Delta.apply(*given, state, scale, chunk, form)  # pyright: ignore[reportReturnType]
    o, final, *_ = _forward(*given, state, scale, chunk, False, form)
    return o, final


def flops(t: int, heads: int, key: int, value: int) -> int:
    """Products of one row of `t` tokens: two scores, a solve and a reading by pairs, three products with the memory.

    >>> flops(64, 1, 64, 64) == 10 * 64**3
    True
    """
    return heads * (2 * _pairs(t) * (key + value) + 6 * t * key * value)


def _pairs(t: int) -> int:
    """Pairs of tokens in the same chunk, each both ways."""
    whole, rest = divmod(t, CHUNK)
    return whole * CHUNK**2 + rest**2


class _Delta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *inputs, scale, chunk, form = args
        o, final, errors, marks = _forward(*inputs, scale, chunk, True, form)
        ctx.settings, ctx.continued = (scale, chunk, form), inputs[6] is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:6], o, errors, marks)
        return o, final

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "the fast delta rule can be differentiated once: use backend 'reference' for more"
            )
        saved, (go, gfinal) = ctx.saved_tensors, grads
        if go is None and gfinal is None:
            return (None,) * 10
        back = torch.ops.qkflow.delta_backward(go, gfinal, *saved, *ctx.settings)
        present = [None if x is None else gradient for x, gradient in zip(saved[:6], back[:6], strict=True)]
        return (*present, back[6] if ctx.continued else None, None, None, None)


def _forward(*args: Any) -> list[Tensor]:
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return torch.ops.qkflow.delta(*args)
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in args[:7] if x is not None
    ):
        raise NotImplementedError("the fast delta rule has no forward-mode derivative: use backend 'reference' for it")
    return _delta(*args)  # nobody watches: straight to it, since decoding would feel the detour


def _delta(*args: Any) -> list[Tensor]:
    given, (*rest, form) = Inputs(*args[:6]), args[6:]
    if form == "native":
        return [*kernel.forward(given, *rest)]
    with _plain(given.q.device.type), torch.cuda.device_of(given.q):
        return [*_module(form).forward(given, *rest)]


def _module(form: str) -> Any:
    if form == "triton":
        from qkflow.ops.delta_rule import triton

        return triton
    return kernel if form == "native" else chunked


def _plain(device: str) -> AbstractContextManager[Any]:
    """In the precision of the inputs, which is chosen already, whatever autocast would have products be in."""
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def _delta_backward(*args: Any) -> list[Tensor]:
    given, kept, (scale, chunk, form) = Inputs(*args[2:8]), Kept(*args[8:11]), args[11:]
    with _plain(given.q.device.type), torch.cuda.device_of(given.q):
        return [*_module(form).backward(*args[:2], given, kept, scale, chunk)]


def _shapes(*args: Any) -> list[Tensor]:
    q, _, v, *_, chunk, keep, form = args
    (n, t, h, width), deep = q.shape, v.shape[3]
    wide = q if form != "triton" else q.new_empty(0, dtype=torch.float32)
    o, final = v.new_empty(v.shape), wide.new_empty(n, h, deep, width)
    if not keep:
        return [o, final, v.new_empty(0), v.new_empty(0)]
    if form == "triton":
        many = _count(t, _module(form).chunk_of(chunk, width, v.dtype)) + 1
        return [o, final, wide.new_empty(v.shape), v.new_empty(n, h, many, width, deep)]
    if form == "native":
        many = _count(t, kernel.mark_tokens(chunk))
        return [o, final, v.new_empty(v.shape), q.new_empty(n, h, many, width, deep)]
    every = chunk or CHUNK
    many = _count(t, every)
    return [o, final, v.new_empty(many, n * h, every, deep), q.new_empty(many + 1, n * h, width, deep)]


def _count(t: int, every: int) -> int:
    return (t + every - 1) // every


def _backward_shapes(go: Any, gfinal: Any, *args: Any) -> list[Tensor]:
    q, k, v, beta, log_alpha, lam, *_ = args
    n, _, h, width = q.shape
    gates = [beta.new_empty(0) if x is None else beta.new_empty(beta.shape) for x in (log_alpha, lam)]
    return [*(x.new_empty(x.shape) for x in (q, k, v, beta)), *gates, beta.new_empty(n, h, v.shape[3], width)]


_OPS.impl("delta", _delta, "CompositeExplicitAutograd")
_OPS.impl("delta_backward", _delta_backward, "CompositeExplicitAutograd")
_OPS.impl("delta", _shapes, "Meta")
_OPS.impl("delta_backward", _backward_shapes, "Meta")


@register_flop_formula(torch.ops.qkflow.delta)
def _forward_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Shapes come in place of tensors."""
    return q[0] * flops(q[1], q[2], q[3], v[3])


@register_flop_formula(torch.ops.qkflow.delta_backward)
def _backward_flops(go: Any, gfinal: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Scores again, their gradients and what follows from those; twice the products with the memory."""
    n, t, h, key = q
    return n * h * (_pairs(t) * (6 * key + 4 * v[3]) + 12 * t * key * v[3])
