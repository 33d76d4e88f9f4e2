r"""Couplings: parts that move queries and keys after their projections and before anything scores them.

    x ──► W_q ──► q ─┐              ┌─► q' ─► [norm] ─► rotate ─► ...
                     ├─► coupling ──┤
    x ──► W_k ──► k ─┘              └─► k' ─► [norm] ─► rotate ─► ... (cached: it never changes again)

| dynamics          | what it does with a token's (q, k)                                                              |
|-------------------|-------------------------------------------------------------------------------------------------|
| `hamiltonian`     | q drifts along k, k is kicked by f(q): symplectic Euler, or leapfrog                            |
| `euler`           | the same, both at once                                                                          |
| `affine`          | q \odot e^{s_1(k)} + m_1(k), then k \odot e^{s_2(q)} + m_2(q): invertible, the identity at first |
| `uncoupled`       | control: q + \delta g(q) and k + \delta f(k), as many parameters, nothing passes between them   |
| `nonlinear-query` | control: q + f(q)                                                                               |

Grouped queries: a key's partner is the mean query of its group, and each query of the group moves as the mean does. The
controls pair nothing: there each query moves by itself. Ours, since the paper leaves it open: one network a layer,
shared by its heads; a step of 0.1 at the start, learned, one a layer; forces that begin at zero; log-scales s within 1.

https://arxiv.org/abs/2604.01683, and for `nonlinear-query` https://arxiv.org/abs/2603.13381
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal, cast, get_args

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from qkflow.errors import UsageError, unknown
from qkflow.mechanisms.forces import MLP, Potential, evolve, kick
from qkflow.mechanisms.observed import SCHEMES, Observed
from qkflow.ops.sensitivity import Move
from qkflow.ops.symplectic.naive import Integrator, Shift, affine_coupling, affine_coupling_inverse, drift_coefficients

Dynamics = Literal["hamiltonian", "euler", "affine", "uncoupled", "nonlinear-query"]
Force = Literal["mlp", "potential", "none"]
Sharing = Literal["heads", "none", "layers"]
Queries = Float[Tensor, "b t h k"]
Keys = Float[Tensor, "b t g k"]

MOST_STEPS = 7

_READS: dict[str, tuple[str, ...]] = {
    "hamiltonian": ("integrator", "force", "steps", "dt", "hidden", "sharing"),
    "euler": ("force", "steps", "dt", "hidden", "sharing"),
    "affine": ("alternations", "hidden", "sharing"),
    "uncoupled": ("steps", "dt", "hidden", "sharing"),
    "nonlinear-query": ("hidden", "sharing"),
}
"""The options that each dynamics has a use for."""

DYNAMICS: tuple[Dynamics, ...] = get_args(Dynamics)
"""Every dynamics by name."""
_CHOICES = {
    "dynamics": DYNAMICS,
    "integrator": get_args(Integrator),
    "force": get_args(Force),
    "sharing": get_args(Sharing),
}


@dataclass(frozen=True, kw_only=True)
class CouplingConfig:
    """How queries and keys move before they are scored."""

    dynamics: Dynamics = "hamiltonian"
    """What moves them."""
    integrator: Integrator = "symplectic-euler"
    """How a Hamiltonian motion is cut into steps."""
    force: Force = "mlp"
    """A perceptron; the slope of a potential, which makes the motion symplectic; or none, so that all is one drift."""
    steps: int = 1
    """Steps of the motion, 1 to 7."""
    dt: float = 0.1
    """The size of a step at the start; it is learned, one a layer."""
    alternations: int = 1
    """Affine: how many times the query and then the key are moved."""
    hidden: int | None = None
    """Width inside a network; `None` is the head's (`uncoupled`: half of it, since it has two)."""
    sharing: Sharing = "heads"
    """Who shares a network: the heads of a layer, nobody (one a head), or the heads of all layers; dt is a layer's."""

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise unknown(name, str(getattr(self, name)), known)
        if not 1 <= self.steps <= MOST_STEPS:
            raise UsageError(f"steps must be from 1 to {MOST_STEPS}, got {self.steps}")
        if not math.isfinite(self.dt):
            raise UsageError(f"dt must be a finite number, got {self.dt}")
        for name in ("alternations", "hidden"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        for field in fields(self)[1:]:
            if field.name not in _READS[self.dynamics] and getattr(self, field.name) != field.default:
                raise UsageError(
                    f"{self.dynamics} dynamics has no use for {field.name}: it takes {', '.join(_READS[self.dynamics])}"
                )

    def __call__(self, queries: int, keys: int, width: int) -> Coupling:
        """The coupling of so many heads of queries and of keys."""
        return _KINDS[self.dynamics](queries, keys, width, self)


class Coupling(Observed):
    """Moves queries and keys, token by token. A subclass says how one pair moves."""

    pairs = True
    """Whether queries and keys meet; if not, the heads need not match."""

    def __init__(self, queries: int, keys: int, width: int, config: CouplingConfig) -> None:
        super().__init__()
        if keys < 1 or queries % keys:
            raise UsageError(f"queries and keys move in pairs: {queries} heads of queries, {keys} of keys do not pair")
        self.queries, self.keys, self.width, self.config = queries, keys, width, config
        self._each = keys if config.sharing == "none" else None

    def forward(self, q: Queries, k: Keys, *, drifted: bool = False) -> tuple[Queries, Keys]:
        """Queries and keys after the motion; `drifted` says that the caller has done the first drift (`lead`)."""
        if q.shape[2:] != (self.queries, self.width) or k.shape[2:] != (self.keys, self.width):
            raise UsageError(
                f"queries and keys move in pairs: expected {self.queries} and {self.keys} heads of width {self.width},"
                f" got {list(q.shape[2:])} and {list(k.shape[2:])}"
            )
        if self.queries == self.keys or not self.pairs:
            return self.move(q, k, drifted=drifted)
        grouped = rearrange(q, "b t (g r) k -> b t g r k", g=self.keys)
        mean = grouped.mean(3)
        moved, k = self.move(mean, k, drifted=drifted)
        return (grouped + (moved - mean).unsqueeze(3)).flatten(2, 3), k

    @abstractmethod
    def move(self, q: Queries, k: Keys, *, drifted: bool = False) -> tuple[Queries, Keys]:
        """The motion itself."""

    def lead(self) -> Float[Tensor, ""] | None:
        """The c of q + c k, where the motion begins with that: a caller can fold it into the query's projection."""
        return None

    @abstractmethod
    def flops(self) -> int:
        """Matrix products for one token."""

    def tie(self, first: Coupling) -> None:
        """Use the networks of the stack's first layer, where the config says that layers share them."""
        if self.config.sharing == "layers":
            for name, module in first.named_children():
                setattr(self, name, module)


class Motion(Coupling):
    """A query that drifts along its key and a key that its query kicks: Hamiltonian or Euler."""

    def __init__(self, queries: int, keys: int, width: int, config: CouplingConfig) -> None:
        super().__init__(queries, keys, width, config)
        self.dt = nn.Parameter(torch.tensor(float(config.dt)))
        hidden = config.hidden or width
        self._parts = drift_coefficients(config.integrator, config.steps)
        self.force: MLP | Potential | None = None
        if config.force != "none":
            self.force = (MLP if config.force == "mlp" else Potential)(width, hidden, self._each)

    def move(self, q: Queries, k: Keys, *, drifted: bool = False) -> tuple[Queries, Keys]:
        """Step by step."""
        parts, force, dt = (0.0, *self._parts[1:]) if drifted else self._parts, self.force, self.dt
        if force is None:
            return (torch.addcmul(q, k, dt.to(q.dtype), value=sum(parts)) if any(parts) else q), k
        if self.config.dynamics == "hamiltonian":
            return evolve(q, k, force, dt, parts)
        for _ in range(self.config.steps):
            q, k = torch.addcmul(q, k, dt.to(q.dtype)), kick(k, q, force, dt)
        return q, k

    def stages(self) -> list[Move]:
        """The scheme's step, again and again."""
        scheme = SCHEMES[self.config.integrator if self.config.dynamics == "hamiltonian" else "euler"]
        force = torch.zeros_like if self.force is None else self.force
        return [partial(scheme, force=force, dt=self.dt)] * self.config.steps

    def lead(self) -> Float[Tensor, ""] | None:
        """Hamiltonian motion begins with a drift; Euler's needs the query as it was."""
        if self.config.dynamics == "euler":
            return None
        return self.dt * self._parts[0]

    def flops(self) -> int:
        """A force for each step and pair."""
        return 0 if self.force is None else self.config.steps * self.keys * self.force.flops()


class Affine(Coupling):
    """Maps of the query by the key and of the key by the query, each with a known inverse."""

    def __init__(self, queries: int, keys: int, width: int, config: CouplingConfig) -> None:
        super().__init__(queries, keys, width, config)
        hidden = config.hidden or width
        self.of_query, self.of_key = (
            nn.ModuleList(MLP(width, hidden, self._each, outputs=2 * width) for _ in range(config.alternations))
            for _ in range(2)
        )

    def move(self, q: Queries, k: Keys, *, drifted: bool = False) -> tuple[Queries, Keys]:
        """Query, key, query, key, ..."""
        return affine_coupling(q, k, self._layers())

    def stages(self) -> list[Move]:
        """Each alternation."""
        return [partial(affine_coupling, layers=[layer]) for layer in self._layers()]

    def inverse(self, q: Queries, k: Keys) -> tuple[Queries, Keys]:
        """The pairs that `move` takes to these."""
        return affine_coupling_inverse(q, k, self._layers())

    def flops(self) -> int:
        """Two networks an alternation, for each pair."""
        return self.keys * sum(cast(MLP, network).flops() for network in (*self.of_query, *self.of_key))

    def _layers(self) -> list[tuple[Shift, Shift]]:
        def halves(network: nn.Module) -> Shift:
            def shift(x: Tensor) -> tuple[Tensor, Tensor]:
                scale, by = network(x).chunk(2, -1)
                return scale.tanh(), by  # else two alternations can blow each other up beyond any number

            return shift

        return [(halves(one), halves(two)) for one, two in zip(self.of_query, self.of_key, strict=True)]


class Uncoupled(Coupling):
    """The control that has a coupling's capacity without the coupling: each moves by a force of its own."""

    pairs = False

    def __init__(self, queries: int, keys: int, width: int, config: CouplingConfig) -> None:
        super().__init__(queries, keys, width, config)
        hidden = config.hidden or max(1, width // 2)
        self.dt = nn.Parameter(torch.tensor(float(config.dt)))
        self.of_query = MLP(width, hidden, None if self._each is None else queries)
        self.of_key = MLP(width, hidden, self._each)

    def move(self, q: Queries, k: Keys, *, drifted: bool = False) -> tuple[Queries, Keys]:
        """Step by step, each by itself."""
        for _ in range(self.config.steps):
            q, k = kick(q, q, self.of_query, self.dt), kick(k, k, self.of_key, self.dt)
        return q, k

    def stages(self) -> list[Move]:
        """Each by itself, again and again."""
        return [lambda q, k: (q + self.dt * self.of_query(q), k + self.dt * self.of_key(k))] * self.config.steps

    def flops(self) -> int:
        """A force for each step and head."""
        return self.config.steps * (self.queries * self.of_query.flops() + self.keys * self.of_key.flops())


class NonlinearQuery(Coupling):
    """The control that leaves the key alone: the query and a perceptron of it."""

    pairs = False

    def __init__(self, queries: int, keys: int, width: int, config: CouplingConfig) -> None:
        super().__init__(queries, keys, width, config)
        self.of_query = MLP(width, config.hidden or width, None if self._each is None else queries)

    def move(self, q: Queries, k: Keys, *, drifted: bool = False) -> tuple[Queries, Keys]:
        """The query alone."""
        return kick(q, q, self.of_query, q.new_ones(())), k

    def stages(self) -> list[Move]:
        """The query alone, once."""
        return [lambda q, k: (q + self.of_query(q), k)]

    def flops(self) -> int:
        """A perceptron for each query."""
        return self.queries * self.of_query.flops()


_KINDS: dict[str, type[Coupling]] = {
    "hamiltonian": Motion,
    "euler": Motion,
    "affine": Affine,
    "uncoupled": Uncoupled,
    "nonlinear-query": NonlinearQuery,
}
