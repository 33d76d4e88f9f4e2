"""What the softmax mechanisms share: projections, rotary position, cache, window, and who may see whom.

        x ──► W_q ─┬────────────┬─► [norm] ─► rotate ─► q ─┐
                   │ [coupling] │                          ├─► attend ─► read ─► y
        x ──► W_k ─┴────────────┴─► [norm] ─► rotate ─► k ─┤
        x ──► W_v ────────────────────────────────────► v ─┘
                                  k, v also go into the cache, coupled and rotated: a cached key never changes again

A mechanism of this family says how q, k and v are shaped (`shape`), what happens at `attend`, and how its map is made.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from einops import reduce, repeat
from jaxtyping import Float
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.mechanisms.base import Circuits, Cost, Diagnostic, Mechanism, Stream, bare, projection
from qkflow.mechanisms.coupling import Coupling, CouplingConfig
from qkflow.mechanisms.masking import Rows, map_by_token, validate_input, visible_keys
from qkflow.ops.norm import rms_norm
from qkflow.ops.rotary import apply_rotary, rotary_factors
from qkflow.state import KVCache, State


@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig:
    """The options that every softmax mechanism has."""

    key_heads: int | None = None
    """Heads of keys and values, each shared by a group of query heads; `None` is one for each query head."""
    rotary_base: float | None = 10000.0
    """Base of the rotary angles; `None` for no positions at all."""
    qk_norm: bool = False
    """Normalise queries and keys over the head's width before they turn."""
    window: int | None = None
    """How many tokens back a token sees, itself included; `None` is all the way."""
    coupling: CouplingConfig | None = None
    """How queries and keys move together before they are scored; `None` leaves them where they are."""


class HeadShape(NamedTuple):
    """Heads and widths of a softmax mechanism."""

    queries: int
    keys: int
    key_width: int
    values: int
    value_width: int
    outputs: int


