r"""What attention on a group shares, the torus included: tokens are elements, and are drawn to those they attend to.

    x ─► points g ─┬─► [gate] ─► drift ─► q ──────────┐
                   ├─► drift ─► one step late ─► k ───┼─► attend ─► [turn by the lag] ─► tangent at g ─► * step ─► y
                   └─► [one step late] ─► v ──────────┘

    s_{tu} = \tau \sum_j \gamma_{tj} <g_{tj}, g_{uj}>,  j over a head,        y_t = \eta T_{g_t} \sum_u A_{tu} g_u

The first paper (https://arxiv.org/abs/2606.11585) has the score, the drift, raw values and the tangent update; its
successor (https://arxiv.org/abs/2606.18694) the delay, the lag and the harmonics. Ours, since they do not say:
- "Previous phase states" are u < t, strictly: a token is most like itself, and by itself is not moved at all. Keys are
  seen one step late, and before the first token there is nothing: a key of zeros whose value is zero, seen by all whose
  window reaches back to it.
- With frustration the value beside the key of u is that of its successor u + 1. The first token succeeds nothing, so it
  stands beside the key of zeros; the token itself succeeds the one before, and draws itself by its lag alone.
- Heads have elements of their own, in the score as in the update; a model's are halved, which is as good, and faster.
- Gates: one a coordinate (`static`), read off the token (`content`), or with a phase of their own (`complex`: a linear
  map of all points, whose lengths are gates and whose angles are shifts of the query).
- The start: scores of random phases spread by `sharpness`, and a step of `step_size`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.mechanisms.base import Circuits, Cost, Diagnostic, Mechanism, ParamOptions, Stream, bare, projection
from qkflow.mechanisms.masking import Rows, map_by_token, one_early, shift_right, validate_input, visible_keys
from qkflow.mechanisms.observed_phases import phase_exhibits
from qkflow.mechanisms.synchrony_config import SynchronyConfig
from qkflow.ops import kuramoto
from qkflow.ops.attention import attention, attention_map
from qkflow.ops.groups import TORUS, Group
from qkflow.ops.rotary import apply_rotary, rotary_factors
from qkflow.ops.short_conv import next_conv_state
from qkflow.state import KVCache, ShiftedKVCache, State

_T = TypeVar("_T")
Points = Float[Tensor, "b t h p"]
"""The elements of each head, as points in space, one behind the other."""


class SynchronyMechanism(Mechanism):
    """Attention on a group. Subclasses say on which."""

    def __init__(self, width: int, heads: int, group: Group, config: SynchronyConfig) -> None:
        super().__init__()
        if heads < 1 or width < 1 or width % (heads * group.size):
            raise UsageError(
                f"a width must be whole elements of {group.name} ({group.size} numbers each) for every head,"
                f" got {width} for {heads} heads: make it a multiple of {heads * group.size}"
            )
        if config.heads not in (None, heads):
            raise UsageError(f"the config says {config.heads} heads, and {heads} were asked for: leave one of them out")
        if config.harmonics > 1 and group != TORUS:
            raise UsageError(f"harmonics are those of the torus, got {config.harmonics} on {group.name}")
        self.width, self.heads, self._group, self.config = width, heads, group, config
        self.elements = width // (heads * group.size)
        shape, points = (heads, self.elements), heads * self.elements * group.ambient
        self.query = projection(points, points) if config.gate == "complex" else None
        self.gate_map = projection(points, heads * self.elements) if config.gate == "content" else None
        self.gate = nn.Parameter(torch.full(shape, _ONE)) if config.gate in ("static", "content") else None
        self.value = projection(points, points) if config.values == "projected" else None
        with torch.device("cpu"):  # a number, also where a model is only counted
            origin = group.points(group.identity())
        spread = float(group.similarity(origin, origin)) * math.sqrt(self.elements / group.ambient)
        self.temperature: Tensor
        self.step: Tensor
        self._hold("temperature", torch.full((heads,), math.log(config.sharpness / spread)), config.temperature)
        steps = {"coordinate": shape, "head": (heads, 1), "fixed": (1, 1)}[config.step]
        self._hold("step", torch.full(steps, config.step_size), config.step)
        self.lag = nn.Parameter(torch.zeros(config.harmonics, *shape)) if config.frustrated else None
        self.amplitude = nn.Parameter(torch.zeros(config.harmonics - 1, *shape)) if config.harmonics > 1 else None

    @property
    def group(self) -> Group:
        """The group whose elements the stream holds."""
        return self._group

    def _hold(self, name: str, value: Tensor, how: str) -> None:
        if how == "fixed":
            self.register_buffer(name, value)
        else:
            setattr(self, name, nn.Parameter(value))

    def forward(self, x: Stream, state: State | None = None, layout: Layout | None = None) -> tuple[Stream, State]:
        """How each token's coordinates change, and the phases seen so far."""
        call = self._call(x, state, layout)
        z = self._attend(call.rows)
        z = z if layout is None else layout.batch(z)
        return self._drawn(z, call.points, call.x), ShiftedKVCache(call.rows.cache.trim(), call.last)

    def weights(self, x: Stream, state: State | None = None, layout: Layout | None = None) -> Float[Tensor, "b h t s"]:
        """The exact map. Rows sum to one, less what a token leaves to a key of zeros that has no value."""
        if isinstance(state, ShiftedKVCache):
            state = replace(state, cache=replace(state.cache, window=None))  # a column for every slot
        rows = self._call(x, state, layout).rows
        scores = attention_map(rows.q, rows.k, causal=rows.causal, mask=rows.mask, scale=1.0)
        scores = F.pad(scores, (rows.first, 0))
        if self.config.strict and not self.config.frustrated:
            scores = one_early(scores, rows.cache)
        return map_by_token(scores, rows, layout)

    def values(self, x: Stream) -> Float[Tensor, "b s h v"]:
        """The points of each token, or their projection; harmonic by harmonic."""
        return self._passed_on(self.points(x))

    def read(self, z: Float[Tensor, "b t h v"], x: Stream) -> Stream:
        """What draws each token along the group, times its step."""
        return self._drawn(z, self.points(x), x)

    def cost(self, t: int) -> Cost:
        """Maps of points, and for each harmonic of every pair a product for the score and one for the value."""
        window, points = min(t, self.config.window or t), self.elements * self.group.ambient
        maps = [part.weight.numel() for part in (self.query, self.gate_map, self.value) if part is not None]
        cached = self.heads * points * (1 + self.config.harmonics)
        waiting = self.heads * points * len(self._late((0, 0)))
        return Cost(
            parameters=sum(p.numel() for p in self.parameters()),
            linear_flops=2 * t * sum(maps),
            pair_flops=4 * self.heads * points * self.config.harmonics,
            pairs=t * window - window**2 / 2,
            state_bytes=(window * cached + waiting) * self.temperature.element_size(),
        )

    def circuits(self) -> Circuits:
        """Gates and temperatures decide where to look; steps, lags and harmonics what follows from it."""
        names = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        qk = ("query.weight", "gate_map.weight", "gate", "temperature")
        return Circuits(
            qk=tuple(name for name in names if name in qk), ov=tuple(name for name in names if name not in qk)
        )

    def paces(self) -> dict[str, ParamOptions]:
        """Gates, temperatures, steps and lags are few, and far from where they will be: ours."""
        own = [name for name, part in self.named_parameters() if "." not in name and part.requires_grad]
        return dict.fromkeys(own, ParamOptions(rate=_FAST, decay=False))

    def exhibits(self, x: Stream) -> tuple[Diagnostic, ...]:
        """How far the tokens are in step, in all and two by two, their energy, and on the torus their phases."""
        return phase_exhibits(self, x)

    def points(self, x: Stream) -> Points:
        """The elements that the stream holds."""
        elements = x.unflatten(-1, (self.heads, self.elements, self.group.size))
        return self.group.points(elements).flatten(-2)

    def _call(self, x: Stream, state: State | None, layout: Layout | None) -> _Call:
        x = validate_input(x, layout)
        points = self.points(x)
        q, k, v = self._asked(points), points, self._passed_on(points)
        if layout is not None:
            q, k, v = layout.rows(q), layout.rows(k), layout.rows(v)
        past = self._past(state, k, v)
        q = self._drift(q, past.cache.offset)
        lengths = None if layout is None or layout.even else layout.lengths
        k, v, last = self._slots(x if layout is None else layout.rows(x), k, v, past, lengths)
        cache = past.cache.extend((k, v), lengths)
        return _Call(x, points, visible_keys(q, k, v, past.cache, cache, self.config.window), last)

    def _slots(
        self, x: Stream, k: Points, v: Float[Tensor, "b t h v"], past: ShiftedKVCache, lengths: Tensor | None
    ) -> tuple[Points, Float[Tensor, "b t h v"], tuple[Tensor, ...]]:
        """Keys turned and one step late, their values, and what will stand in the next slot."""
        offset = past.cache.offset
        if self.group == TORUS and v is k and lengths is None and past.last:  # all of it in one pass
            by = self._turns(k, offset)
            points, firsts = self._apart(k), tuple(w.view_as(k[:, :1]).to(k.dtype) for w in past.last)
            theta = x.reshape(points.shape[:-1])
            made = kuramoto.shift_points(theta, points, by, tuple(map(self._apart, firsts)))
            key, *late = (x.flatten(-2) for x in made)
            end, by = points[:, -1:], None if by is None else by[..., -1:, :, :, :]
            waiting = (end if by is None else kuramoto.rotate_points(end, by.expand_as(end)), end)
            return key, late[0] if late else v, tuple(x.flatten(2).clone() for x in waiting[: len(made)])
        k = self._drift(k, offset)
        late = self._late((k, v))
        last = tuple(next_conv_state(x.flatten(2), 2, w, lengths) for x, w in zip(late, past.last, strict=True))
        slots = [shift_right(x, w) for x, w in zip(late, past.last, strict=True)]
        k, v = (*slots, *(k, v)[len(slots) :])
        return k, v, last

    def _past(self, state: State | None, k: Tensor, v: Tensor) -> ShiftedKVCache:
        name = type(self).__name__
        if state is None:
            nothing = tuple(x.new_zeros(len(x), 1, x[0, 0].numel()) for x in self._late((k, v)))
            return ShiftedKVCache(KVCache.start((k, v), self.config.window), nothing)
        if not isinstance(state, ShiftedKVCache):
            raise UsageError(f"{name} continues a ShiftedKVCache, got {type(state).__name__}: of another mechanism")
        if len(state.cache.buffers[0]) != len(k):
            raise UsageError(
                f"the state holds {len(state.cache.buffers[0])} rows, the input {len(k)}: select() the rows first"
            )
        held, own = [[*x.shape[2:]] for x in state.cache.buffers], [[*x.shape[2:]] for x in (k, v)]
        if held != own or len(state.last) != len(self._late((k, v))):
            raise UsageError(f"{name} continues keys and values of {own}, got {held}: a state of another mechanism")
        return state

    def _late(self, pair: tuple[_T, _T]) -> tuple[_T, ...]:
        """Which of keys and values are seen one step late."""
        return () if not self.config.strict else pair[:1] if self.config.frustrated else pair

    def _asked(self, points: Points) -> Points:
        """Queries: the points, gated, and as sharp as each head wants to look."""
        sharp = self.temperature.exp()
        if self.query is not None and not (points.shape[1] > 1 and bare(self.query)):  # a matrix is less than a batch
            return self.query(points.flatten(2)).view(points.shape) * sharp[:, None]
        if self.query is not None:
            own = self.query.weight.unflatten(0, (self.heads, -1)) * sharp[:, None, None]
            return F.linear(points.flatten(2), own.flatten(0, 1)).view(points.shape)
        gates = sharp[:, None]
        if self.gate_map is not None and self.gate is not None:
            seen = self.gate_map(points.flatten(2)).view(*points.shape[:2], *self.gate.shape)
            gates = gates * F.softplus(seen + self.gate)
        elif self.gate is not None:
            gates = gates * F.softplus(self.gate)
        return (self._apart(points) * gates.unsqueeze(-1)).flatten(-2)

    def _passed_on(self, points: Points) -> Float[Tensor, "b t h v"]:
        v = points if self.value is None else self.value(points.flatten(2)).view(points.shape)
        if self.config.harmonics == 1:
            return v
        return torch.cat([p.flatten(-2) for p in kuramoto.harmonics(self._apart(v), self.config.harmonics)], -1)

    def _drift(self, points: Points, offset: int | Tensor) -> Points:
        """Every element turned by its position: what scores see of it is the distance."""
        base, t = self.config.rotary_base, points.shape[1]
        if base is None:
            return points
        if self.group == TORUS:
            return apply_rotary(
                points, rotary_factors(offset, t, heads=self.heads, width=2 * self.elements, base=base, like=points)
            )
        wide = torch.promote_types(points.dtype, torch.float32)
        position = torch.arange(t, device=points.device) + (offset if isinstance(offset, int) else offset[:, None])
        speed = base ** -(torch.arange(self.elements, device=points.device, dtype=wide) / self.elements)
        by = self.group.turn(position[..., None].to(wide) * speed).to(points.dtype).unsqueeze(-3)  # [.. t 1 e a]
        return self.group.multiply(*torch.broadcast_tensors(by, self._apart(points))).flatten(-2)

    def _turns(self, points: Points, offset: int | Tensor) -> Float[Tensor, "*b t h e 2"] | None:
        """The torus's drift, as points."""
        if (base := self.config.rotary_base) is None:
            return None
        by = rotary_factors(offset, points.shape[1], heads=self.heads, width=2 * self.elements, base=base, like=points)
        return torch.view_as_real(by) if by.is_complex() else by

    def _attend(self, rows: Rows) -> Points:
        """What each token gathers: the harmonics by themselves, as fused attention wants values as wide as keys."""
        each = [
            attention(rows.q, rows.k, v, causal=rows.causal, mask=rows.mask, scale=1.0)
            for v in _pieces(rows.v, self.config.harmonics)
        ]
        return each[0] if len(each) == 1 else torch.cat(each, -1)

    def _drawn(self, z: Float[Tensor, "b t h v"], points: Points, x: Stream) -> Stream:
        harmonics = self.config.harmonics
        here = [self._apart(points)]
        if harmonics == 1 and self.group == TORUS:  # the same in one pass
            step = self.step.expand(self.heads, self.elements)
            weighed = (step, None) if self.lag is None else (step * self.lag[0].cos(), step * self.lag[0].sin())
            return kuramoto.phase_increment(x.reshape(here[0].shape[:-1]), here[0], self._apart(z), *weighed).flatten(2)
        if harmonics > 1:
            here = kuramoto.harmonics(here[0], harmonics)
        means = map(self._apart, _pieces(z, harmonics))
        pulls = [self._pull(m, at, mean) for m, (at, mean) in enumerate(zip(here, means, strict=True))]
        return sum(pulls[1:], pulls[0]).flatten(2)

    def _pull(self, m: int, at: Tensor, mean: Tensor) -> Float[Tensor, "b t h e size"]:
        """What a harmonic adds, on any group; the first is the coupling itself."""
        step = self.step if self.amplitude is None or m == 0 else self.step * self.amplitude[m - 1]
        if self.lag is not None:
            mean = self.group.multiply(self.group.turn(self.lag[m]).to(mean.dtype).expand_as(mean), mean)
        return self.group.tangent(at, mean) * step.unsqueeze(-1)

    def _apart(self, points: Points) -> Float[Tensor, "b t h e a"]:
        return points.unflatten(-1, (self.elements, self.group.ambient))


class _Call(NamedTuple):
    x: Stream
    """What was given, without what stood at padding."""
    points: Points
    """Its points, in the batch's form too."""
    rows: Rows
    last: tuple[Tensor, ...]


_ONE = math.log(math.e - 1)
"""What softplus makes 1."""
_FAST = 30.0
"""How many times as fast as a matrix what is not one learns."""


def _pieces(x: Tensor, count: int) -> tuple[Tensor, ...]:
    return (x,) if count == 1 else x.chunk(count, -1)  # which would copy on the way back
