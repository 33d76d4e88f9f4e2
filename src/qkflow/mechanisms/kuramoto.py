r"""Kuramoto attention (Nunley, https://arxiv.org/abs/2606.11585): tokens are phases, or elements of a compact group,
that synchronise with the tokens they attend to.

    x ─► points g ─┬─► [gate] ─► rotary ─► q ───────┐
                   ├─► rotary ─► shift right ─► k ──┼─► attend ─► [rotate by the lag] ─► tangent at g ─► * step ─► y
                   └─► [shift right] ─► v ──────────┘

    s_{tu} = \tau \sum_j \gamma_{tj} <g_{tj}, g_{uj}>,   A_{tu} = softmax_u s_{tu},   u < t          (1)
    y_t    = \eta T_{g_t} \sum_u A_{tu} g_u                                                         (2)
    y_t    = \sum_m \eta a_m T_{g_t^m} e^{i \alpha_m} \sum_u A_{tu} g_{u+1}^m     with frustration   (3)

The input holds coordinates: angles on the torus, group elements otherwise. The output is their change, which a block
adds (`qkflow.models.blocks.PhaseBlock`). T is the projection to the tangent space.

| symbol        | variable                       | shape                            |
|---------------|--------------------------------|----------------------------------|
| g_{tj}        | `points`                       | `[b t h p]`, e elements per head |
| \gamma        | `gate`, `gate_map` or `query`  | `[h e]` or per token             |
| \tau, \eta    | exp(`temperature`), `step`     | `[h]`, `[h e]`                   |
| \alpha_m, a_m | `lag`, `amplitude`             | `[m h e]`, `[m-1 h e]`           |

(3) is from https://arxiv.org/abs/2606.18694. Our choices where the papers leave it open:
- "Previous phase states" means u < t: a token is most similar to itself, and is not moved by itself. Keys are shifted
  right by one token. The first slot holds a zero key with a zero value, visible while the window reaches it.
- Without causality (`causal=False`), a token attends to all others of its sequence, u != t, and there is no zero key.
  A token alone in its sequence does not move.
- With frustration, the value next to the key of u is that of u + 1, so the first token's value is next to the zero key,
  and a token's own value is next to the key before it.
- A model's heads are halved: quality is the same, and it is faster.
- Gates: one per coordinate (`static`), computed from the token (`content`), or with a phase (`complex`: a linear map of
  all points, whose moduli are gates and whose arguments shift the query).
- Initialisation: scores of random phases have standard deviation `sharpness`; the step is `step_size`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.mechanisms.base import (
    Circuits,
    Cost,
    Mechanism,
    ParamOptions,
    Stream,
    apply_linear,
    is_plain_linear,
    projection,
    refuse_state,
    wrong_state,
)
from qkflow.mechanisms.masking import (
    AttentionInputs,
    all_keys,
    map_by_token,
    shift_left,
    shift_right,
    validate_input,
    visible_keys,
)
from qkflow.ops import few_rows, kuramoto
from qkflow.ops.attention import attention, attention_map, requested_backend
from qkflow.ops.attention.cpu import MAX_WIDTH
from qkflow.ops.groups import TORUS, Group, check_axioms, find_group
from qkflow.ops.kuramoto.cpu import layer_step
from qkflow.ops.linear import linear
from qkflow.ops.rotary import apply_rotary, rotary_factors
from qkflow.ops.short_conv import next_conv_state
from qkflow.state import KVCache, ShiftedKVCache, State

_T = TypeVar("_T")
Points = Float[Tensor, "b t h p"]
"""The group elements of each head as points of their ambient space, concatenated."""

_SOFTPLUS_ONE = math.log(math.e - 1)
"""softplus maps it to 1."""
_RATE = 30.0
"""Learning-rate factor of gates, temperatures, steps and lags."""


@dataclass(frozen=True, kw_only=True)
class SynchronyConfig:
    """Options of attention on a group."""

    heads: int | None = None
    """Number of heads; `None` is half of the model's."""
    gate: Literal["complex", "content", "static", "off"] = "complex"
    """Weights of the coordinates in the score."""
    temperature: Literal["learned", "fixed"] = "learned"
    """Whether each head learns its temperature."""
    sharpness: float = 1.5
    """Initial standard deviation of the scores of random elements."""
    step: Literal["coordinate", "head", "fixed"] = "coordinate"
    """Whether the step size is learned per coordinate, per head, or not at all."""
    step_size: float = 0.5
    """Initial step size."""
    values: Literal["phases", "projected"] = "phases"
    """Values are the phases, or a projection of them (a control, which is not a Kuramoto coupling)."""
    frustrated: bool = False
    """Use equation (3): values are the successors of the attended tokens, rotated by a learned lag."""
    harmonics: int = 1
    """Harmonics of (3); torus only, and more than one need `frustrated=True`."""
    strict: bool = True
    """Whether a token attends to earlier tokens only, not to itself."""
    rotary_base: float | None = 10000.0
    """Base of the rotary frequencies; `None` disables rotary positions."""
    window: int | None = None
    """Sliding window; `None` is unlimited."""
    causal: bool = True
    """Whether a token attends to earlier tokens only; if not, to all others of its sequence, and there is no state."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.step_size):
            raise UsageError(f"step_size must be a finite number, got {self.step_size}")
        if self.heads is not None and self.heads < 1:
            raise UsageError(f"heads must be at least 1, got {self.heads}")
        if self.rotary_base is not None and not 0 < self.rotary_base < math.inf:
            raise UsageError(f"rotary_base must be a finite number above 0, or None, got {self.rotary_base}")
        if not 0 < self.sharpness < math.inf:
            raise UsageError(f"sharpness must be a finite number above 0, got {self.sharpness}")
        if self.window is not None and self.window < 1:
            raise UsageError(f"window must be at least 1, got {self.window}")
        if self.harmonics < 1 or (self.harmonics > 1 and not self.frustrated):
            raise UsageError(f"harmonics must be 1, or more with frustrated=True, got {self.harmonics}")
        if self.frustrated and not self.strict:
            raise UsageError("frustrated=True requires strict=True")
        if not self.causal and self.frustrated:
            raise UsageError(
                "causal=False cannot be combined with frustrated=True, which pairs a key with the value of the next"
                " token"
            )
        if not self.causal and self.window is not None:
            raise UsageError("causal=False cannot be combined with window, which looks back in time")

    def n_heads(self, model_heads: int) -> int:
        """Return the number of heads in a model with `model_heads` heads.

        >>> SynchronyConfig().n_heads(4), SynchronyConfig(heads=4).n_heads(4), SynchronyConfig().n_heads(1)
        (2, 4, 1)
        """
        return max(1, model_heads // 2) if self.heads is None else self.heads


class SynchronyMechanism(Mechanism):
    """Attention on a group."""

    has_decode_step: ClassVar[bool] = False
    """Whether the native decoding step computes this class; not inherited, since a subclass may override a part."""

    def __init__(self, width: int, heads: int, group: Group, config: SynchronyConfig) -> None:
        super().__init__()
        if heads < 1 or width < 1 or width % (heads * group.size):
            raise UsageError(
                f"the width must be a multiple of heads x {group.size} (numbers per element of {group.name}),"
                f" got {width} for {heads} heads: use a multiple of {heads * group.size}"
            )
        if config.heads not in (None, heads):
            raise UsageError(f"got heads={heads}, but the config has heads={config.heads}: set only one of them")
        if config.harmonics > 1 and group != TORUS:
            raise UsageError(f"harmonics are defined on the torus only, got {config.harmonics} on {group.name}")
        self.width, self.heads, self._group, self.config = width, heads, group, config
        self.elements = width // (heads * group.size)
        shape, points = (heads, self.elements), heads * self.elements * group.ambient
        self.query = projection(points, points) if config.gate == "complex" else None
        self.gate_map = projection(points, heads * self.elements) if config.gate == "content" else None
        has_gate = config.gate in ("static", "content")
        self.gate = nn.Parameter(torch.full(shape, _SOFTPLUS_ONE)) if has_gate else None
        self.value = projection(points, points) if config.values == "projected" else None
        with torch.device("cpu"), unset_fake_temporarily():  # a real number, also for a model without data
            identity = group.points(group.identity())
            spread = float(group.similarity(identity, identity)) * math.sqrt(self.elements / group.ambient)
        self.temperature: Tensor
        self.step: Tensor
        temperature = torch.full((heads,), math.log(config.sharpness / spread))
        step = torch.full({"coordinate": shape, "head": (heads, 1), "fixed": (1, 1)}[config.step], config.step_size)
        for name, value, kind in (("temperature", temperature, config.temperature), ("step", step, config.step)):
            if kind == "fixed":
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value))
        self.lag = nn.Parameter(torch.zeros(config.harmonics, *shape)) if config.frustrated else None
        self.amplitude = nn.Parameter(torch.zeros(config.harmonics - 1, *shape)) if config.harmonics > 1 else None
        self._can_step = (
            type(self).__dict__.get("has_decode_step", False)
            and (config.gate, config.values, config.step) == ("complex", "phases", "coordinate")
            and (config.causal and config.strict and config.harmonics == 1 and 2 * self.elements <= MAX_WIDTH)
        )

    @property
    def group(self) -> Group:
        """The group whose elements the stream holds."""
        return self._group

    @property
    def causal(self) -> bool:
        """Whether a token attends to earlier tokens only."""
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
        memory: Tensor | None = None,
        memory_layout: Layout | None = None,
    ) -> tuple[Stream, State]:
        """Return the change of each token's coordinates, and the cache of points."""
        if memory is not None or memory_layout is not None:
            raise UsageError(
                f"{type(self).__name__} got a memory, but its tokens synchronize with each other in one stream: for"
                " cross attention use standard or differential attention"
            )
        if self._can_step and layout is None and isinstance(state, ShiftedKVCache) and x.shape[1] == 1:
            step = self._step(x, state)
            if step is not None:
                return step
        call = self._project(x, state, layout)
        z = self._attend(call.inputs)
        z = z if layout is None else layout.to_batch(z)
        return self._update(z, call.points, call.x), ShiftedKVCache(call.inputs.cache.trim(), call.last)

    def weights(self, x: Stream, state: State | None = None, layout: Layout | None = None) -> Float[Tensor, "b h t s"]:
        """Return the attention map. Rows sum to one minus the weight of a zero key without value."""
        if isinstance(state, ShiftedKVCache):
            state = replace(state, cache=replace(state.cache, window=None))  # keep every slot: each has a column
        inputs = self._project(x, state, layout).inputs
        scores = attention_map(
            inputs.q, inputs.k, causal=inputs.causal, window=inputs.window, mask=inputs.mask, scale=1.0
        )
        scores = inputs.zero_blind_rows(F.pad(scores, (inputs.first_slot, 0)))
        if self.config.causal and self.config.strict and not self.config.frustrated:
            scores = shift_left(scores, inputs.cache)
        return map_by_token(scores, 0 if layout is None else scores.shape[-1] - layout.span, layout)

    def values(self, x: Stream) -> Float[Tensor, "b s h v"]:
        """Return the points of each token, or their projection; harmonics are concatenated."""
        return self._values(self.points(x))

    def read(self, z: Float[Tensor, "b t h v"], x: Stream) -> Stream:
        """Return the update towards the weighted values `z`."""
        return self._update(z, self.points(x), x)

    def cost(self, t: int) -> Cost:
        """Linear maps of the points, and a product per pair for the score and one for each harmonic."""
        window, points = min(t, self.config.window or t), self.elements * self.group.ambient
        maps = [linear.weight.numel() for linear in (self.query, self.gate_map, self.value) if linear is not None]
        cached = self.heads * points * (1 + self.config.harmonics)
        shifted = self.heads * points * len(self._shifted((0, 0)))
        is_causal, strict = self.config.causal, self.config.strict
        return Cost(
            parameters=sum(p.numel() for p in self.parameters()),
            linear_flops=2 * t * sum(maps),
            pair_flops=2 * self.heads * points * (1 + self.config.harmonics),
            pairs=t * window - window**2 / 2 if is_causal else float(t * (t - strict)),
            state_bytes=(window * cached + shifted) * self.temperature.element_size() if is_causal else 0,
        )

    def circuits(self) -> Circuits:
        """QK: gates and temperatures. OV: steps, lags and harmonics."""
        names = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        qk = ("query.weight", "gate_map.weight", "gate", "temperature")
        return Circuits(
            qk=tuple(name for name in names if name in qk), ov=tuple(name for name in names if name not in qk)
        )

    def param_options(self) -> dict[str, ParamOptions]:
        """Gates, temperatures, steps and lags learn faster than matrices (our choice)."""
        names = [name for name, p in self.named_parameters() if "." not in name and p.requires_grad]
        return dict.fromkeys(names, ParamOptions(rate=_RATE, decay=False))

    def points(self, x: Stream) -> Points:
        """Return the group elements of the stream as points."""
        elements = x.unflatten(-1, (self.heads, self.elements, self.group.size))
        return self.group.points(elements).flatten(-2)

    def _project(self, x: Stream, state: State | None, layout: Layout | None) -> _Call:
        x = validate_input(x, layout)
        points = self.points(x)
        q, k, v = self._queries(points), points, self._values(points)
        if layout is not None:
            q, k, v = layout.to_rows(q), layout.to_rows(k), layout.to_rows(v)
        lengths = None if layout is None or layout.is_full else layout.lengths
        if not self.config.causal:
            refuse_state(self, state)
            q, k = self._rotate(q, 0), self._rotate(k, 0)
            return _Call(x, points, all_keys(q, k, v, lengths, skip_own=self.config.strict), ())
        past = self._check_state(state, k, v)
        q = self._rotate(q, past.cache.offset)
        k, v, last = self._shift(x if layout is None else layout.to_rows(x), k, v, past, lengths)
        cache = past.cache.extend((k, v), lengths)
        return _Call(x, points, visible_keys(q, k, v, past.cache, cache, self.config.window), last)

    def _step(self, x: Stream, state: ShiftedKVCache) -> tuple[Stream, State] | None:
        """Decode a token in one native call; None if that is not possible. The law of decoding compares it."""
        query, past, window = few_rows.plain_weight(self.query), state.cache, self.config.window
        step, temperature, lag = self.step, self.temperature, self.lag
        tensors = (query, step, temperature, *(() if lag is None else (lag,)), *past.buffers, *state.last)
        if (
            past.lengths is not None
            or len(past.buffers) != 2
            or past.slots_used < 1
            or not few_rows.supports(x, *tensors)
        ):
            return None
        size, h = 2 * self.heads * self.elements, (self.heads, self.elements)
        shapes = ((size, size), h, (self.heads,), (1, *h))
        if requested_backend() == "torch" or not few_rows.have_shapes((query, step, temperature, lag), shapes):
            return None
        shape = (len(x), past.buffers[0].shape[1], self.heads, 2 * self.elements)
        if len(state.last) != len(self._shifted((0, 0))) or not few_rows.have_shapes(
            (x, *past.buffers, *state.last),
            ((len(x), 1, self.width), shape, shape, *[(len(x), 1, size)] * len(state.last)),
        ):
            return None  # the general path reports it
        rotation = None
        if (base := self.config.rotary_base) is not None:
            rotation = rotary_factors(past.tokens_seen, 1, heads=self.heads, width=shape[3], base=base, like=x)
        cache = past.reserve()
        slots = cache.slots_used - 1, 0 if window is None else max(0, cache.slots_used - window)
        result = layer_step(x, cast(Tensor, query), temperature, step, lag, rotation, state.last, cache.buffers, slots)
        return None if result is None else (result[0], ShiftedKVCache(cache.trim(), result[1]))

    def _queries(self, points: Points) -> Points:
        """The points, gated and multiplied by the inverse temperature."""
        tau = self.temperature.exp()
        if self.query is not None and points.shape[1] > 1 and is_plain_linear(self.query):
            weight = self.query.weight.unflatten(0, (self.heads, -1)) * tau[:, None, None]  # smaller than the batch
            return linear(points.flatten(2), weight.flatten(0, 1)).view(points.shape)
        if self.query is not None:
            return self.query(points.flatten(2)).view(points.shape) * tau[:, None]
        gates = tau[:, None]
        if self.gate_map is not None and self.gate is not None:
            content = self.gate_map(points.flatten(2)).view(*points.shape[:2], *self.gate.shape)
            gates = gates * F.softplus(content + self.gate)
        elif self.gate is not None:
            gates = gates * F.softplus(self.gate)
        return (self._elements(points) * gates.unsqueeze(-1)).flatten(-2)

    def _values(self, points: Points) -> Float[Tensor, "b t h v"]:
        v = points if self.value is None else apply_linear(self.value, points.flatten(2)).view(points.shape)
        if self.config.harmonics == 1:
            return v
        return torch.cat([p.flatten(-2) for p in kuramoto.harmonics(self._elements(v), self.config.harmonics)], -1)

    def _rotate(self, points: Points, offset: int | Tensor) -> Points:
        """Rotate every element by its position, so that scores depend on relative positions."""
        base, t = self.config.rotary_base, points.shape[1]
        if base is None:
            return points
        if self.group == TORUS:
            return apply_rotary(points, self._rotary_factors(points, offset))
        wide = torch.promote_types(points.dtype, torch.float32)
        position = torch.arange(t, device=points.device) + (offset if isinstance(offset, int) else offset[:, None])
        frequency = base ** -(torch.arange(self.elements, device=points.device, dtype=wide) / self.elements)
        rotation = self.group.turn(position[..., None].to(wide) * frequency).to(points.dtype).unsqueeze(-3)
        return self.group.multiply(*torch.broadcast_tensors(rotation, self._elements(points))).flatten(-2)

    def _rotary_factors(self, points: Points, offset: int | Tensor) -> Tensor:
        base = cast(float, self.config.rotary_base)
        return rotary_factors(
            offset, points.shape[1], heads=self.heads, width=2 * self.elements, base=base, like=points
        )

    def _shift(
        self, x: Stream, k: Points, v: Float[Tensor, "b t h v"], past: ShiftedKVCache, lengths: Tensor | None
    ) -> tuple[Points, Float[Tensor, "b t h v"], tuple[Tensor, ...]]:
        """Rotate and shift the keys, shift the values; also return what fills the first slot of the next call."""
        offset = past.cache.offset
        if self.group == TORUS and v is k and lengths is None and past.last:  # one fused kernel
            rotations = None if self.config.rotary_base is None else self._rotary_factors(k, offset)
            if rotations is not None and rotations.is_complex():
                rotations = torch.view_as_real(rotations)
            points, firsts = self._elements(k), tuple(w.view_as(k[:, :1]).to(k.dtype) for w in past.last)
            theta = x.reshape(points.shape[:-1])
            delayed = kuramoto.shift_points(theta, points, rotations, tuple(map(self._elements, firsts)))
            key, *late = (x.flatten(-2) for x in delayed)
            end, rotations = points[:, -1:], None if rotations is None else rotations[..., -1:, :, :, :]
            last = (end if rotations is None else kuramoto.rotate_points(end, rotations.expand_as(end)), end)
            return key, late[0] if late else v, tuple(x.flatten(2).clone() for x in last[: len(delayed)])
        k = self._rotate(k, offset)
        shifted = self._shifted((k, v))
        last = tuple(next_conv_state(x.flatten(2), 2, w, lengths) for x, w in zip(shifted, past.last, strict=True))
        slots = [shift_right(x, w) for x, w in zip(shifted, past.last, strict=True)]
        k, v = (*slots, *(k, v)[len(slots) :])
        return k, v, last

    def _shifted(self, kv: tuple[_T, _T]) -> tuple[_T, ...]:
        """Which of keys and values are shifted right."""
        return () if not self.config.strict else kv[:1] if self.config.frustrated else kv

    def _check_state(self, state: State | None, k: Tensor, v: Tensor) -> ShiftedKVCache:
        if state is None:
            zeros = tuple(x.new_zeros(x.shape[0], 1, x.shape[2:].numel()) for x in self._shifted((k, v)))
            return ShiftedKVCache(KVCache.start((k, v), self.config.window), zeros)
        if not isinstance(state, ShiftedKVCache):
            raise wrong_state(self, state, ShiftedKVCache)
        rows = state.cache.buffers[0].shape[0]
        if rows != k.shape[0]:
            raise UsageError(f"the state holds {rows} rows, the input {len(k)}: select() the rows first")
        shapes, expected = [[*x.shape[2:]] for x in state.cache.buffers], [[*x.shape[2:]] for x in (k, v)]
        if shapes != expected or len(state.last) != len(self._shifted((k, v))):
            raise UsageError(
                f"{type(self).__name__} expected keys and values of shape {expected}, got {shapes}:"
                " a state of another mechanism"
            )
        for w, x in zip(state.last, (k, v), strict=False):
            if w.shape != (rows, 1, x.shape[2:].numel()) or not w.is_floating_point():
                raise UsageError(
                    f"{type(self).__name__} expected the last token of each row as points of shape"
                    f" {[rows, 1, x.shape[2:].numel()]}, got {w.dtype} {list(w.shape)}: a state of another mechanism"
                )
        return state

    def _attend(self, inputs: AttentionInputs) -> Points:
        """Return the mean of the attended values."""
        z = attention(
            inputs.q, inputs.k, inputs.v, causal=inputs.causal, window=inputs.window, mask=inputs.mask, scale=1.0
        )
        return inputs.zero_blind(z)

    def _update(self, z: Float[Tensor, "b t h v"], points: Points, x: Stream) -> Stream:
        """Equations (2) and (3), given the means `z`."""
        harmonics = self.config.harmonics
        powers = [self._elements(points)]
        if harmonics == 1 and self.group == TORUS:  # one fused kernel
            step = self.step.expand(self.heads, self.elements)
            steps = (step, None) if self.lag is None else (step * self.lag[0].cos(), step * self.lag[0].sin())
            return kuramoto.phase_increment(
                x.reshape(powers[0].shape[:-1]), powers[0], self._elements(z), *steps
            ).flatten(2)
        if harmonics > 1:
            powers = kuramoto.harmonics(powers[0], harmonics)
        terms = []
        for m, (power, mean) in enumerate(zip(powers, map(self._elements, _split(z, harmonics)), strict=True)):
            step = self.step if self.amplitude is None or m == 0 else self.step * self.amplitude[m - 1]  # a_1 = 1
            if self.lag is not None:
                mean = self.group.multiply(self.group.turn(self.lag[m]).to(mean.dtype).expand_as(mean), mean)
            terms.append(self.group.tangent(power, mean) * step.unsqueeze(-1))
        return sum(terms[1:], terms[0]).flatten(2)

    def _elements(self, points: Points) -> Float[Tensor, "b t h e a"]:
        return points.unflatten(-1, (self.elements, self.group.ambient))


