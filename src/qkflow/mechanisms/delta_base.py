r"""What the delta mechanisms share: projections, short convolutions, gates, and a memory of fixed size.

        x ─► W_q ─► conv ─► silu ─┬────────────┬─► unit ─► q ─┐
                                  │ [coupling] │              │
        x ─► W_k ─► conv ─► silu ─┴────────────┴─► unit ─► k ─┤
        x ─► W_v ─► conv ─► silu ───────────────────────► v ──┼─► delta rule ─► norm ─► * ─► W_o ─► y
        x ─► W_β ─► sigmoid ────────────────────────────► β ──┤                         │
       [x ─► W_a ─► -A softplus(. + b) ─────────────► log α ──┤]                        │
       [x ─► W_λ ─► sigmoid(. - 0.9) ───────────────────► λ ──┘]                        │
        x ─► W_g ─► silu ───────────────────────────────────────────────────────────────┘

| symbol   | here        | shape       |                                                                   |
|----------|-------------|-------------|-------------------------------------------------------------------|
| q, k     | `q`, `k`    | `[b t h k]` | of unit length                                                    |
| v        | `v`         | `[b t h v]` |                                                                   |
| \beta    | `beta`      | `[b t h]`   | how much of its error a token corrects                            |
| \alpha   | `log_alpha` | `[b t h]`   | what is kept from token to token; none in the delta rule          |
| \lambda  | `lam`       | `[b t h]`   | how much of the query a token corrects for; Q-Delta alone has it  |

Q-Delta, https://arxiv.org/abs/2606.08804, leaves open and so is ours: where a coupling stands (after the convolutions
and before the unit length, so that what moves is what is compared), every projection's start, and that the three
mechanisms differ by their rule alone (DeltaNet was published without the output's gate and with values as wide as
keys). Weight decay takes the convolutions' weights for matrices, and leaves A and b alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.mechanisms.base import Circuits, Cost, Diagnostic, Mechanism, Stream, projection
from qkflow.mechanisms.coupling import Coupling, CouplingConfig
from qkflow.mechanisms.decay import Decay, precise
from qkflow.mechanisms.masking import validate_input
from qkflow.ops.csrc import build
from qkflow.ops.delta_rule import MAX_KEY_WIDTH, DeltaInputs, delta_rule, delta_rule_flops
from qkflow.ops.norm import rms_norm
from qkflow.ops.short_conv import MAX_TAPS, next_conv_state, short_conv
from qkflow.state import RecurrentState, State

Keys = Float[Tensor, "b t h k"]
Values = Float[Tensor, "b t h v"]
Gates = Float[Tensor, "b t h"]
_UNIT_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """The options that every delta mechanism has."""

    heads: int | None = None
    """Heads; `None` is as many as the model says."""
    key_width: int | None = None
    """Width of a head's queries and keys; `None` shares out three quarters of the model's width, in multiples of 8."""
    value_expansion: int = 2
    """How many times as wide as its keys a head's values are."""
    conv: int = 4
    """Tokens that a short convolution reads, itself included; 1 is none."""
    gate: bool = True
    """Whether the output is gated by the input."""
    coupling: CouplingConfig | None = None
    """How queries and keys move together before they are scaled to unit length; `None` leaves them where they are."""

    def __post_init__(self) -> None:
        for name in ("heads", "key_width", "value_expansion"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if not 1 <= self.conv <= MAX_TAPS:
            raise UsageError(f"conv must be from 1, for no convolution, to {MAX_TAPS}, got {self.conv}")


class DeltaMechanism(Mechanism):
    """A memory that every token corrects. Subclasses say whether it fades, and what a token corrects for."""

    def __init__(self, width: int, heads: int, config: DeltaConfig, *, decay: bool) -> None:
        super().__init__()
        build.load()  # before someone compiles
        self.heads = heads if config.heads is None else config.heads
        if self.heads < 1:
            raise UsageError(f"heads must be at least 1, got {self.heads}")
        self.key_width = config.key_width or max(8, 8 * round(0.75 * width / self.heads / 8))
        if self.key_width > MAX_KEY_WIDTH:
            raise UsageError(
                f"a head's keys are at most {MAX_KEY_WIDTH} wide, got {self.key_width} for {self.heads} heads at width"
                f" {width}: ask for more heads or a smaller key_width"
            )
        self.width, self.config = width, config
        self.value_width = config.value_expansion * self.key_width
        keys, values = self.heads * self.key_width, self.heads * self.value_width
        self.query, self.key, self.value = projection(width, keys), projection(width, keys), projection(width, values)
        self.query_conv, self.key_conv, self.value_conv = (_taps(c, config.conv) for c in (keys, keys, values))
        self.coupling: Coupling | None = None
        if config.coupling is not None:
            self.coupling = config.coupling(self.heads, self.heads, self.key_width)
        self.beta = projection(width, self.heads)
        self.decay = Decay(width, self.heads) if decay else None
        self.gate = projection(width, values) if config.gate else None
        self.head_norm = nn.Parameter(torch.ones(self.value_width))
        self.output = projection(values, width)

    def forward(self, x: Stream, state: State | None = None, layout: Layout | None = None) -> tuple[Stream, State]:
        """The output for each token, and the memory after the last of each sequence."""
        rows = self._rows(x, state, layout)
        z, matrix = delta_rule(*rows.inputs, None if rows.past is None else rows.past.matrix)
        z = z if layout is None else layout.batch(z)
        lengths = None if layout is None or layout.even else layout.lengths
        conv_state = ()
        if self.config.conv > 1:
            pairs = zip(rows.streams, rows.conv_state, strict=True)
            conv_state = tuple(next_conv_state(new, self.config.conv, tail, lengths) for new, tail in pairs)
        return self.read(z, rows.x), RecurrentState.after(
            rows.past, matrix, conv_state, rows.streams[0].shape[1], lengths
        )

    def inputs(self, x: Stream) -> DeltaInputs:
        """What goes into the delta rule when the mechanism reads `x`, a batch of whole sequences."""
        return self._rows(x, None, None).inputs

    def weights(self, x: Stream, state: State | None = None, layout: Layout | None = None) -> Float[Tensor, "b h t s"]:
        """The influence of each token's value on each output: what the memory gives back of a unit written there.

        The columns are the tokens of `x` alone, with a state too: a memory of fixed size has no slots, and what it adds
        to an output does not depend on the values of `x`.
        """
        inputs = self._rows(x, state, layout).inputs
        n, t, h, _ = inputs.v.shape
        unit = torch.eye(t, dtype=inputs.q.dtype, device=x.device)[None, :, None].expand(n, t, h, t)
        seen = delta_rule(*inputs._replace(v=unit))[0].to(x.dtype)  # [n t h s]
        if layout is not None:
            sequence, position = layout.sequences.clamp_min(0), layout.positions
            together = sequence[:, :, None] == sequence[:, None, :]
            together = together & layout.valid[:, None, :] & layout.valid[:, :, None]
            own = position[:, None, None, :].expand(*position.shape, h, -1)
            seen = seen[sequence, position].gather(3, own) * together[:, :, None]
        return seen.transpose(1, 2)

    def values(self, x: Stream) -> Float[Tensor, "b s h v"]:
        """What each token would write if the memory knew nothing of its key."""
        return self._by_head(_convolved(self.value(x), self.value_conv, None))

    def read(self, z: Float[Tensor, "b t h v"], x: Stream) -> Stream:
        """Each head normalised and gated, then projected back to the stream."""
        z = rms_norm(z, self.head_norm).flatten(2)
        return self.output(z if self.gate is None else z * F.silu(self.gate(x)))

    def cost(self, t: int) -> Cost:
        """Projections, the coupling, and the delta rule, counted in chunks of 64 tokens; nothing grows with pairs."""
        own = [part for name, part in self.named_modules() if not name.startswith("coupling")]
        each = 2 * sum(part.weight.numel() for part in own if isinstance(part, nn.Linear))
        rule = delta_rule_flops(t, self.heads, self.key_width, self.value_width)
        size, channels = self.key.weight.element_size(), self.heads * (2 * self.key_width + self.value_width)
        return Cost(
            parameters=sum(p.numel() for p in self.parameters()),
            linear_flops=t * (each + (0 if self.coupling is None else self.coupling.flops())) + rule,
            pair_flops=0,
            pairs=0.0,
            state_bytes=self.heads * self.key_width * self.value_width * max(size, 4)
            + (self.config.conv - 1) * channels * size,
        )

    def circuits(self) -> Circuits:
        """Queries, keys and what moves them, against values and output; gates, decay and norm are neither."""
        moving = () if self.coupling is None else (f"coupling.{name}" for name, _ in self.coupling.named_parameters())
        where, what = (("query_conv", "key_conv"), ("value_conv",)) if self.config.conv > 1 else ((), ())
        return Circuits(qk=("query.weight", "key.weight", *where, *moving), ov=("value.weight", *what, "output.weight"))

    def tie(self, first: Mechanism) -> None:
        """Couplings may be shared by all layers."""
        if self.coupling is not None and isinstance(first, DeltaMechanism) and first.coupling is not None:
            self.coupling.tie(first.coupling)

    def pairs(self, x: Stream) -> tuple[Keys, Keys]:
        """Each query and its key as convolved: before a coupling moves them."""
        q, k = _convolved(self.query(x), self.query_conv, None), _convolved(self.key(x), self.key_conv, None)
        return self._by_head(q), self._by_head(k)

    def exhibits(self, x: Stream) -> tuple[Diagnostic, ...]:
        """What the gates of each head say on the average over the tokens of `x`, and what a coupling does."""
        own = () if self.coupling is None else self.coupling.exhibits(*self.pairs(x))
        beta, log_alpha, lam = (None if gate is None else gate.detach().double() for gate in self._gates(x))
        shown = {
            "beta, how much of an error is corrected": beta,
            "alpha, how much is kept from token to token": None if log_alpha is None else log_alpha.exp(),
            "lambda, how much of the query is corrected for": lam,
        }
        means = {name: tuple(gate.mean((0, 1)).tolist()) for name, gate in shown.items() if gate is not None}
        gates = Diagnostic(
            title="gates of each head",
            kind="bars",
            x=tuple(f"head {head + 1}" for head in range(self.heads)),
            series=tuple(means),
            values=tuple(means.values()),
            y_label="mean over tokens",
            note="At beta 0 nothing is written, at alpha 1 nothing fades, and at lambda 0 it is the gated delta rule.",
        )
        return (*super().exhibits(x), *own, gates)

    def lam_of(self, x: Stream) -> Gates | None:
        """Lambda of each token and head, if the rule has one."""
        return None

    def _gates(self, x: Stream) -> tuple[Gates, Gates | None, Gates | None]:
        log_alpha = None if self.decay is None else self.decay(x)
        return self.beta(x).sigmoid(), log_alpha, self.lam_of(x)

    def _rows(self, x: Stream, state: State | None, layout: Layout | None) -> _Rows:
        """Project, go to row form, convolve behind what the state holds, couple and scale; padding writes nothing."""
        x = validate_input(x, layout)
        beta, log_alpha, lam = self._gates(x)
        streams = self.query(x), self.key(x), self.value(x)
        if layout is not None:  # a token without beta and decay changes nothing
            beta, streams = layout.rows(layout.clean(beta)), tuple(layout.rows(stream) for stream in streams)
            log_alpha = None if log_alpha is None else layout.rows(layout.clean(log_alpha))
            lam = None if lam is None else layout.rows(lam)
        past = self._past(state, len(streams[0]))
        conv_state = (None, None, None) if past is None or not past.conv_state else past.conv_state
        convs = self.query_conv, self.key_conv, self.value_conv
        q, k, v = (self._by_head(_convolved(*given)) for given in zip(streams, convs, conv_state, strict=True))
        if self.coupling is not None:
            q, k = self.coupling(q, k)
        return _Rows(x, streams, past, conv_state, DeltaInputs(_unit(q), _unit(k), v, beta, log_alpha, lam))

    def _past(self, state: State | None, rows: int) -> RecurrentState | None:
        if state is None:
            return None
        name = type(self).__name__
        if not isinstance(state, RecurrentState):
            raise UsageError(
                f"{name} continues a RecurrentState, got {type(state).__name__}: a state of another mechanism"
            )
        if len(state.matrix) != rows:
            raise UsageError(f"the state holds {len(state.matrix)} rows, the input {rows}: select() the rows first")
        want = [self.heads, self.value_width, self.key_width]
        taps = [tail.shape[1] + 1 for tail in state.conv_state] or [1]
        if [*state.matrix.shape[1:]] != want or {*taps} != {self.config.conv}:
            raise UsageError(
                f"{name} continues a memory of {want} behind {self.config.conv} taps, got {[*state.matrix.shape[1:]]}"
                f" behind {max(taps)}: a state of another mechanism"
            )
        return state

    def _by_head(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t h k"]:
        return x.view(*x.shape[:2], self.heads, -1)


class _Rows(NamedTuple):
    """A call in row form, except for `x`, which is the batch without what stood at padding."""

    x: Stream
    streams: tuple[Tensor, ...]
    """Queries, keys and values as projected."""
    past: RecurrentState | None
    conv_state: tuple[Tensor | None, ...]
    """The last tokens before each stream."""
    inputs: DeltaInputs


def _taps(channels: int, taps: int) -> nn.Parameter | None:
    """A short convolution's weights, begun as torch begins those of its own: U(-1, 1) / sqrt(taps)."""
    return nn.Parameter(torch.empty(channels, taps).uniform_(-1, 1) * taps**-0.5) if taps > 1 else None


def _convolved(x: Tensor, taps: Tensor | None, tail: Tensor | None) -> Tensor:
    return F.silu(x) if taps is None else short_conv(x, taps, tail)


def _unit(x: Keys) -> Keys:
    """At unit length: x / sqrt(|x|^2 + 1e-6), by a norm that takes the mean of squares."""
    x, width = precise(x), x.shape[-1]
    return rms_norm(x, x.new_full((width,), width**-0.5), _UNIT_EPS / width)
