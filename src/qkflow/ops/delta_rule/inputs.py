"""The inputs of the delta rule and their validation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkflow.errors import NotFiniteError, UsageError
from qkflow.ops.csrc.eager import has_values

MAX_KEY_WIDTH = 256
"""Largest width of a head's keys. Values may have any width, since the rows of the state are independent."""
MAX_CHUNK = 128
MAX_BETA = 2.0
"""Largest beta. Above it a unit key is overwritten by more than twice its error and the state is unstable."""

Keys = Float[Tensor, "n t h k"]
Values = Float[Tensor, "n t h v"]
Gates = Float[Tensor, "n t h"]
Decays = Float[Tensor, "n t h"] | Float[Tensor, "n t h k"]
"""One log decay per head, or one per key channel."""
States = Float[Tensor, "n h v k"]


class DeltaInputs(NamedTuple):
    """Queries, keys, values and gates of every token and head."""

    q: Keys
    k: Keys
    v: Values
    beta: Gates
    """Write strength."""
    log_alpha: Decays | None
    """Log of the decay from one token to the next, per head or per key channel; None means no decay."""
    erase: Keys | Gates | None
    """The direction x that is read and corrected, or lambda in x = k + lambda q; None means k."""

    @property
    def direction(self) -> Keys:
        """The direction x."""
        if self.erase is None or self.erase.ndim == 4:
            return self.k if self.erase is None else self.erase
        return torch.addcmul(self.k, self.erase.unsqueeze(-1), self.q)

    @property
    def has_vector_decay(self) -> bool:
        """Whether every key channel has a decay of its own."""
        return self.log_alpha is not None and self.log_alpha.ndim == 4

    def map(self, f: Callable[[Tensor], Tensor]) -> DeltaInputs:
        """Apply `f` to every tensor."""
        return DeltaInputs(*(x if x is None else f(x) for x in self))  # pyright: ignore[reportArgumentType]


def check_shapes(inputs: DeltaInputs, state: Tensor | None, rows: int, chunk: int | None) -> None:
    """Raise if shapes, dtypes or devices do not match."""
    q, k, v = inputs[:3]
    if q.ndim != 4 or k.shape != q.shape or v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise UsageError(
            "queries and keys must be [b, t, heads, k] and values [b, t, heads, v], got"
            f" {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    b, t, h, width = q.shape
    if inputs.beta.shape != (b, t, h):
        raise UsageError(f"beta must be [b, t, heads] = {[b, t, h]}, got {list(inputs.beta.shape)}")
    if inputs.log_alpha is not None and inputs.log_alpha.shape not in ((b, t, h), (b, t, h, width)):
        raise UsageError(
            f"log_alpha must be [b, t, heads] = {[b, t, h]}, or {[b, t, h, width]} for a decay per key channel, got"
            f" {list(inputs.log_alpha.shape)}"
        )
    if inputs.erase is not None and inputs.erase.shape not in ((b, t, h), (b, t, h, width)):
        raise UsageError(
            f"erase must have the shape of the keys, [b, t, heads, k] = {list(q.shape)}, or be the weight of the query,"
            f" {[b, t, h]}, got {list(inputs.erase.shape)}"
        )
    if t < 1:
        raise UsageError("expected at least one token, got none")
    if not 1 <= width <= MAX_KEY_WIDTH or v.shape[3] < 1:
        raise UsageError(f"keys must be 1 to {MAX_KEY_WIDTH} wide and values at least 1, got {width} and {v.shape[3]}")
    if state is not None and state.shape != (rows, h, v.shape[3], width):
        raise UsageError(
            f"the state must be [rows, heads, v, k] = {[rows, h, v.shape[3], width]}, got {list(state.shape)}"
        )
    if chunk is not None and not 1 <= chunk <= MAX_CHUNK:
        raise UsageError(f"chunk must be from 1 to {MAX_CHUNK}, got {chunk}")
    for name, x in (*inputs._asdict().items(), ("state", state)):
        if x is not None and not x.is_floating_point():
            raise UsageError(f"{name} must have a floating-point dtype, got {x.dtype}")
        if x is not None and x.device != q.device:
            raise UsageError(f"{name} is on {x.device} and the queries are on {q.device}: move them to one device")


def check_gates(beta: Tensor, log_alpha: Tensor | None, erase: Tensor | None) -> None:
    """Raise if a gate is out of range. Skipped for tensors without values, and on GPUs, where it would synchronize."""
    if beta.device.type != "cpu" or not has_values(beta):
        return
    for name, gate, low, high, bounds in (
        ("beta", beta, 0.0, MAX_BETA, f"from 0 to {MAX_BETA:g}"),
        ("log_alpha", log_alpha, -math.inf, 0.0, "finite and at most 0"),
        ("erase", erase if erase is not None and erase.ndim == 3 else None, -math.inf, math.inf, "finite"),
    ):
        if gate is None or not gate.numel():
            continue
        smallest, largest = (float(x) for x in gate.detach().aminmax())
        is_finite = math.isfinite(smallest) and math.isfinite(largest)
        if not (is_finite and low <= smallest and largest <= high):
            raise (UsageError if is_finite else NotFiniteError)(
                f"{name} must be {bounds}, got values from {smallest:g} to {largest:g}"
            )
