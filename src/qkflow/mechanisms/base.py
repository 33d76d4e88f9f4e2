"""The interface of a mechanism: the module of a block in which tokens attend to each other.

    y, state = mechanism(x, state=None, layout=None)          x, y: [b, t, d]

Without a `state`, `x` is a batch of whole sequences. With one, `x` continues the sequences that produced it. A `layout`
describes padding or packing; the output at padding is zero. Three more methods expose the same computation:

    A = weights(x)       [b, h, t, s]     the influence of token s on token t
    v = values(x)        [b, s, h, v]     the value of each token
    y = read(A v, x)                      the output
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.ops.csrc.eager import has_hooks
from qkflow.ops.groups import Group
from qkflow.ops.linear import linear
from qkflow.state import State

Stream = Float[Tensor, "b t d"]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one sequence of `t` tokens. FLOPs count matrix products only, two per multiply-add."""

    parameters: int
    """Trainable parameters."""
    linear_flops: int
    """FLOPs that grow linearly with t: projections, and the memory of a linear mechanism."""
    pair_flops: int
    """FLOPs per query-key pair."""
    pairs: float
    """Number of query-key pairs; half of t squared for causal attention."""
    state_bytes: int
    """Size of the state after t tokens, in the precision of the parameters."""

    @property
    def flops(self) -> int:
        """FLOPs of one forward pass."""
        return self.linear_flops + round(self.pair_flops * self.pairs)


@dataclass(frozen=True, kw_only=True)
class Circuits:
    """Names of the parameters that decide where to attend (QK) and of those that decide what to pass on (OV)."""

    qk: tuple[str, ...]
    ov: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ParamOptions:
    """Optimizer options of one parameter, relative to the defaults."""

    rate: float = 1.0
    """Factor on the learning rate."""
    decay: bool = True
    """Whether weight decay applies, if the parameter is a matrix."""


class Mechanism(nn.Module, ABC):
    """A map of the stream, the activations `[b, t, d]` that flow between layers. It is causal by default.

    By convention the projection back to the stream, if there is one, is called `output`: a model may zero it at
    initialisation.
    """

    @abstractmethod
    def forward(self, x: Stream, state: State | None = None, layout: Layout | None = None) -> tuple[Stream, State]:
        """Return the output of each token, and the state after the last token of each sequence."""

    @abstractmethod
    def weights(self, x: Stream, state: State | None = None, layout: Layout | None = None) -> Float[Tensor, "b h t s"]:
        """Return the influence of each token on each output: first the slots of the state, then the tokens of `x`."""

    @abstractmethod
    def values(self, x: Stream) -> Float[Tensor, "b s h v"]:
        """Return the value of each token in each head."""

    @abstractmethod
    def read(self, z: Float[Tensor, "b t h v"], x: Stream) -> Stream:
        """Return the output, given the weighted values `z`."""

    @abstractmethod
    def cost(self, t: int) -> Cost:
        """Return the cost of one sequence of `t` tokens."""

    @abstractmethod
    def circuits(self) -> Circuits:
        """Return the parameters of the QK and of the OV circuit; the others belong to neither."""

    @property
    def causal(self) -> bool:
        """Whether a token sees no later ones. If not, there is nothing to continue: the returned state is empty."""
        return True

    @property
    def has_positions(self) -> bool:
        """Whether outputs depend on the order of the visible tokens."""
        return True

    @property
    def group(self) -> Group | None:
        """The group whose elements the stream holds; the output is then a tangent. `None` for an ordinary stream."""
        return None

    def tie_weights(self, first: Mechanism) -> None:
        """Share parameters with the first layer of a stack where the config asks for it. Models call this once."""

    def param_options(self) -> Mapping[str, ParamOptions]:
        """Return the optimizer options of parameters that need their own, by name."""
        return {}


def projection(inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
    """Return a linear layer that preserves scale: weights start as N(0, 1 / inputs), a bias as zero."""
    linear = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(linear.weight, std=inputs**-0.5)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


def conv_weight(channels: int, taps: int) -> nn.Parameter | None:
    """Return the weights of a short convolution, initialised as nn.Conv1d does; `None` for a single tap."""
    return nn.Parameter(torch.empty(channels, taps).uniform_(-1, 1) * taps**-0.5) if taps > 1 else None


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling `module` is the same as multiplying by its weight: a linear layer without bias or hook."""
    return type(module) is nn.Linear and module.bias is None and not has_hooks(module)


def apply_linear(module: nn.Module, x: Float[Tensor, "... i"]) -> Float[Tensor, "... o"]:
    """Call a linear layer; in training, by the fastest product for this machine."""
    return linear(x, module.weight) if torch.is_grad_enabled() and is_plain_linear(module) else module(x)


def wrong_state(mechanism: Mechanism, state: State, expected: type[State]) -> UsageError:
    """Return the error for a state that another mechanism produced."""
    name = type(mechanism).__name__
    return UsageError(
        f"{name} got a {type(state).__name__}, expected a {expected.__name__}: pass the state that {name} returned"
    )


def refuse_state(mechanism: Mechanism, state: State | None) -> None:
    """Raise if a call that is not causal gets a state."""
    if state is not None:
        raise UsageError(
            f"{type(mechanism).__name__} got a state, but earlier tokens would see the new ones, so there is"
            " nothing to continue: pass whole sequences without a state, or use causal=True without memory"
        )


@runtime_checkable  # isinstance checks of the test suite's type checker need it
class Factory(Protocol):
    """Builds the mechanism of one layer of a stack."""

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> Mechanism:
        """Return the mechanism of layer `layer` (from 0) out of `layers`."""
        ...