class SoftmaxMechanism(Mechanism):
    """A mechanism that scores every pair it can see. Subclasses choose the heads' shape and say how to attend."""

    def __init__(self, width: int, shape: HeadShape, config: SoftmaxConfig) -> None:
        super().__init__()
        if shape.key_width % 2 and config.rotary_base is not None:
            raise UsageError(f"rotary positions need an even head width, got {shape.key_width}: change width or heads")
        if config.window is not None and config.window < 1:
            raise UsageError(f"window must be at least 1, got {config.window}")
        self.width, self.shape, self.config = width, shape, config
        self.query = projection(width, shape.queries * shape.key_width)
        self.key = projection(width, shape.keys * shape.key_width)
        self.value = projection(width, shape.values * shape.value_width)
        self.output = projection(shape.outputs * shape.value_width, width)
        if config.qk_norm:
            self.query_norm = nn.Parameter(torch.ones(shape.key_width))
            self.key_norm = nn.Parameter(torch.ones(shape.key_width))
        self.coupling: Coupling | None = None
        if config.coupling is not None:
            self.coupling = config.coupling(shape.queries, shape.keys, shape.key_width)

    @abstractmethod
    def attend(self, rows: Rows) -> Float[Tensor, "n t h v"]:
        """What each query gathers."""

    @abstractmethod
    def map(self, rows: Rows) -> Float[Tensor, "n h t s"]:
        """With which weights it does."""

    def forward(self, x: Stream, state: State | None = None, layout: Layout | None = None) -> tuple[Stream, State]:
        """The output for each token, and the keys and values seen so far."""
        rows = self._rows(x, state, layout)
        z = self.attend(rows)
        z = z if layout is None else layout.batch(z)
        return self.read(z, x), rows.cache.trim()

    def weights(self, x: Stream, state: State | None = None, layout: Layout | None = None) -> Float[Tensor, "b h t s"]:
        """The exact map, over the slots of the state (in a packed batch: of each token's own sequence) and then `x`."""
        if isinstance(state, KVCache):
            state = replace(state, window=None)  # a column for every slot: none may be given up on the way
        rows = self._rows(x, state, layout)
        return map_by_token(torch.nn.functional.pad(self.map(rows), (rows.first, 0)), rows, layout)

    def values(self, x: Stream) -> Float[Tensor, "b s h v"]:
        """The value each head's queries read from each token."""
        v = self._split(self.value, x, self.shape.values)
        return repeat(v, "b s g v -> b s (g r) v", r=self.shape.outputs // self.shape.values)

    def read(self, z: Float[Tensor, "b t h v"], x: Stream) -> Stream:
        """The heads side by side, projected back to the stream."""
        return self.output(z.flatten(2))

    def cost(self, t: int) -> Cost:
        """Four projections, the coupling, and a product for the score and one for the value of every pair."""
        shape, window = self.shape, min(t, self.config.window or t)
        projections = sum(m.weight.numel() for m in (self.query, self.key, self.value, self.output))
        cached = shape.keys * shape.key_width + shape.values * shape.value_width
        return Cost(
            parameters=sum(p.numel() for p in self.parameters()),
            linear_flops=t * (2 * projections + (0 if self.coupling is None else self.coupling.flops())),
            pair_flops=2 * self._pair_products(),
            pairs=t * window - window**2 / 2,
            state_bytes=window * cached * self.key.weight.element_size(),
        )

    def circuits(self) -> Circuits:
        """Queries and keys, with their norms and what couples them, against values and output."""
        norms = ("query_norm", "key_norm") if self.config.qk_norm else ()
        moving = () if self.coupling is None else (f"coupling.{name}" for name, _ in self.coupling.named_parameters())
        return Circuits(qk=("query.weight", "key.weight", *norms, *moving), ov=("value.weight", "output.weight"))

    def tie(self, first: Mechanism) -> None:
        """Couplings may be shared by all layers."""
        if self.coupling is not None and isinstance(first, SoftmaxMechanism) and first.coupling is not None:
            self.coupling.tie(first.coupling)

    def pairs(self, x: Stream) -> tuple[Float[Tensor, "b t g k"], Float[Tensor, "b t g k"]]:
        """Each key and the mean of the queries that look at it, as projected: before a coupling moves them."""
        q, k = self._split(self.query, x, self.shape.queries), self._split(self.key, x, self.shape.keys)
        maps = self.shape.keys // self.shape.values  # of one value, by keys of their own: their queries take turns
        return reduce(q, "b t (g r m) k -> b t (g m) k", "mean", g=self.shape.values, m=maps), k

    def exhibits(self, x: Stream) -> tuple[Diagnostic, ...]:
        """What a coupling does with the queries and keys of `x`."""
        own = () if self.coupling is None else self.coupling.exhibits(*self.pairs(x))
        return (*super().exhibits(x), *own)

    def _pair_products(self) -> int:
        return self.shape.queries * self.shape.key_width + self.shape.outputs * self.shape.value_width

    def _split(self, linear: nn.Linear, x: Stream, heads: int) -> Float[Tensor, "b t h k"]:
        return linear(x).view(*x.shape[:2], heads, -1)

    def _queries_and_keys(self, x: Stream) -> tuple[Float[Tensor, "b t h k"], Float[Tensor, "b t g k"]]:
        """Projected and moved. A motion that begins with q + c k begins in the projection, W_q + c W_k, when training:
        a matrix is smaller than a batch, forward and back. A single token is smaller than a matrix.
        """
        k = self._split(self.key, x, self.shape.keys)
        if self.coupling is None:
            return self._split(self.query, x, self.shape.queries), k
        lead = self.coupling.lead() if torch.is_grad_enabled() and self.shape.queries == self.shape.keys else None
        if lead is None or not (bare(self.query) and bare(self.key)):
            return self.couple(self._split(self.query, x, self.shape.queries), k)
        q = torch.nn.functional.linear(x, torch.addcmul(self.query.weight, self.key.weight, lead))
        return self.couple(q.view(k.shape), k, drifted=True)

    def couple(
        self, q: Float[Tensor, "b t h k"], k: Float[Tensor, "b t g k"], *, drifted: bool = False
    ) -> tuple[Float[Tensor, "b t h k"], Float[Tensor, "b t g k"]]:
        """Move queries and keys; a mechanism whose groups of queries do not lie side by side reorders them here."""
        return (q, k) if self.coupling is None else self.coupling(q, k, drifted=drifted)

    def _rows(self, x: Stream, state: State | None, layout: Layout | None) -> Rows:
        """Project, move to row form, turn, and put behind what the state holds."""
        x = validate_input(x, layout)
        q, k = self._queries_and_keys(x)
        v = self._split(self.value, x, self.shape.values)
        if self.config.qk_norm:
            q, k = rms_norm(q, self.query_norm), rms_norm(k, self.key_norm)
        if layout is not None:
            q, k, v = layout.rows(q), layout.rows(k), layout.rows(v)
        if state is not None and not isinstance(state, KVCache):
            raise UsageError(
                f"{type(self).__name__} continues a KVCache, got {type(state).__name__}: a state of another mechanism"
            )
        past = KVCache.start((k, v), self.config.window) if state is None else state
        if self.config.rotary_base is not None:
            heads, width = (
                self.shape.queries,
                self.shape.key_width,
            )  # there are never more heads of keys than of queries
            by = rotary_factors(past.offset, q.shape[1], heads=heads, width=width, base=self.config.rotary_base, like=q)
            q, k = apply_rotary(q, by), apply_rotary(k, by)
        cache = past.extend((k, v), None if layout is None or layout.even else layout.lengths)
        return visible_keys(q, k, v, past, cache, self.config.window)
