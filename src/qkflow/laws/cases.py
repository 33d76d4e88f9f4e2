"""What the laws are tried on: mechanisms at generic points, correlated inputs, comparisons that say where they fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qkflow.layout import Layout
from qkflow.mechanisms.base import Factory

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Of every comparison in a precision, relative to the larger of 1 and the largest value compared."""


class LawViolation(Exception):
    """A mechanism broke a law; the message is the smallest case in which it did."""


class LawNotApplicable(Exception):
    """A law does not apply: the mechanism lacks what the law speaks about."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A mechanism on the bench: how to make it, and how large."""

    factory: Factory
    width: int = 32
    heads: int = 4
    backend: str = "inductor"
    """The compiler that the law of compilation uses."""
    dtype: torch.dtype = torch.float64
    """The precision that laws are tried in; float32 for what knows no float64."""

    def make(self, seed: int = 0, dtype: torch.dtype | None = None) -> Any:
        """A mechanism away from its start: parameters that begin at zero or one would hide mistakes behind them."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            mechanism = self.factory(self.width, self.heads, layer=1, layers=3).to(torch.float64)
            with torch.no_grad():
                for parameter in mechanism.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return mechanism.to(dtype or self.dtype)

    def input(self, b: int, t: int, *, seed: int = 1, dtype: torch.dtype | None = None) -> Tensor:
        """Tokens that share a direction, as real ones do: independent ones hide what is badly conditioned."""
        generator = torch.Generator().manual_seed(seed)
        common = torch.randn(self.width, generator=generator, dtype=torch.float64)
        return (torch.randn(b, t, self.width, generator=generator, dtype=torch.float64) + common).to(
            dtype or self.dtype
        )


def run(
    mechanism: Callable[..., Any], x: Tensor, state: Any = None, layout: Layout | None = None
) -> tuple[Tensor, Any]:
    """Call the mechanism, and see that it answers as the contract says."""
    answer = mechanism(x, state=state, layout=layout)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise LawViolation(f"must return (y, state), got {type(answer).__name__}")
    if answer[0].shape != x.shape:
        raise LawViolation(f"y must have the shape of x, {list(x.shape)}, got {list(answer[0].shape)}")
    return answer


def same(case: str, what: str, got: Tensor, want: Tensor, tolerance: float | None = None) -> None:
    """Break the law unless the two agree, within their precision unless told."""
    if got.shape != want.shape:
        raise LawViolation(f"{case}: {what} has shape {list(got.shape)}, expected {list(want.shape)}")
    if not got.numel():
        return
    difference = (got - want).abs()
    tolerance = TOLERANCES[want.dtype] if tolerance is None else tolerance
    allowed = tolerance * max(1.0, float(want.detach().abs().max()))
    if not bool((difference <= allowed).all()):  # written so that NaN breaks the law too
        place = int(difference.nan_to_num(torch.inf, torch.inf).argmax())
        index = [int(i) for i in torch.unravel_index(torch.tensor(place), got.shape)]
        worst = float(difference.flatten()[place].detach())
        raise LawViolation(f"{case}: {what} differs by {worst:.1e} at {index}, allowed {allowed:.1e}")


def same_values_and_gradients(
    case: str, mechanism: nn.Module, pairs: Sequence[tuple[Tensor, Tensor]], *inputs: Tensor, retain: bool = True
) -> None:
    """Break the law unless each (got, want) agrees, and so do the gradients of a random sum of them all.

    Compiled graphs may refuse to `retain` what a second backward pass would need.
    """
    for got, want in pairs:
        same(case, "output", got, want)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(want.shape, generator=generator, dtype=want.dtype) for _, want in pairs]
    named = [(f"gradient of input {i}", x) for i, x in enumerate(inputs)]
    named += [(f"gradient of {name}", p) for name, p in mechanism.named_parameters() if p.requires_grad]
    leaves = [leaf for _, leaf in named]
    sums = [torch.stack([(y[i] * w).sum() for y, w in zip(pairs, weights, strict=True)]).sum() for i in (0, 1)]
    got, want = (torch.autograd.grad(total, leaves, retain_graph=retain, materialize_grads=True) for total in sums)
    for (what, _), g, w in zip(named, got, want, strict=True):
        same(case, what, g, w)