class _Call(NamedTuple):
    """Everything about one forward call; `x` and `points` in batch form, the rest in row form."""

    x: Stream
    points: Points
    inputs: AttentionInputs
    last: tuple[Tensor, ...]


def _split(x: Tensor, harmonics: int) -> tuple[Tensor, ...]:
    return (x,) if harmonics == 1 else x.chunk(harmonics, -1)  # the backward pass of chunk copies


@dataclass(frozen=True, kw_only=True)
class KuramotoConfig(SynchronyConfig):
    """Options of `KuramotoAttention`."""

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> KuramotoAttention:
        """Return the mechanism of one layer."""
        return KuramotoAttention(width, self.n_heads(heads), layer, layers, config=self)


class KuramotoAttention(SynchronyMechanism):
    """Attention on the torus: every number of the stream is an angle.

    >>> layer = KuramotoAttention(width=32, heads=4)
    >>> theta = torch.randn(2, 10, 32)
    >>> change, state = layer(theta)
    >>> rotated, _ = layer(theta + 2 * torch.pi)  # a full turn changes nothing
    >>> torch.allclose(change, rotated, atol=1e-4), state.length.tolist()
    (True, [10, 10])
    """

    has_decode_step = True

    def __init__(
        self, width: int, heads: int, layer: int = 0, layers: int = 1, *, config: KuramotoConfig = KuramotoConfig()
    ) -> None:
        super().__init__(width, heads, TORUS, config)


@dataclass(frozen=True, kw_only=True)
class GroupConfig(SynchronyConfig):
    """Options of `GroupAttention`."""

    group: str = "su2"
    """`torus`, `su2` (4 numbers per element), `so3` (9), `so4` (16), ..."""

    def __post_init__(self) -> None:
        super().__post_init__()
        find_group(self.group)  # raises for an unknown name

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> GroupAttention:
        """Return the mechanism of one layer."""
        return GroupAttention(width, self.n_heads(heads), layer, layers, config=self)


class GroupAttention(SynchronyMechanism):
    """Attention on a compact group, named in the config or passed as `on`.

    >>> layer = GroupAttention(width=32, heads=4)
    >>> change, state = layer(torch.randn(2, 10, 32))
    >>> change.shape
    torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        layer: int = 0,
        layers: int = 1,
        *,
        config: GroupConfig = GroupConfig(),
        on: Group | None = None,
    ) -> None:
        if on is not None:
            check_axioms(on)
            if config.group != GroupConfig.group:
                raise UsageError(f"got a group twice, {config.group!r} in the config and {on.name!r}: pass one of them")
        super().__init__(width, heads, find_group(config.group) if on is None else on, config)
