r"""Softmax attention: the base class of the mechanisms that score query-key pairs, and `StandardAttention`.

        x ──► W_q ─┬────────────┬─► [norm] ─► rotary ─► q ─┐
                   │ [coupling] │                          ├─► attend ─► z ─► W_o ─► y
        x ──► W_k ─┴────────────┴─► [norm] ─► rotary ─► k ─┤
        x ──► W_v ────────────────────────────────────► v ─┘
                                  k and v are cached, coupled and rotated

    A_{ts} = softmax_s(q_t \cdot k_s / \sqrt{k}),  s <= t and within the window        (1)
    z_t    = \sum_s A_{ts} v_s,    y_t = W_o z_t                                       (2)

| symbol   | variable | shape                                                                       |
|----------|----------|-----------------------------------------------------------------------------|
| q        | `q`      | `[b t h k]`                                                                 |
| k, v     | `k`, `v` | `[b s g k]`, `[b s g v]`; g divides h, h / g query heads share a key head   |
| A        |          | `[b h t s]`                                                                 |
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from einops import reduce, repeat
from jaxtyping import Float
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.mechanisms.base import Circuits, Cost, Stream, is_plain_linear, projection, wrong_state
from qkflow.mechanisms.coupling import CouplingConfig, QKMechanism
from qkflow.mechanisms.masking import AttentionInputs, map_by_token, validate_input, visible_keys
from qkflow.ops.attention import attention, attention_map
from qkflow.ops.norm import rms_norm
from qkflow.ops.rotary import apply_rotary, rotary_factors
from qkflow.state import KVCache, State

Queries = Float[Tensor, "b t h k"]
Keys = Float[Tensor, "b t g k"]


@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig:
    """Options of every softmax mechanism."""

    key_heads: int | None = None
    """Number of key and value heads (grouped-query attention); `None` is one per query head."""
    rotary_base: float | None = 10000.0
    """Base of the rotary frequencies; `None` disables rotary positions."""
    qk_norm: bool = False
    """Apply RMS norm to queries and keys before the rotary positions."""
    window: int | None = None
    """Sliding window, the token itself included; `None` is unlimited."""
    coupling: CouplingConfig | None = None
    """Moves queries and keys before they are scored."""


class HeadShape(NamedTuple):
    """Numbers and widths of the heads."""

    queries: int
    keys: int
    key_width: int
    values: int
    value_width: int
    outputs: int


class SoftmaxMechanism(QKMechanism):
    """Base class of mechanisms that score every visible pair. Subclasses define `attend` and `map`."""

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
        self.coupling = None
        if config.coupling is not None:
            self.coupling = config.coupling(shape.queries, shape.keys, shape.key_width)

    @abstractmethod
    def attend(self, inputs: AttentionInputs) -> Float[Tensor, "n t h v"]:
        """Return the weighted values of each query."""

    @abstractmethod
    def map(self, inputs: AttentionInputs) -> Float[Tensor, "n h t s"]:
        """Return the weights that `attend` uses."""

    def forward(self, x: Stream, state: State | None = None, layout: Layout | None = None) -> tuple[Stream, State]:
        """Return the output of each token, and the cache of keys and values."""
        inputs = self._attention_inputs(x, state, layout)
        z = self.attend(inputs)
        z = z if layout is None else layout.to_batch(z)
        return self.read(z, x), inputs.cache.trim()

    def weights(self, x: Stream, state: State | None = None, layout: Layout | None = None) -> Float[Tensor, "b h t s"]:
        """Return the attention map, over the slots of the state (of each token's own sequence) and then `x`."""
        if isinstance(state, KVCache):
            state = replace(state, window=None)  # keep every slot: each has a column
        inputs = self._attention_inputs(x, state, layout)
        scores = F.pad(self.map(inputs), (inputs.first_slot, 0))
        return map_by_token(scores, 0 if layout is None else inputs.cache.slots_used - layout.span, layout)

    def values(self, x: Stream) -> Float[Tensor, "b s h v"]:
        """Return the value that the queries of each head read."""
        v = self._split_heads(self.value(x), self.shape.values)
        return repeat(v, "b s g v -> b s (g r) v", r=self.shape.outputs // self.shape.values)

    def read(self, z: Float[Tensor, "b t h v"], x: Stream) -> Stream:
        """Concatenate the heads and project them to the stream."""
        return self.output(z.flatten(2))

    def cost(self, t: int) -> Cost:
        """Four projections, the coupling, and two products per pair."""
        shape, window = self.shape, min(t, self.config.window or t)
        projections = sum(m.weight.numel() for m in (self.query, self.key, self.value, self.output))
        cached = shape.keys * shape.key_width + shape.values * shape.value_width
        return Cost(
            parameters=sum(p.numel() for p in self.parameters()),
            linear_flops=t * (2 * projections + self._coupling_flops()),
            pair_flops=2 * self._products_per_pair(),
            pairs=t * window - window**2 / 2,
            state_bytes=window * cached * self.key.weight.element_size(),
        )

    def circuits(self) -> Circuits:
        """QK: queries, keys, their norms and the coupling. OV: values and output."""
        norms = ("query_norm", "key_norm") if self.config.qk_norm else ()
        qk = ("query.weight", "key.weight", *norms, *self._coupling_parameters())
        return Circuits(qk=qk, ov=("value.weight", "output.weight"))

    def pairs(self, x: Stream) -> tuple[Keys, Keys]:
        """Return each key and the mean of the queries that attend to it, as projected."""
        q, k = self._split_heads(self.query(x), self.shape.queries), self._split_heads(self.key(x), self.shape.keys)
        maps = self.shape.keys // self.shape.values  # maps per value head; their queries alternate
        return reduce(q, "b t (g r m) k -> b t (g m) k", "mean", g=self.shape.values, m=maps), k

    def couple(self, q: Queries, k: Keys, *, skip_first_drift: bool = False) -> tuple[Queries, Keys]:
        """Apply the coupling; override it if the queries of a group are not adjacent."""
        return (q, k) if self.coupling is None else self.coupling(q, k, skip_first_drift=skip_first_drift)

    def _products_per_pair(self) -> int:
        return self.shape.queries * self.shape.key_width + self.shape.outputs * self.shape.value_width

    def _split_heads(self, x: Float[Tensor, "b t c"], heads: int) -> Float[Tensor, "b t h k"]:
        return x.view(*x.shape[:2], heads, -1)

    def _queries_and_keys(self, x: Stream) -> tuple[Queries, Keys]:
        """Project and couple. In training, a first drift q + c k is folded into the projection, W_q + c W_k: the weight
        is smaller than the batch. For a single token it is not.
        """
        k = self._split_heads(self.key(x), self.shape.keys)
        if self.coupling is None:
            return self._split_heads(self.query(x), self.shape.queries), k
        can_fold = torch.is_grad_enabled() and self.shape.queries == self.shape.keys
        drift = self.coupling.foldable_drift() if can_fold else None
        if drift is None or not (is_plain_linear(self.query) and is_plain_linear(self.key)):
            return self.couple(self._split_heads(self.query(x), self.shape.queries), k)
        q = F.linear(x, torch.addcmul(self.query.weight, self.key.weight, drift))
        return self.couple(q.view(k.shape), k, skip_first_drift=True)

    def _attention_inputs(self, x: Stream, state: State | None, layout: Layout | None) -> AttentionInputs:
        """Project, couple, normalise, convert to row form, rotate, and append to the cache."""
        x = validate_input(x, layout)
        q, k = self._queries_and_keys(x)
        v = self._split_heads(self.value(x), self.shape.values)
        if self.config.qk_norm:
            q, k = rms_norm(q, self.query_norm), rms_norm(k, self.key_norm)
        if layout is not None:
            q, k, v = layout.to_rows(q), layout.to_rows(k), layout.to_rows(v)
        if state is not None and not isinstance(state, KVCache):
            raise wrong_state(self, state, KVCache)
        past = KVCache.start((k, v), self.config.window) if state is None else state
        if (base := self.config.rotary_base) is not None:
            heads, width = self.shape.queries, self.shape.key_width  # query heads are at least as many as key heads
            factors = rotary_factors(past.offset, q.shape[1], heads=heads, width=width, base=base, like=q)
            q, k = apply_rotary(q, factors), apply_rotary(k, factors)
        cache = past.extend((k, v), None if layout is None or layout.is_full else layout.lengths)
        return visible_keys(q, k, v, past, cache, self.config.window)


@dataclass(frozen=True, kw_only=True)
class StandardConfig(SoftmaxConfig):
    """Options of `StandardAttention`."""

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> StandardAttention:
        """Return the mechanism of one layer."""
        return StandardAttention(width, heads, layer, layers, config=self)


class StandardAttention(SoftmaxMechanism):
    """Causal softmax attention, with optional grouped queries, QK norm and sliding window: the baseline.

    >>> layer = StandardAttention(width=32, heads=4)
    >>> y, state = layer(torch.randn(2, 10, 32))
    >>> rest, state = layer(torch.randn(2, 1, 32), state)  # one more token
    >>> y.shape, state.length.tolist()
    (torch.Size([2, 10, 32]), [11, 11])
    """

    config_type: ClassVar[type[StandardConfig]] = StandardConfig

    def __init__(
        self, width: int, heads: int, layer: int = 0, layers: int = 1, *, config: StandardConfig | None = None
    ) -> None:
        config = self.config_type() if config is None else config
        keys = heads if config.key_heads is None else config.key_heads
        if heads < 1 or width % heads:
            raise UsageError(f"heads must divide the width, got {heads} heads for a width of {width}")
        if keys < 1 or heads % keys:
            raise UsageError(f"key_heads must divide the heads, got {keys} for {heads} heads")
        super().__init__(width, HeadShape(heads, keys, width // heads, keys, width // heads, heads), config)

    def attend(self, inputs: AttentionInputs) -> Float[Tensor, "n t h v"]:
        """Equations (1) and (2), in PyTorch's fused kernel."""
        return attention(inputs.q, inputs.k, inputs.v, causal=inputs.causal, mask=inputs.mask)

    def map(self, inputs: AttentionInputs) -> Float[Tensor, "n h t s"]:
        """Equation (1)."""
        return attention_map(inputs.q, inputs.k, causal=inputs.causal, mask=inputs.mask)
