r"""Couplings (Gahtan & Bronstein, https://arxiv.org/abs/2604.01683): queries and keys move together before scoring.

    x ──► W_q ──► q ─┐              ┌─► q' ─► [norm] ─► rotary ─► ...
                     ├─► coupling ──┤
    x ──► W_k ──► k ─┘              └─► k' ─► [norm] ─► rotary ─► ... (cached as it is)

| dynamics          | update of a token's (q, k)                                                                |     |
|-------------------|-------------------------------------------------------------------------------------------|-----|
| `hamiltonian`     | drift q <- q + \delta k, then kick k <- k + \delta f(q): symplectic Euler, or leapfrog    | (1) |
| `euler`           | the same drift and kick, both from the old (q, k)                                         | (2) |
| `affine`          | q <- q \odot e^{s_1(k)} + m_1(k), then k <- k \odot e^{s_2(q)} + m_2(q); identity at init | (3) |
| `uncoupled`       | control with as many parameters: q <- q + \delta g(q), k <- k + \delta f(k)               | (4) |
| `residual-query`  | control: q <- q + f(q)                                                                    | (5) |

| symbol           | variable             | shape                                                       |
|------------------|----------------------|-------------------------------------------------------------|
| q, k             | `q`, `k`             | `[b t h k]`, `[b t g k]`                                    |
| \delta           | `dt`                 | `[]`, learned, one per layer                                |
| f                | `force`, `of_key` in (4)      | `MLP` or `Potential`                               |
| g, and f in (5)  | `of_query`                    | `MLP`                                              |
| (s_1, m_1), (s_2, m_2) | `of_query`, `of_key`  | `MLP` with 2k outputs; log-scales s pass through tanh  |

`of_query` moves the query and `of_key` the key, whichever of the two it reads.

Grouped queries: the partner of a key is the mean query of its group, and every query of the group moves by the
displacement of the mean. The controls (4) and (5) have no partners: every query moves alone. Our choices where the
paper leaves it open: one network per layer, shared by its heads; \delta starts at 0.1; forces start at zero. (5) is the
simplest nonlinear query; `qkflow.mechanisms.nonlinear_query` is the published one.

`CoupledAttention` (`qkflow.mechanisms.coupled`) is standard attention with the default coupling.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from qkflow.errors import UsageError, unknown
from qkflow.mechanisms.base import Mechanism, Stream
from qkflow.ops import few_rows
from qkflow.ops.csrc import build
from qkflow.ops.csrc.eager import has_hooks
from qkflow.ops.sensitivity import Move
from qkflow.ops.symplectic import naive
from qkflow.ops.symplectic.cpu import Activation, MLPWeights, doubles
from qkflow.ops.symplectic.naive import Integrator, Shift, affine_coupling, affine_coupling_inverse, drift_coefficients
from qkflow.ops.symplectic.reversible import drift_kick_reversible

Dynamics = Literal["hamiltonian", "euler", "affine", "uncoupled", "residual-query"]
ForceKind = Literal["mlp", "potential", "none"]
Sharing = Literal["heads", "none", "layers"]
Queries = Float[Tensor, "b t h k"]
Keys = Float[Tensor, "b t g k"]

MAX_STEPS = 7
DYNAMICS: tuple[Dynamics, ...] = get_args(Dynamics)
"""The names of all dynamics."""
_CHOICES = {
    "dynamics": DYNAMICS,
    "integrator": get_args(Integrator),
    "force": get_args(ForceKind),
    "sharing": get_args(Sharing),
}
_OPTIONS: dict[str, tuple[str, ...]] = {
    "hamiltonian": ("integrator", "force", "steps", "dt", "hidden", "sharing"),
    "euler": ("force", "steps", "dt", "hidden", "sharing"),
    "affine": ("alternations", "hidden", "sharing"),
    "uncoupled": ("steps", "dt", "hidden", "sharing"),
    "residual-query": ("hidden", "sharing"),
}
"""The options that each dynamics reads."""


@dataclass(frozen=True, kw_only=True)
class CouplingConfig:
    """Options of a coupling."""

    dynamics: Dynamics = "hamiltonian"
    integrator: Integrator = "symplectic-euler"
    """Integration scheme of `hamiltonian` dynamics."""
    force: ForceKind = "mlp"
    """`mlp`; `potential`, the gradient of a potential, which makes the map symplectic; or `none`, drift only."""
    steps: int = 1
    """Integration steps, 1 to 7."""
    dt: float = 0.1
    """Initial step size; it is learned, one per layer."""
    alternations: int = 1
    """Number of query-then-key updates of `affine` dynamics."""
    hidden: int | None = None
    """Hidden width of the networks; `None` is the head width (half of it for `uncoupled`, which has two networks)."""
    sharing: Sharing = "heads"
    """Networks are shared by the `heads` of a layer, by the heads of all `layers`, or not at all (`none`)."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise unknown(name, str(getattr(self, name)), choices)
        if not 1 <= self.steps <= MAX_STEPS:
            raise UsageError(f"steps must be from 1 to {MAX_STEPS}, got {self.steps}")
        if not math.isfinite(self.dt):
            raise UsageError(f"dt must be a finite number, got {self.dt}")
        for name in ("alternations", "hidden"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        options = _OPTIONS[self.dynamics]
        for field in fields(self)[1:]:
            if field.name not in options and getattr(self, field.name) != field.default:
                raise UsageError(f"{self.dynamics} dynamics has no option {field.name}: expected {', '.join(options)}")

    def __call__(self, queries: int, keys: int, width: int) -> Coupling:
        """Return a coupling for that many query heads and key heads."""
        return _COUPLINGS[self.dynamics](queries, keys, width, self)


class MLP(nn.Module):
    """Two-layer perceptron with biases, zero at initialisation; with `heads`, one per head."""

    activation: Activation = "silu"

    def __init__(self, width: int, hidden: int, heads: int | None = None, outputs: int | None = None) -> None:
        super().__init__()
        build.load()  # build the kernel before torch.compile traces this module
        self.is_per_head = heads is not None
        shape = () if heads is None else (heads,)
        outputs = width if outputs is None else outputs
        self.inner = nn.Parameter(torch.randn(*shape, hidden, width) * width**-0.5)
        self.inner_bias = nn.Parameter(torch.zeros(*shape, hidden))
        self.outer = nn.Parameter(torch.zeros(*shape, outputs, hidden))
        self.outer_bias = nn.Parameter(torch.zeros(*shape, outputs))

    def forward(self, q: Float[Tensor, "... k"]) -> Float[Tensor, "... m"]:
        """See `mlp_force`."""
        return naive.mlp_force(q, *(w.to(q.dtype) for w in self.perceptron()))

    def perceptron(self) -> MLPWeights:
        """Return weights and biases of the two layers."""
        if type(self) is not MLP:  # parametrized weights are attributes only
            return self.inner, self.inner_bias, self.outer, self.outer_bias
        p: Any = self._parameters  # attribute access through nn.Module is slow enough to matter when decoding
        return p["inner"], p["inner_bias"], p["outer"], p["outer_bias"]

    def flops(self) -> int:
        """FLOPs per token and head."""
        return 2 * (self.inner.shape[-2:].numel() + self.outer.shape[-2:].numel())


class Potential(nn.Module):
    """The force -grad V of a confining potential V; amplitudes are positive and start at 1."""

    activation: Activation = "sigmoid"

    def __init__(self, width: int, hidden: int, heads: int | None = None) -> None:
        super().__init__()
        build.load()  # build the kernel before torch.compile traces this module
        self.is_per_head = heads is not None
        shape = () if heads is None else (heads,)
        self.rows = nn.Parameter(torch.randn(*shape, hidden, width) * width**-0.5)
        self.bias = nn.Parameter(torch.zeros(*shape, hidden))
        self.log_amplitude = nn.Parameter(torch.zeros(*shape, hidden))

    def forward(self, q: Float[Tensor, "... k"]) -> Float[Tensor, "... k"]:
        """See `potential_force`."""
        return naive.potential_force(q, *self._terms(q))

    def energy(self, q: Float[Tensor, "... k"], k: Float[Tensor, "... k"]) -> Float[Tensor, "..."]:
        """See `qkflow.ops.symplectic.naive.energy`."""
        return naive.energy(q, k, *self._terms(q))

    def perceptron(self) -> MLPWeights:
        r"""Return the same force as a two-layer perceptron, -U^\top (a \odot \sigma(U q + b)), where U = [W; -W]."""
        w = torch.cat([self.rows, -self.rows])
        outer = -(w * self.log_amplitude.exp().repeat(2)[:, None]).mT
        return w, self.bias.repeat(2), outer, outer.new_zeros(len(outer))

    def flops(self) -> int:
        """FLOPs per token and head; `perceptron`, used when heads share the weights, has twice the rows."""
        return 2 * 2 * self.rows.shape[-2:].numel() * (2 if self.rows.ndim == 2 else 1)

    def _terms(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.rows.to(like.dtype), self.bias.to(like.dtype), self.log_amplitude.exp().to(like.dtype)


def integrate(
    q: Queries, k: Keys, force: MLP | Potential, dt: Float[Tensor, ""], drifts: tuple[float, ...]
) -> tuple[Queries, Keys]:
    """Alternate drifts and kicks; uses the reversible kernel if heads share one network.

    Not for several steps in half precision: running the steps backwards would lose too many digits.
    """
    dt = dt if dt.dtype == q.dtype else dt.to(q.dtype)
    is_own_forward = type(force).forward in (MLP.forward, Potential.forward) and not has_hooks(force)
    if not is_own_forward or force.is_per_head or (q.dtype.itemsize < 4 and len(drifts) > 2):
        return naive.drift_kick(q, k, force, dt, drifts)
    w1, b1, w2, b2 = force.perceptron()
    if w1.dtype != q.dtype:
        w1, b1, w2, b2 = (w.to(q.dtype) for w in (w1, b1, w2, b2))
    return drift_kick_reversible(q, k, (w1, b1, w2, b2), dt, drifts, force.activation)


def kick(k: Keys, q: Queries, force: MLP | Potential, dt: Float[Tensor, ""]) -> Keys:
    r"""Return k + \delta f(q)."""
    return integrate(q, k, force, dt, (0.0, 0.0))[1]


class Coupling(nn.Module, ABC):
    """Moves the queries and keys of each token.

    Subclasses write the map of one pair twice. `stages` is its definition, step by step, in the reference operations;
    probes follow a pair through it. `move` is the same map in its fast form, which models run. A test compares them.
    """

    is_paired = True
    """Whether queries and keys interact; if not, their head counts need not match."""

    def __init__(self, queries: int, keys: int, width: int, config: CouplingConfig) -> None:
        super().__init__()
        if keys < 1 or queries % keys:
            raise UsageError(f"the number of key heads must divide that of query heads, got {keys} and {queries}")
        self.queries, self.keys, self.width, self.config = queries, keys, width, config
        self._network_heads = keys if config.sharing == "none" else None

    def forward(self, q: Queries, k: Keys, *, skip_first_drift: bool = False) -> tuple[Queries, Keys]:
        """Return the moved queries and keys; skip the drift that the caller has applied (`foldable_drift`)."""
        if q.shape[2:] != (self.queries, self.width) or k.shape[2:] != (self.keys, self.width):
            raise UsageError(
                f"expected {self.queries} query heads and {self.keys} key heads of width {self.width},"
                f" got {list(q.shape[2:])} and {list(k.shape[2:])}"
            )
        if self.queries == self.keys or not self.is_paired:
            return self.move(q, k, skip_first_drift=skip_first_drift)
        grouped = rearrange(q, "b t (g r) k -> b t g r k", g=self.keys)
        mean = grouped.mean(3)
        moved, k = self.move(mean, k, skip_first_drift=skip_first_drift)
        return (grouped + (moved - mean).unsqueeze(3)).flatten(2, 3), k

    @abstractmethod
    def move(self, q: Queries, k: Keys, *, skip_first_drift: bool = False) -> tuple[Queries, Keys]:
        """Apply the whole map, in its fast form."""

    @abstractmethod
    def stages(self) -> list[Move]:
        """Return the steps whose composition is `move`, in their reference form."""

    @abstractmethod
    def flops(self) -> int:
        """FLOPs per token."""

    @property
    def has_native_step(self) -> bool:
        """Whether `native_step` may return one."""
        return False

    def native_step(self, like: Tensor) -> few_rows.CouplingStep | None:
        """Return what a decoding step needs to apply the map; None if it cannot."""
        return None

    def foldable_drift(self) -> Float[Tensor, ""] | None:
        """Return c if the map starts with q + c k, which a caller may fold into the query projection."""
        return None

    def tie_weights(self, first: Coupling) -> None:
        """Use the networks of the first layer if the config shares them between layers."""
        if self.config.sharing == "layers":
            for name, module in first.named_children():
                setattr(self, name, module)


class DriftKick(Coupling):
    """Equations (1) and (2): the query drifts along its key, the key is kicked by a force of the query."""

    def __init__(self, queries: int, keys: int, width: int, config: CouplingConfig) -> None:
        super().__init__(queries, keys, width, config)
        self.dt = nn.Parameter(torch.tensor(float(config.dt)))
        self._drifts = drift_coefficients(config.integrator, config.steps)
        self.force: MLP | Potential | None = None
        if config.force != "none":
            kind = MLP if config.force == "mlp" else Potential
            self.force = kind(width, config.hidden or width, self._network_heads)

    def move(self, q: Queries, k: Keys, *, skip_first_drift: bool = False) -> tuple[Queries, Keys]:
        """Integrate `config.steps` steps."""
        coefficients = (0.0, *self._drifts[1:]) if skip_first_drift else self._drifts
        force, dt = self.force, self.dt
        if force is None:
            return (torch.addcmul(q, k, dt.to(q.dtype), value=sum(coefficients)) if any(coefficients) else q), k
        if self.config.dynamics == "hamiltonian":
            return integrate(q, k, force, dt, coefficients)  # (1)
        for _ in range(self.config.steps):
            q, k = torch.addcmul(q, k, dt.to(q.dtype)), kick(k, q, force, dt)  # (2)
        return q, k

    @property
    def has_native_step(self) -> bool:
        """Whether it is the default: (1) with a force that the heads share."""
        is_shared = isinstance(self.force, MLP) and not self.force.is_per_head
        return type(self) is DriftKick and self.config.dynamics == "hamiltonian" and is_shared

    def native_step(self, like: Tensor) -> few_rows.CouplingStep | None:
        """Return the weights of (1)."""
        force: Any = self._modules["force"]
        if type(self) is not DriftKick or type(force) is not MLP or has_hooks(self) or has_hooks(force):
            return None
        dt = cast(Tensor, self._parameters["dt"])  # faster than attribute access
        weights, width = force.perceptron(), self.width
        hidden = weights[0].shape[0]
        shapes = ((hidden, width), (hidden,), (width, hidden), (width,))
        if not (few_rows.are_plain(like.dtype, (dt, *weights)) and few_rows.have_shapes(weights, shapes)):
            return None
        return few_rows.CouplingStep(dt.item(), doubles(self._drifts), 0, weights)

    def stages(self) -> list[Move]:
        """One integration step per stage."""
        scheme: Any = {"symplectic-euler": naive.symplectic_euler, "leapfrog": naive.leapfrog}[self.config.integrator]
        if self.config.dynamics == "euler":
            scheme = naive.euler
        force = torch.zeros_like if self.force is None else self.force
        return [partial(scheme, force=force, dt=self.dt)] * self.config.steps

    def foldable_drift(self) -> Float[Tensor, ""] | None:
        """The first drift of `hamiltonian` dynamics; (2) needs the original query."""
        return None if self.config.dynamics == "euler" else self.dt * self._drifts[0]

    def flops(self) -> int:
        """One force per step and pair."""
        return 0 if self.force is None else self.config.steps * self.keys * self.force.flops()


class Affine(Coupling):
    """Equation (3): invertible maps of the query given the key, and of the key given the query."""

    def __init__(self, queries: int, keys: int, width: int, config: CouplingConfig) -> None:
        super().__init__(queries, keys, width, config)
        hidden = config.hidden or width
        self.of_query, self.of_key = (
            nn.ModuleList(
                MLP(width, hidden, self._network_heads, outputs=2 * width) for _ in range(config.alternations)
            )
            for _ in range(2)
        )

    def move(self, q: Queries, k: Keys, *, skip_first_drift: bool = False) -> tuple[Queries, Keys]:
        """Update query, key, query, key, ..."""
        return affine_coupling(q, k, self._layers())

    def stages(self) -> list[Move]:
        """One alternation per stage."""
        return [partial(affine_coupling, layers=[layer]) for layer in self._layers()]

    def inverse(self, q: Queries, k: Keys) -> tuple[Queries, Keys]:
        """Return the pairs that `move` maps to (q, k)."""
        return affine_coupling_inverse(q, k, self._layers())

    def flops(self) -> int:
        """Two networks per alternation and pair."""
        return self.keys * sum(cast(MLP, network).flops() for network in (*self.of_query, *self.of_key))

    def _layers(self) -> list[tuple[Shift, Shift]]:
        def scale_and_shift(network: nn.Module) -> Shift:
            def apply(x: Tensor) -> tuple[Tensor, Tensor]:
                log_scale, shift = network(x).chunk(2, -1)
                return log_scale.tanh(), shift  # unbounded log-scales overflow after two alternations

            return apply

        return [
            (scale_and_shift(of_query), scale_and_shift(of_key))
            for of_query, of_key in zip(self.of_query, self.of_key, strict=True)
        ]


class Uncoupled(Coupling):
    """Equation (4), a control: queries and keys move independently, with as many parameters."""

    is_paired = False

    def __init__(self, queries: int, keys: int, width: int, config: CouplingConfig) -> None:
        super().__init__(queries, keys, width, config)
        hidden = config.hidden or max(1, width // 2)
        self.dt = nn.Parameter(torch.tensor(float(config.dt)))
        self.of_query = MLP(width, hidden, None if self._network_heads is None else queries)
        self.of_key = MLP(width, hidden, self._network_heads)

    def move(self, q: Queries, k: Keys, *, skip_first_drift: bool = False) -> tuple[Queries, Keys]:
        """Apply `config.steps` independent steps."""
        for _ in range(self.config.steps):
            q, k = kick(q, q, self.of_query, self.dt), kick(k, k, self.of_key, self.dt)
        return q, k

    def stages(self) -> list[Move]:
        """One step per stage."""
        return [lambda q, k: (q + self.dt * self.of_query(q), k + self.dt * self.of_key(k))] * self.config.steps

    def flops(self) -> int:
        """One force per step and head."""
        return self.config.steps * (self.queries * self.of_query.flops() + self.keys * self.of_key.flops())


class ResidualQuery(Coupling):
    """Equation (5), a control: a residual perceptron on the query; keys do not change."""

    is_paired = False

    def __init__(self, queries: int, keys: int, width: int, config: CouplingConfig) -> None:
        super().__init__(queries, keys, width, config)
        self.of_query = MLP(width, config.hidden or width, None if self._network_heads is None else queries)

    def move(self, q: Queries, k: Keys, *, skip_first_drift: bool = False) -> tuple[Queries, Keys]:
        """Update the query."""
        return kick(q, q, self.of_query, q.new_ones(())), k

    def stages(self) -> list[Move]:
        """A single stage."""
        return [lambda q, k: (q + self.of_query(q), k)]

    def flops(self) -> int:
        """One perceptron per query head."""
        return self.queries * self.of_query.flops()


_COUPLINGS: dict[str, type[Coupling]] = {
    "hamiltonian": DriftKick,
    "euler": DriftKick,
    "affine": Affine,
    "uncoupled": Uncoupled,
    "residual-query": ResidualQuery,
}


class QKMechanism(Mechanism):
    """A mechanism with queries and keys, which a coupling may move."""

    coupling: Coupling | None

    @abstractmethod
    def pairs(self, x: Stream) -> tuple[Keys, Keys]:
        """Return each key and the mean of the queries that attend to it, before the coupling moves them."""

    def tie_weights(self, first: Mechanism) -> None:
        """Share the coupling's networks with the first layer if the config asks for it."""
        if self.coupling is not None and isinstance(first, QKMechanism) and first.coupling is not None:
            self.coupling.tie_weights(first.coupling)

    def _coupling_flops(self) -> int:
        return 0 if self.coupling is None else self.coupling.flops()

    def _coupling_parameters(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.named_parameters() if name.startswith("coupling."))
