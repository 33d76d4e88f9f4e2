"""The contract of a mechanism: the part of a block in which tokens see each other.

    y, state = mechanism(x, state=None, layout=None)          x, y: [b, t, d]

`x` alone is a batch of whole sequences. With a `state` it continues the ones that made the state. With a `layout` it is
padded or packed; padding comes out as zeros. Two readings of the same computation serve those who look at it:

    A = weights(x)       [b, h, t, s]     the influence of token s on token t
    v = values(x)        [b, s, h, v]     what is passed on
    y = read(A v, x)                      so that nothing is hidden between the map and the output
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.ops.groups import Group
from qkflow.state import State

Stream = Float[Tensor, "b t d"]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a mechanism costs on one sequence of `t` tokens. FLOPs are those of matrix products, two a multiply-add."""

    parameters: int
    """Numbers that are trained."""
    linear_flops: int
    """Products that grow with t alone: projections, and a linear mechanism's memory."""
    pair_flops: int
    """Products for each pair of a query and a key that meet."""
    pairs: float
    """Pairs that meet: half a square when causal."""
    state_bytes: int
    """The state after t tokens, in the parameters' precision."""

    @property
    def flops(self) -> int:
        """Products of one forward pass."""
        return self.linear_flops + round(self.pair_flops * self.pairs)


@dataclass(frozen=True, kw_only=True)
class Circuits:
    """The names of a mechanism's parameters by what they decide: where to look (QK), and what to pass on (OV)."""

    qk: tuple[str, ...]
    """Queries, keys and what else makes scores."""
    ov: tuple[str, ...]
    """Values, outputs and what else makes what is passed on."""


@dataclass(frozen=True, kw_only=True)
class ParamOptions:
    """How a parameter learns, as far as it differs from the others."""

    rate: float = 1.0
    """A factor on the learning rate."""
    decay: bool = True
    """Whether weight decay may draw it to zero, if it is a matrix."""


@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """What a mechanism has to show of its own, as plain data: it does not draw, a report does.

    Layers that show the same title are shown together: side by side where `x` is a single point, else one at a time.

    >>> Diagnostic(title="gate", kind="bars", x=("head 1", "head 2"), series=("g",), values=((0.2, 0.9),)).values[0][1]
    0.9
    """

    title: str
    """What is shown."""
    kind: Literal["lines", "bars", "heat", "wheel"]
    """How: a line or a row of bars for each series; a coloured cell for each number, series downwards; or a circle for
    each series, with a point at the angle, in radians, that each number is."""
    x: tuple[str | float, ...]
    """Where: names, or numbers in rising order. A single point is a figure of the whole layer."""
    series: tuple[str, ...]
    """The names of the series."""
    values: tuple[tuple[float, ...], ...]
    """A row for each series, with a number for each `x`; one that is not finite is left out."""
    x_label: str = ""
    """The quantity along `x`, with its unit."""
    y_label: str = ""
    """The quantity of the values, with its unit."""
    note: str = ""
    """How to read it, in a sentence."""

    def __post_init__(self) -> None:
        shape = (len(self.values), *sorted({len(row) for row in self.values}))
        if shape != (len(self.series), len(self.x)) or not self.series or not self.x:
            raise UsageError(
                f"exhibit {self.title!r} has rows of {[len(row) for row in self.values]} values, expected"
                f" {len(self.series)} rows (one a series, at least one) of {len(self.x)} (one an x, at least one)"
            )


class Mechanism(nn.Module, ABC):
    """A causal map from a stream to a stream. See the module's text for what the methods owe each other.

    By convention the projection back to the stream, if there is one, is called `output`: a model may start it at zero.
    """

    @abstractmethod
    def forward(self, x: Stream, state: State | None = None, layout: Layout | None = None) -> tuple[Stream, State]:
        """The output for each token and the state after the last of each sequence."""

    @abstractmethod
    def weights(self, x: Stream, state: State | None = None, layout: Layout | None = None) -> Float[Tensor, "b h t s"]:
        """The influence of each token on each: first the tokens of the state, slot by slot, then those of `x`."""

    @abstractmethod
    def values(self, x: Stream) -> Float[Tensor, "b s h v"]:
        """What each token passes on to those that look at it, for every head."""

    @abstractmethod
    def read(self, z: Float[Tensor, "b t h v"], x: Stream) -> Stream:
        """The output, from what the map has gathered."""

    @abstractmethod
    def cost(self, t: int) -> Cost:
        """What one sequence of `t` tokens costs."""

    @abstractmethod
    def circuits(self) -> Circuits:
        """Which parameters are the QK circuit and which the OV circuit; the rest is neither."""

    @property
    def group(self) -> Group | None:
        """The group whose elements the stream holds, of which the output is a change; `None` for an ordinary stream."""
        return None

    def tie(self, first: Mechanism) -> None:
        """Share with the first layer of a stack what the config says all its layers share; a model calls it."""

    def paces(self) -> Mapping[str, ParamOptions]:
        """How parameters learn that do not live on a matrix's scale, by name; the usual way for all not named."""
        return {}

    def exhibits(self, x: Stream) -> tuple[Diagnostic, ...]:
        """What the mechanism has to show of its own when it reads `x`; nothing unless it says so."""
        return ()


def projection(inputs: int, outputs: int) -> nn.Linear:
    """A matrix without bias that keeps the scale of what passes through it: entries begin as N(0, 1 / inputs)."""
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(linear.weight, std=inputs**-0.5)
    return linear


def bare(linear: nn.Linear) -> bool:
    """Whether a projection is its matrix and nothing else: no subclass, bias or hook that someone put there."""
    hooks = linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks
    return type(linear) is nn.Linear and linear.bias is None and not hooks


@runtime_checkable  # so that run-time type checks can look at it
class Factory(Protocol):
    """Something that makes a mechanism for one layer of a stack; layers count from 0."""

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> Mechanism:
        """The mechanism of layer `layer` out of `layers`."""
        ...
