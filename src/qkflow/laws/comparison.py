"""What the laws share: the mechanism under test, its inputs, and comparisons that report where they fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from qkflow.layout import Layout
from qkflow.mechanisms.base import Factory

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Allowed difference by dtype, relative to the larger of 1 and the largest value compared."""


class LawViolation(Exception):
    """A mechanism violates a law; the message is the smallest case in which it does."""


class LawNotApplicable(Exception):
    """A law does not apply, because the mechanism lacks the method that the law is about."""


@dataclass(frozen=True, kw_only=True)
class LawContext:
    """The mechanism under test and the settings of the laws."""

    factory: Factory
    width: int = 32
    heads: int = 4
    backend: str = "inductor"
    """The torch.compile backend for the law `compilation`."""
    dtype: torch.dtype = torch.float64
    """The dtype of parameters and inputs; float32 for mechanisms without float64."""

    def make(self, seed: int = 0, dtype: torch.dtype | None = None) -> Any:
        """A mechanism with perturbed parameters: those initialized to zero or one could hide errors.

        With dropout it is in evaluation mode, for which the laws hold.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            mechanism = self.factory(self.width, self.heads, layer=1, layers=3).to(torch.float64)
            with torch.no_grad():
                for parameter in mechanism.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
        mechanism = mechanism.eval() if has_dropout(mechanism) else mechanism
        return mechanism.to(dtype or self.dtype)

    def input(self, b: int, t: int, *, seed: int = 1, dtype: torch.dtype | None = None) -> Tensor:
        """Tokens with a common direction, as in real models: independent tokens hide bad conditioning."""
        generator = torch.Generator().manual_seed(seed)
        common = torch.randn(self.width, generator=generator, dtype=torch.float64)
        tokens = torch.randn(b, t, self.width, generator=generator, dtype=torch.float64)
        return (tokens + common).to(dtype or self.dtype)


def has_dropout(mechanism: nn.Module) -> bool:
    """Whether the mechanism has dropout: in a module of PyTorch, or as the `dropout` of its config.

    >>> has_dropout(nn.Dropout(0.1)), has_dropout(nn.Dropout(0.0)), has_dropout(nn.Linear(1, 1))
    (True, False, False)
    """
    probabilities = [m.p for m in mechanism.modules() if isinstance(m, _DropoutNd)]
    return any(probabilities) or bool(getattr(getattr(mechanism, "config", None), "dropout", 0))


def run(
    mechanism: Callable[..., Any], x: Tensor, state: Any = None, layout: Layout | None = None
) -> tuple[Tensor, Any]:
    """Call the mechanism and check the form of its result."""
    result = mechanism(x, state=state, layout=layout)
    if not isinstance(result, tuple) or len(result) != 2:
        raise LawViolation(f"must return (y, state), got {type(result).__name__}")
    if result[0].shape != x.shape:
        raise LawViolation(f"y must have the shape of x, {list(x.shape)}, got {list(result[0].shape)}")
    return result


def is_causal(mechanism: Any) -> bool:
    """Whether the mechanism is causal, as it is unless it says otherwise."""
    return getattr(mechanism, "causal", True)


def require_causal(mechanism: Any) -> None:
    """Skip a law about earlier and later tokens, or about states, if the mechanism is not causal."""
    if not is_causal(mechanism):
        raise LawNotApplicable("not causal")


def require_equal(case: str, name: str, actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Raise a `LawViolation` unless both tensors agree, by default within the tolerance of their dtype."""
    if actual.shape != expected.shape:
        raise LawViolation(f"{case}: {name} has shape {list(actual.shape)}, expected {list(expected.shape)}")
    if not actual.numel():
        return
    difference = (actual - expected).abs()
    tolerance = TOLERANCES[expected.dtype] if tolerance is None else tolerance
    allowed = tolerance * max(1.0, float(expected.detach().abs().max()))
    if not bool((difference <= allowed).all()):  # NaN violates the law, too
        flat_index = int(difference.nan_to_num(torch.inf, torch.inf).argmax())
        index = [int(i) for i in torch.unravel_index(torch.tensor(flat_index), actual.shape)]
        largest = float(difference.flatten()[flat_index].detach())
        raise LawViolation(f"{case}: {name} differs by {largest:.1e} at {index}, allowed {allowed:.1e}")


def require_equal_with_gradients(
    case: str, mechanism: nn.Module, pairs: Sequence[tuple[Tensor, Tensor]], *inputs: Tensor, retain: bool = True
) -> None:
    """Raise unless each (actual, expected) pair agrees, and the gradients of a random weighted sum of all pairs.

    Compiled graphs may not support `retain`, which keeps them for a second backward pass.
    """
    for actual, expected in pairs:
        require_equal(case, "output", actual, expected)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(expected.shape, generator=generator, dtype=expected.dtype) for _, expected in pairs]
    leaves = {f"gradient of input {i}": x for i, x in enumerate(inputs)}
    leaves |= {f"gradient of {name}": p for name, p in mechanism.named_parameters() if p.requires_grad}
    sums = [torch.stack([(y[i] * w).sum() for y, w in zip(pairs, weights, strict=True)]).sum() for i in (0, 1)]
    actual, expected = (
        torch.autograd.grad(total, list(leaves.values()), retain_graph=retain, materialize_grads=True) for total in sums
    )
    for name, actual_gradient, expected_gradient in zip(leaves, actual, expected, strict=True):
        require_equal(case, name, actual_gradient, expected_gradient)
