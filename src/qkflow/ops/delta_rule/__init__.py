r"""The delta rule and its kin: a memory that each token corrects, and, in Q-Delta, corrects for the query as well.

    S_t = \alpha_t S_{t-1} (I - \beta_t (k_t + \lambda_t q_t) k_t^\top) + \beta_t v_t k_t^\top,   o_t = \sigma S_t q_t

`delta_rule` computes this, the same in training and in decoding, by whichever form `backends` chooses.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.ops.delta_rule import operator
from qkflow.ops.delta_rule.backends import BACKENDS, choose, use
from qkflow.ops.delta_rule.gates import check_gates
from qkflow.ops.delta_rule.inputs import WIDEST, Inputs
from qkflow.ops.delta_rule.naive import recurrent

__all__ = ["BACKENDS", "WIDEST", "Inputs", "choose", "delta_rule", "use"]


def delta_rule(
    q: Float[Tensor, "b t h k"],
    k: Float[Tensor, "b t h k"],
    v: Float[Tensor, "b t h v"],
    beta: Float[Tensor, "b t h"],
    log_alpha: Float[Tensor, "b t h"] | None = None,
    lam: Float[Tensor, "b t h"] | None = None,
    state: Float[Tensor, "n h v k"] | None = None,
    layout: Layout | None = None,
    scale: float | None = None,
    *,
    backend: str | None = None,
    chunk: int | None = None,
) -> tuple[Float[Tensor, "b t h v"], Float[Tensor, "n h v k"]]:
    """Outputs, and the memory after the last token of each sequence.

    Without `lam` it is the gated delta rule, without `log_alpha` besides the delta rule. The memory has at least
    float32's precision, whatever the inputs have; on a GPU queries and keys are taken in the values' type. `chunk` is a
    matter of speed alone.

    >>> q, k, v, beta = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 3), torch.rand(1, 5, 2)
    >>> o, state = delta_rule(q[:, :4], k[:, :4], v[:, :4], beta[:, :4])
    >>> last, state = delta_rule(q[:, 4:], k[:, 4:], v[:, 4:], beta[:, 4:], state=state)
    >>> whole, same = delta_rule(q, k, v, beta)
    >>> torch.allclose(whole[:, 4:], last, atol=1e-5), torch.allclose(state, same, atol=1e-5)
    (True, True)
    """
    given = Inputs(q, k, v, beta, log_alpha, lam)
    _check_shapes(given, state, q.shape[0] if layout is None else len(layout.lengths), chunk)
    chosen = choose(q.device, backend, q.dtype)
    if layout is not None:
        layout.check(q)
        given = given.map(lambda x: layout.rows(layout.clean(x)))
    if chosen != "native" and not torch.compiler.is_compiling():  # the kernel looks for itself, in passing
        check_gates(given.beta, given.log_alpha, given.lam)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    precise = torch.float64 if q.dtype == torch.float64 else torch.float32
    if chosen == "reference":
        o, final = recurrent(given, state, factor)
    else:
        before = None if state is None else state.to(precise)
        o, final = operator.run(_typed(given, precise, chosen), before, factor, chunk or 0, chosen)
    o = o.to(v.dtype)
    return (o if layout is None else layout.batch(o)), final.to(precise)


def _typed(given: Inputs, precise: torch.dtype, form: str) -> Inputs:
    """All in one type; but on a GPU queries and keys are of the values' type, which may be half as precise."""
    if form != "triton":
        return given.map(lambda x: x.to(precise))
    like = given.v.dtype if given.v.dtype in (torch.bfloat16, torch.float16) else precise
    gates = (x if x is None else x.to(precise) for x in given[3:])
    return Inputs(*(x.to(like) for x in given[:3]), *gates)  # pyright: ignore[reportArgumentType]


def _check_shapes(given: Inputs, state: Tensor | None, rows: int, chunk: int | None) -> None:
    q, k, v = given[:3]
    if q.ndim != 4 or k.shape != q.shape or v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise UsageError(
            "queries and keys must be [b, t, heads, k] and values [b, t, heads, v], got"
            f" {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    b, t, h, width = q.shape
    for name in ("beta", "log_alpha", "lam"):
        if (gate := getattr(given, name)) is not None and gate.shape != (b, t, h):
            raise UsageError(f"{name} must have a number for each token and head, {[b, t, h]}, got {list(gate.shape)}")
    if t < 1:
        raise UsageError("a call needs at least one token, got none")
    if not 1 <= width <= WIDEST or v.shape[3] < 1:
        raise UsageError(f"keys must be 1 to {WIDEST} wide and values at least 1, got {width} and {v.shape[3]}")
    if state is not None and state.shape != (rows, h, v.shape[3], width):
        raise UsageError(
            f"the state must be [rows, heads, v, k] = {[rows, h, v.shape[3], width]}, got {list(state.shape)}"
        )
    if chunk is not None and not 1 <= chunk <= 128:
        raise UsageError(f"chunk must be from 1 to 128, got {chunk}")
    for name, x in (*given._asdict().items(), ("state", state)):
        if x is not None and not x.is_floating_point():
            raise UsageError(f"{name} must be of floating point, got {x.dtype}")
        if x is not None and x.device != q.device:
            raise UsageError(f"{name} is on {x.device}, the queries are on {q.device}: move them to one device")
