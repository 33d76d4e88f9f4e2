r"""Softmax attention: the base class of the mechanisms that score query-key pairs, and `StandardAttention`.

        x ──► W_q ─► [conv] ─┬────────────┬─► [norm] ────────────► rotary ─► q ─┐
                             │ [coupling] │                                     ├─► attend ─► z ─► W_o ─► y
        x ──► W_k ─► [conv] ─┴────────────┴─► [norm] ─► [shift] ─► rotary ─► k ─┤
        x ──► W_v ─► [conv] ───────────────────────────────────────────────► v ─┘
                                              k and v are cached as they are attended to

    A_{ts} = softmax_s(q_t \cdot k_s / \sqrt{k}),  s <= t and within the window        (1)
             over all s with `causal=False`, and over all tokens of a `memory`
    z_t    = \sum_s A_{ts} v_s,    y_t = W_o z_t                                       (2)

With a `memory` (cross attention), keys and values are projections of its tokens. Each sequence of the batch sees its
own row of the memory. Rotary positions are not applied: those of two sequences have no common origin.

Controls: `conv` gives queries, keys and values the short convolutions of the delta-rule memories. `key_shift` takes the
coordinates of a key that rotate slowest, half of them, from the previous token: attending to a token then also depends
on the token before it. The first token of a sequence keeps its own key.

| symbol   | variable | shape                                                                       |
|----------|----------|-----------------------------------------------------------------------------|
| q        | `q`      | `[b t h k]`                                                                 |
| k, v     | `k`, `v` | `[b s g k]`, `[b s g v]`; g divides h, h / g query heads share a key head   |
| A        |          | `[b h t s]`                                                                 |
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from einops import reduce, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.mechanisms.base import (
    Circuits,
    Cost,
    Stream,
    apply_linear,
    conv_weight,
    is_plain_linear,
    projection,
    refuse_state,
    wrong_state,
)
from qkflow.mechanisms.coupling import CouplingConfig, QKMechanism
from qkflow.mechanisms.masking import (
    AttentionInputs,
    all_keys,
    map_by_token,
    restrict,
    shift_right,
    validate_input,
    visible_keys,
)
from qkflow.ops import few_rows
from qkflow.ops.attention import attention, attention_map, cpu, requested_backend
from qkflow.ops.csrc import build
from qkflow.ops.csrc.eager import has_hooks
from qkflow.ops.norm import rms_norm
from qkflow.ops.projection import project_heads
from qkflow.ops.rotary import Factors, apply_rotary, rotary_factors
from qkflow.ops.short_conv import MAX_TAPS, next_conv_state, short_conv
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
    qk_norm: bool | Literal["before", "after"] = False
    """Apply RMS norm to queries and keys, `before` or `after` the coupling; `True` is `after`."""
    window: int | None = None
    """Sliding window, the token itself included; `None` is unlimited."""
    conv: int = 1
    """Kernel size of short convolutions of queries, keys and values, each followed by SiLU; 1 disables them."""
    key_shift: bool = False
    """Take the half of each key with the lower rotary frequencies from the previous token."""
    coupling: CouplingConfig | None = None
    """Moves queries and keys before they are scored."""
    causal: bool = True
    """Whether a token sees only itself and earlier tokens; if not, it sees all of its sequence, and has no state."""
    head_width: int | None = None
    """Width of a head; `None` is the model's width over its heads."""
    bias: bool = False
    """Whether the projections have a bias."""
    dropout: float = 0.0
    """Dropout probability of the attention weights, in training mode; above 0, PyTorch's attention is used."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise UsageError(f"window must be at least 1, got {self.window}")
        if self.head_width is not None and self.head_width < 1:
            raise UsageError(f"head_width must be at least 1, got {self.head_width}")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        if not self.causal and (options := self._causal_options()):
            raise UsageError(f"causal=False cannot be combined with {options}")
        if not 1 <= self.conv <= MAX_TAPS:
            raise UsageError(f"conv must be from 1 (no convolution) to {MAX_TAPS}, got {self.conv}")
        if self.qk_norm == "before" and self.coupling is None:
            raise UsageError("qk_norm=before is before the coupling, but there is none: use qk_norm=True")
        if self.key_shift and self.rotary_base is None:
            raise UsageError("key_shift shifts the lower rotary frequencies, but rotary_base is None: set rotary_base")

    def _causal_options(self) -> str:
        """The options in use that are defined for causal attention only, as a clause; empty if there are none."""
        is_used = {"window": self.window is not None, "conv": self.conv != 1, "key_shift": self.key_shift}
        names = [name for name, used in is_used.items() if used]
        return f"{', '.join(names)}, which {'looks' if len(names) == 1 else 'look'} back in time" if names else ""

    def width_of_head(self, width: int, heads: int) -> int:
        """Return the width of a head in a model of this width."""
        if heads < 1 or width < 1 or (self.head_width is None and width % heads):
            raise UsageError(
                f"heads must divide the width, got {heads} heads for a width of {width}: change them or set head_width"
            )
        return self.head_width or width // heads


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

    has_decode_step: ClassVar[bool] = False
    """Whether the native decoding step computes this class; not inherited, since a subclass may override a part."""

    def __init__(self, width: int, shape: HeadShape, config: SoftmaxConfig) -> None:
        super().__init__()
        build.load()  # build the kernels before torch.compile traces this module
        if shape.key_width % 2 and config.rotary_base is not None:
            raise UsageError(
                f"rotary positions need an even head width, got {shape.key_width}: change width, heads or head_width"
            )
        if shape.key_width % 4 and config.key_shift:
            raise UsageError(
                f"key_shift shifts half of the {shape.key_width // 2} rotary pairs of a head, which must be an even"
                f" number: the head width must be a multiple of 4, got {shape.key_width}: change width, heads or"
                " head_width"
            )
        self.width, self.shape, self.config = width, shape, config
        self.query = self.query_map(width, shape.queries * shape.key_width)
        self.key = projection(width, shape.keys * shape.key_width, bias=config.bias)
        self.value = projection(width, shape.values * shape.value_width, bias=config.bias)
        self.output = projection(shape.outputs * shape.value_width, width, bias=config.bias)
        if config.qk_norm:
            self.query_norm = nn.Parameter(torch.ones(shape.key_width))
            self.key_norm = nn.Parameter(torch.ones(shape.key_width))
        channels = shape.queries * shape.key_width, self.key.out_features, self.value.out_features
        self.query_conv, self.key_conv, self.value_conv = (conv_weight(c, config.conv) for c in channels)
        self._conv_shapes = [(config.conv - 1, c) for c in channels] if config.conv > 1 else []
        """Tokens and channels of each tensor of the convolution state."""
        if config.key_shift:
            self._conv_shapes.append((1, self.key.out_features // 2))
        self.coupling = None
        if config.coupling is not None:
            self.coupling = config.coupling(shape.queries, shape.keys, shape.key_width)
        self._step_shapes = [*((c, width) for c in channels), (width, shape.outputs * shape.value_width)]
        self._can_step = (
            type(self).__dict__.get("has_decode_step", False)
            and config.causal
            and (config.conv == 1 and not config.qk_norm and not config.key_shift)
            and max(shape.key_width, shape.value_width) <= cpu.MAX_WIDTH
            and (shape.keys == shape.values or shape.queries == shape.keys)
            and (self.coupling is None or (shape.queries == shape.keys and self.coupling.has_native_step))
        )

    @abstractmethod
    def attend(self, inputs: AttentionInputs) -> Float[Tensor, "n t h v"]:
        """Return the weighted values of each query."""

    @abstractmethod
    def map(self, inputs: AttentionInputs) -> Float[Tensor, "n h t s"]:
        """Return the weights that `attend` uses."""

    def query_map(self, width: int, outputs: int) -> nn.Module:
        """Return the module that maps the stream to the queries of all heads."""
        return projection(width, outputs, bias=self.config.bias)

    @property
    def causal(self) -> bool:
        """Whether a token sees only itself and earlier tokens."""
        return self.config.causal

    @property
    def has_positions(self) -> bool:
        """Whether there are rotary positions, or causality."""
        return self.config.causal or self.config.rotary_base is not None

    def forward(
        self,
        x: Stream,
        state: State | None = None,
        layout: Layout | None = None,
        memory: Float[Tensor, "m u d"] | None = None,
        memory_layout: Layout | None = None,
    ) -> tuple[Stream, State]:
        """Return the output of each token, and the cache of keys and values.

        With a `memory`, tokens attend to it instead of each other: to all of the row of their sequence. If it has no
        tokens, the attention output before the output projection is zero.
        """
        if memory is not None:
            inputs = self._cross_inputs(x, state, layout, memory, memory_layout)
            return self._output(inputs.zero_blind(self.attend(inputs)), x, layout), inputs.cache
        if memory_layout is not None:
            raise UsageError("got a memory_layout without a memory: pass memory=, or layout= for the tokens of x")
        if self._can_step and layout is None and isinstance(state, KVCache) and x.shape[1] == 1:
            step = self._step(x, state)
            if step is not None:
                return step
        inputs = self._attention_inputs(x, state, layout)
        return self._output(self.attend(inputs), x, layout), inputs.cache.trim()

    def weights(
        self,
        x: Stream,
        state: State | None = None,
        layout: Layout | None = None,
        memory: Float[Tensor, "m u d"] | None = None,
        memory_layout: Layout | None = None,
    ) -> Float[Tensor, "b h t s"]:
        """Return the attention map, over the slots of the state (of each token's own sequence) and then `x`.

        With a `memory`, over the positions in the sequence of the memory that belongs to each token's own sequence.
        """
        if memory is not None:
            inputs = self._cross_inputs(x, state, layout, memory, memory_layout)
            scores = inputs.zero_blind_rows(self.map(inputs))
            return map_by_token(scores, scores.shape[-1], layout)
        if isinstance(state, KVCache):
            state = replace(state, window=None)  # keep every slot: each has a column
        inputs = self._attention_inputs(x, state, layout)
        scores = F.pad(self.map(inputs), (inputs.first_slot, 0))
        return map_by_token(scores, 0 if layout is None else scores.shape[-1] - layout.span, layout)

    def values(self, x: Stream) -> Float[Tensor, "b s h v"]:
        """Return the value that the queries of each head read."""
        v = self._split_heads(_convolve(self.value(x), self.value_conv), self.shape.values)
        return repeat(v, "b s g v -> b s (g r) v", r=self.shape.outputs // self.shape.values)

    def read(self, z: Float[Tensor, "b t h v"], x: Stream) -> Stream:
        """Concatenate the heads and project them to the stream."""
        return apply_linear(self.output, z.flatten(2))

    def cost(self, t: int) -> Cost:
        """Four projections, the coupling, and two products per pair."""
        shape, window = self.shape, min(t, self.config.window or t)
        maps = (self.query, self.key, self.value, self.output)
        projections = sum(m.weight.numel() for map in maps for m in map.modules() if isinstance(m, nn.Linear))
        cached = shape.keys * shape.key_width + shape.values * shape.value_width
        return Cost(
            parameters=sum(p.numel() for p in self.parameters()),
            linear_flops=t * (2 * projections + self._coupling_flops()),
            pair_flops=2 * self._products_per_pair(),
            pairs=t * window - window**2 / 2 if self.causal else float(t * t),
            state_bytes=(window * cached + sum(map(math.prod, self._conv_shapes))) * self.key.weight.element_size()
            if self.causal
            else 0,
        )

    def circuits(self) -> Circuits:
        """QK: queries, keys, their norms and convolutions, and the coupling. OV: values and output."""
        query = (f"query.{name}" for name, _ in self.query.named_parameters())
        norms = ("query_norm", "key_norm") if self.config.qk_norm else ()
        qk_convs, ov_convs = (("query_conv", "key_conv"), ("value_conv",)) if self.config.conv > 1 else ((), ())
        # without these, a bias of the keys adds the same to all scores of a query
        has_key_bias = self.config.bias and (self.config.rotary_base is not None or norms or self.coupling is not None)
        qk = (*query, "key.weight", *(("key.bias",) if has_key_bias else ()), *norms, *qk_convs)
        ov_biases = ("value.bias", "output.bias") if self.config.bias else ()
        return Circuits(
            qk=(*qk, *self._coupling_parameters()), ov=("value.weight", *ov_convs, "output.weight", *ov_biases)
        )

    def pairs(self, x: Stream) -> tuple[Keys, Keys]:
        """Return each key and the mean of the queries that attend to it, before the coupling."""
        q = self._split_heads(_convolve(self.query(x), self.query_conv), self.shape.queries)
        k = self._split_heads(_convolve(self.key(x), self.key_conv), self.shape.keys)
        q, k = self._norm(q, k) if self.config.qk_norm == "before" else (q, k)
        maps = self.shape.keys // self.shape.values  # maps per value head; their queries alternate
        return reduce(q, "b t (g r m) k -> b t (g m) k", "mean", g=self.shape.values, m=maps), k

    def _step(self, x: Stream, state: KVCache) -> tuple[Stream, State] | None:
        """Decode a token in one native call; None if that is not possible. The law of decoding compares it."""
        if self._dropout():
            return None
        modules: Any = self._modules  # attribute access through nn.Module is slow enough to matter here
        weights = [few_rows.plain_weight(modules[name]) for name in ("query", "key", "value", "output")]
        if state.lengths is not None or state.slots_used < 1 or not few_rows.supports(x, *weights, *state.buffers):
            return None
        if state.conv_state or len(state.buffers) != 2 or requested_backend() == "torch" or x.shape[2] != self.width:
            return None
        shape, slots = self.shape, (len(x), state.buffers[0].shape[1])
        buffers = (*slots, shape.keys, shape.key_width), (*slots, shape.values, shape.value_width)
        if not few_rows.have_shapes((*weights, *state.buffers), (*self._step_shapes, *buffers)):
            return None  # the general path reports it
        difference = self._difference()
        if difference is not None and (
            difference.norm.shape != (shape.value_width,) or not few_rows.are_plain(x.dtype, (difference.norm,))
        ):
            return None
        coupling: Any = modules.get("coupling")
        coupling = few_rows.NO_COUPLING if coupling is None else coupling.native_step(x)
        if coupling is None:
            return None
        window, width, rotation = self.config.window, self.shape.key_width, None
        if (base := self.config.rotary_base) is not None:
            rotation = rotary_factors(state.tokens_seen, 1, heads=self.shape.queries, width=width, base=base, like=x)
        cache = state.reserve()
        at = cache.slots_used - 1, 0 if window is None else max(0, cache.slots_used - window)
        heads = self.shape.queries, self.shape.keys
        y = cpu.layer_step(x, cast(Any, weights), cache.buffers, heads, at, rotation, coupling, difference)
        return y, cache if window is None else cache.trim()

    def _difference(self) -> cpu.MapDifference | None:
        """Return how the decoding step combines the maps of differential attention."""
        return None

    def couple(self, q: Queries, k: Keys, *, skip_first_drift: bool = False) -> tuple[Queries, Keys]:
        """Apply the coupling; override it if the queries of a group are not adjacent."""
        return (q, k) if self.coupling is None else self.coupling(q, k, skip_first_drift=skip_first_drift)

    def _output(self, z: Float[Tensor, "n span h v"], x: Stream, layout: Layout | None) -> Stream:
        if layout is None:
            return self.read(z, x)
        y = self.read(layout.to_batch(z), x)
        return layout.zero_padding(y) if self.config.bias else y

    def _dropout(self) -> float:
        return self.config.dropout if self.training else 0.0

    def _products_per_pair(self) -> int:
        return self.shape.queries * self.shape.key_width + self.shape.outputs * self.shape.value_width

    def _split_heads(self, x: Float[Tensor, "b t c"], heads: int) -> Float[Tensor, "b t h k"]:
        return x.unflatten(-1, (heads, -1))

    def _project(self, x: Stream, factors: Factors | None) -> tuple[Queries, Keys, Float[Tensor, "b t u v"]]:
        """Project, couple and normalise; with `factors`, rotate instead. In training, a first drift q + c k is folded
        into the projection, W_q + c W_k: the weight is smaller than the batch. For a single token it is not.
        """
        shape = self.shape
        if not torch.is_grad_enabled() or not self._is_linear():
            q, k = self._split_heads(self.query(x), shape.queries), self._split_heads(self.key(x), shape.keys)
            return *self._couple_and_norm(q, k), self._split_heads(self.value(x), shape.values)
        coupling, is_first = self.coupling, self.config.qk_norm != "before"
        can_fold = coupling is not None and is_first and shape.queries == shape.keys and not has_hooks(coupling)
        drift = coupling.foldable_drift() if coupling is not None and can_fold else None
        query, key = cast(Tensor, self.query.weight), self.key.weight
        query = query if drift is None else torch.addcmul(query, key, drift)
        widths = shape.key_width, shape.key_width, shape.value_width
        q, k, v = project_heads(x, (query, key, self.value.weight), widths, factors)
        return *self._couple_and_norm(q, k, skip_first_drift=drift is not None), v

    def _is_linear(self) -> bool:
        return all(map(is_plain_linear, (self.query, self.key, self.value)))

    def _can_rotate_first(self) -> bool:
        """Whether nothing comes between the projections and the rotation, in a training step."""
        config = self.config
        is_alone = self.coupling is None and not config.qk_norm and not config.key_shift and config.conv == 1
        return is_alone and config.rotary_base is not None and torch.is_grad_enabled() and self._is_linear()

    def _rotary_factors(self, offset: int | Int[Tensor, " b"], t: int, like: Tensor) -> Factors | None:
        heads, width = self.shape.queries, self.shape.key_width  # query heads are at least as many as key heads
        if (base := self.config.rotary_base) is None:
            return None
        return rotary_factors(offset, t, heads=heads, width=width, base=base, like=like)

    def _couple_and_norm(self, q: Queries, k: Keys, *, skip_first_drift: bool = False) -> tuple[Queries, Keys]:
        if self.config.qk_norm == "before":
            q, k = self._norm(q, k)
        if self.coupling is not None:
            q, k = self.couple(q, k, skip_first_drift=skip_first_drift)
        return self._norm(q, k) if self.config.qk_norm in (True, "after") else (q, k)

    def _norm(self, q: Queries, k: Float[Tensor, "m s g k"]) -> tuple[Queries, Float[Tensor, "m s g k"]]:
        return rms_norm(q, self.query_norm), rms_norm(k, self.key_norm)

    def _attention_inputs(self, x: Stream, state: State | None, layout: Layout | None) -> AttentionInputs:
        """Project, convolve, couple, normalise, convert to row form, shift, rotate, and append to the cache."""
        if not self.config.causal:
            refuse_state(self, state)
        x = validate_input(x, layout)
        lengths = None if layout is None or layout.is_full else layout.lengths
        state = self._check_state(state, x.shape[0] if layout is None else len(layout.lengths))
        conv_state: tuple[Tensor, ...] = ()
        rotated_by = None
        if self.config.conv > 1:
            q, k, v, conv_state = self._convolved(x, state, layout)
        else:
            is_plain = state is None and layout is None and not torch.is_autocast_enabled(x.device.type)
            if is_plain and self._can_rotate_first():
                rotated_by = self._rotary_factors(0, x.shape[1], x)
            q, k, v = self._project(x, rotated_by)
            if layout is not None:
                q, k, v = layout.to_rows(q), layout.to_rows(k), layout.to_rows(v)
        past = KVCache.start((k, v), self.config.window) if state is None else state
        if self.config.key_shift:
            k, last = _shift_half(k, past, lengths)
            conv_state = (*conv_state, last)
        if rotated_by is None and (factors := self._rotary_factors(past.offset, q.shape[1], q)) is not None:
            q, k = apply_rotary(q, factors), apply_rotary(k, factors)
        if not self.config.causal:
            return all_keys(q, k, v, lengths)
        cache = past.extend((k, v), lengths)
        cache = replace(cache, conv_state=conv_state) if conv_state else cache
        return visible_keys(q, k, v, past, cache, self.config.window)

    def _cross_inputs(
        self, x: Stream, state: State | None, layout: Layout | None, memory: Tensor, memory_layout: Layout | None
    ) -> AttentionInputs:
        """Project queries of `x`, and keys and values of the memory."""
        if self.coupling is not None:
            raise UsageError(
                f"{type(self).__name__} got a memory, but a coupling moves the query and the key of one token as a"
                " pair, and across two sequences there are no pairs: use standard or differential attention"
            )
        if options := self.config._causal_options():
            raise UsageError(f"a memory cannot be combined with {options}")
        refuse_state(self, state)
        x, memory = validate_input(x, layout), validate_input(memory, memory_layout)
        shape = self.shape
        q = self._split_heads(self.query(x), shape.queries)
        k, v = self._split_heads(self.key(memory), shape.keys), self._split_heads(self.value(memory), shape.values)
        if self.config.qk_norm:
            q, k = self._norm(q, k)
        q = q if layout is None else layout.to_rows(q)
        k, v = (k, v) if memory_layout is None else (memory_layout.to_rows(k), memory_layout.to_rows(v))
        if q.shape[0] != k.shape[0]:
            raise UsageError(f"the batch has {len(q)} sequences, the memory {len(k)}: expected one memory for each")
        return all_keys(q, k, v, None if memory_layout is None or memory_layout.is_full else memory_layout.lengths)

    def _convolved(
        self, x: Stream, state: KVCache | None, layout: Layout | None
    ) -> tuple[Float[Tensor, "n s h k"], Float[Tensor, "n s g k"], Float[Tensor, "n s u v"], tuple[Tensor, ...]]:
        """Project, convert to row form, convolve, couple and normalise; also return the next convolution state."""
        streams = self.query(x), self.key(x), self.value(x)
        if layout is not None:
            streams = tuple(layout.to_rows(stream) for stream in streams)
        lengths = None if layout is None or layout.is_full else layout.lengths
        tails = (None, None, None) if state is None or not state.conv_state else state.conv_state[:3]
        weights = self.query_conv, self.key_conv, self.value_conv
        heads = self.shape.queries, self.shape.keys, self.shape.values
        q, k, v = (
            self._split_heads(_convolve(stream, weight, tail), n)
            for stream, weight, tail, n in zip(streams, weights, tails, heads, strict=True)
        )
        q, k = self._couple_and_norm(q, k)
        pairs = zip(streams, tails, strict=True)
        return q, k, v, tuple(next_conv_state(stream, self.config.conv, tail, lengths) for stream, tail in pairs)

    def _check_state(self, state: State | None, rows: int) -> KVCache | None:
        if state is None:
            return None
        if not isinstance(state, KVCache):
            raise wrong_state(self, state, KVCache)
        expected, shapes = self._conv_shapes, [tuple(tail.shape[1:]) for tail in state.conv_state]
        if shapes != expected and (shapes or state.slots_used):  # nothing was convolved before the first token
            raise UsageError(
                f"{type(self).__name__} expected a convolution state of shapes {expected}, got {shapes}: a state of"
                " another mechanism"
            )
        if expected and state.buffers[0].shape[0] != rows:
            raise UsageError(f"the state holds {len(state.buffers[0])} rows, the input {rows}: select() the rows first")
        return state


def _convolve(x: Float[Tensor, "n t c"], weight: Tensor | None, tail: Tensor | None = None) -> Float[Tensor, "n t c"]:
    return x if weight is None else short_conv(x, weight, tail)


def _shift_half(k: Keys, past: KVCache, lengths: Tensor | None) -> tuple[Keys, Float[Tensor, "n 1 c"]]:
    """Move the lower-frequency half of each key one token later; also return this half of the last key.

    The first token of a sequence keeps its own.
    """
    fast, slow = k.chunk(2, -1)  # frequencies decrease with the coordinate
    own, last = slow[:, :1].flatten(2), past.conv_state[-1] if past.conv_state else None
    first = own if last is None else last
    if last is not None and past.lengths is not None:
        first = torch.where(past.lengths[:, None, None] > 0, last.to(own.dtype), own)
    return torch.cat([fast, shift_right(slow, first)], -1), next_conv_state(slow.flatten(2), 2, last, lengths)


@dataclass(frozen=True, kw_only=True)
class StandardConfig(SoftmaxConfig):
    """Options of `StandardAttention`."""

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> StandardAttention:
        """Return the mechanism of one layer."""
        return StandardAttention(width, heads, layer, layers, config=self)


class StandardAttention(SoftmaxMechanism):
    """Softmax attention, with optional grouped queries, QK norm and sliding window: the baseline.

    >>> layer = StandardAttention(width=32, heads=4)
    >>> y, state = layer(torch.randn(2, 10, 32))
    >>> rest, state = layer(torch.randn(2, 1, 32), state)  # one more token
    >>> y.shape, state.length.tolist()
    (torch.Size([2, 10, 32]), [11, 11])
    """

    config_type: ClassVar[type[StandardConfig]] = StandardConfig
    has_decode_step = True

    def __init__(
        self, width: int, heads: int, layer: int = 0, layers: int = 1, *, config: StandardConfig | None = None
    ) -> None:
        config = self.config_type() if config is None else config
        keys = heads if config.key_heads is None else config.key_heads
        head_width = config.width_of_head(width, heads)
        if keys < 1 or heads % keys:
            raise UsageError(f"key_heads must divide the heads, got {keys} for {heads} heads")
        super().__init__(width, HeadShape(heads, keys, head_width, keys, head_width, heads), config)

    def forward(
        self,
        x: Stream,
        state: State | None = None,
        layout: Layout | None = None,
        memory: Float[Tensor, "m u d"] | None = None,
        memory_layout: Layout | None = None,
        *,
        mask: Bool[Tensor, "_ _ t t"] | Float[Tensor, "_ _ t t"] | None = None,
    ) -> tuple[Stream, State]:
        """Return the output of each token, and the cache of keys and values.

        `mask`, [b h t t] or 1 in place of b and h, further restricts the pairs of tokens: it is true where a pair is
        allowed, or added to the scores. For a token without pairs, the attention output before the output projection
        is zero. It is for whole sequences, without a state or a memory.
        """
        if mask is None:
            return super().forward(x, state, layout, memory, memory_layout)
        if state is not None or memory is not None or memory_layout is not None:
            raise UsageError("got a mask with a state or a memory: a mask is for the pairs of tokens of x")
        inputs = restrict(self._attention_inputs(x, None, layout), mask, layout)
        return self._output(inputs.zero_blind(self.attend(inputs)), x, layout), inputs.cache.trim()

    def attend(self, inputs: AttentionInputs) -> Float[Tensor, "n t h v"]:
        """Equations (1) and (2), without the map in memory."""
        visible: Any = {"causal": inputs.causal, "window": inputs.window, "mask": inputs.mask}
        return attention(inputs.q, inputs.k, inputs.v, **visible, dropout=self._dropout())

    def map(self, inputs: AttentionInputs) -> Float[Tensor, "n h t s"]:
        """Equation (1)."""
        return attention_map(inputs.q, inputs.k, causal=inputs.causal, window=inputs.window, mask=inputs.mask)
