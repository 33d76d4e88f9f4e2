r"""Memories of fixed size that every token corrects: the module that all delta-rule mechanisms share.

        u ─► W_q ─► conv ─► silu ─┬────────────┬─► L2 norm ─► q ─┐
                                  │ [coupling] │                 │
        u ─► W_k ─► conv ─► silu ─┴────────────┴─► L2 norm ─► k ─┤
       [u ─► W_e ─► conv ─► silu ──────────────────► L2 norm ─► e ─┤]
        u ─► W_v ─► conv ─► silu ──────────────────────────► v ──┼─► delta rule ─► norm ─► * ─► W_o ─► y
        u ─► W_β ─► sigmoid ───────────────────────────────► β ──┤                         │
       [u ─► W_a ─► -A softplus(. + b) ────────────────► log α ──┘]                        │
        u ─► W_g ─► silu ──────────────────────────────────────────────────────────────────┘

    S_t = S_{t-1} diag(\alpha_t) (I - \beta_t x_t k_t^\top) + \beta_t v_t k_t^\top                       (1)
    o_t = S_t q_t / \sqrt{k}                                                                            (2)
    \log \alpha_t = -A softplus(W_a u_t + b),  A = e^{A_log}                                            (3)

Parts in square brackets are in some mechanisms only.

| symbol  | variable    | shape       |                                                 |
|---------|-------------|-------------|-------------------------------------------------|
| u       | `x`         | `[b t d]`   | input of the layer                              |
| q, k    | `q`, `k`    | `[b t h k]` | unit length                                     |
| e       | `own`       | `[b t h k]` | a learned direction of unit length              |
| x       | `erase`     | `[b t h k]` | erase direction, which is read and corrected; k by default |
| v       | `v`         | `[b t h v]` |                                                 |
| \beta   | `beta`      | `[b t h]`   | learning rate of the memory                     |
| \alpha  | `log_alpha` | `[b t h]`, or `[b t h k]` | decay per head, or per key channel  |
| S       | `matrix`    | `[b h v k]` | memory                                          |
| o       | `z`         | `[b t h v]` | output of the delta rule                        |

`delta_family.py` has the mechanisms: each chooses x, the decay and the read-out in (1) and (2). Our choices: a coupling
acts after the convolutions and before the L2 norm; the initialisation of the projections; the mechanisms differ in the
recurrence only (the published DeltaNet has no output gate, and values as wide as its keys). Weight decay applies to the
convolutions, not to A and b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.mechanisms.base import Circuits, Cost, Stream, apply_linear, conv_weight, projection, wrong_state
from qkflow.mechanisms.coupling import CouplingConfig, QKMechanism
from qkflow.mechanisms.masking import map_by_token, validate_input
from qkflow.ops import few_rows
from qkflow.ops.csrc import build
from qkflow.ops.csrc.eager import has_hooks
from qkflow.ops.delta_rule import MAX_KEY_WIDTH, DeltaInputs, choose_backend, cpu, delta_rule, delta_rule_flops
from qkflow.ops.norm import rms_norm
from qkflow.ops.short_conv import MAX_TAPS, next_conv_state, short_conv
from qkflow.state import RecurrentState, State

Keys = Float[Tensor, "b t h k"]
Gates = Float[Tensor, "b t h"]
_NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """Options of every delta-rule mechanism."""

    heads: int | None = None
    """Number of heads; `None` is the model's."""
    key_width: int | None = None
    """Width of a head's keys; `None` is three quarters of the model's width over the heads, in multiples of 8."""
    value_expansion: int = 2
    """Ratio of value width to key width."""
    conv: int = 4
    """Kernel size of the short convolutions; 1 disables them."""
    gate: bool = True
    """Whether the output is gated by the input."""
    coupling: CouplingConfig | None = None
    """Moves queries and keys before the L2 norm."""
    causal: bool = True
    """Only True: a memory is written token by token."""

    has_decay: ClassVar[bool] = True
    has_own_direction: ClassVar[bool] = False
    """Whether there is a fourth projection, for a direction e that is neither the query nor the key."""

    def __post_init__(self) -> None:
        if not self.causal:
            raise UsageError(
                "causal=False: a delta rule writes its memory token by token, so it has no bidirectional form; use"
                " standard, differential, coupled or kuramoto"
            )
        for name in ("heads", "key_width", "value_expansion"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if not 1 <= self.conv <= MAX_TAPS:
            raise UsageError(f"conv must be from 1 (no convolution) to {MAX_TAPS}, got {self.conv}")


class Decay(nn.Module):
    """Equation (3): A starts uniform in (0, 16], and softplus(b) log-uniform in [0.001, 0.1].

    >>> Decay(width=32, heads=4)(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 4])
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.rate = projection(width, heads)
        self.A_log = nn.Parameter((16 * (1 - torch.rand(heads))).log())
        self.dt_bias = dt_bias(heads)

    def maps(self) -> tuple[nn.Module, nn.Module | None]:
        """Return the projections of the rate: one, or two if their product has a low rank."""
        return self.rate, None

    def forward(self, x: Stream) -> Gates:
        """Return log alpha, at least in float32."""
        rate, bias, A = at_least_float32(self.rate(x)), at_least_float32(self.dt_bias), at_least_float32(self.A_log)
        return -A.exp() * softplus(rate + bias)


class DeltaMechanism(QKMechanism):
    """A memory that every token corrects; subclasses override `delta_inputs` and add their gates."""

    config_type: ClassVar[type[DeltaConfig]]
    decay_type: ClassVar[type[nn.Module]] = Decay
    """The decay that the native decoding step computes."""
    has_channel_decay: ClassVar[bool] = False
    """Whether every key channel has its own decay."""
    steps: ClassVar[int] = 1
    """Steps of the recurrence per token."""
    has_decode_step: ClassVar[bool] = False
    """Whether the native decoding step computes this class; not inherited, since a subclass may override a part."""

    def __init__(
        self, width: int, heads: int, layer: int = 0, layers: int = 1, *, config: DeltaConfig | None = None
    ) -> None:
        super().__init__()
        config = self.config_type() if config is None else config
        build.load()  # build the kernel before torch.compile traces this module
        self.heads = heads if config.heads is None else config.heads
        if self.heads < 1:
            raise UsageError(f"heads must be at least 1, got {self.heads}")
        self.key_width = config.key_width or max(8, 8 * round(0.75 * width / self.heads / 8))
        if self.key_width > MAX_KEY_WIDTH:
            raise UsageError(
                f"key_width must be at most {MAX_KEY_WIDTH}, got {self.key_width} for {self.heads} heads at width"
                f" {width}: use more heads or a smaller key_width"
            )
        self.width, self.config = width, config
        self.value_width = config.value_expansion * self.key_width
        keys, values = self.heads * self.key_width, self.heads * self.value_width
        self.query, self.key, self.value = projection(width, keys), projection(width, keys), projection(width, values)
        self.query_conv, self.key_conv, self.value_conv = (conv_weight(c, config.conv) for c in (keys, keys, values))
        self.coupling = None
        if config.coupling is not None:
            self.coupling = config.coupling(self.heads, self.heads, self.key_width)
        self.beta = projection(width, self.heads)
        self.decay = self.make_decay() if config.has_decay else None
        self.gate = projection(width, values) if config.gate else None
        self.head_norm = nn.Parameter(torch.ones(self.value_width))
        self.output = projection(values, width)
        self.own = projection(width, keys) if config.has_own_direction else None
        self.own_conv = conv_weight(keys, config.conv) if config.has_own_direction else None
        # The shapes of the weights, in the order of the decoding step (`_step`).
        gates, taps = (self.heads, width), config.conv
        rates, decay_shapes, per_head = gates, [(0,), (self.heads,), (self.heads,)], (self.heads,)
        if self.has_channel_decay:
            rates, decay_shapes = (self.key_width, width), [(keys, self.key_width), (self.heads,), (keys,)]
        self._step_shapes = [
            *((keys, width), (keys, width), (values, width), (keys, width), gates, rates, gates, (values, width)),
            *((keys, taps), (keys, taps), (values, taps), (keys, taps), *decay_shapes, per_head, per_head),
            *((self.value_width,), (width, values)),
        ]
        self._conv_channels = [keys, keys, values] if self.own is None else [keys, keys, values, keys]
        self._can_step = (
            type(self).__dict__.get("has_decode_step", False)
            and config.conv > 1
            and (self.coupling is None or self.coupling.has_native_step)
        )

    # What a mechanism chooses

    def make_decay(self) -> nn.Module:
        """Return the module that computes log alpha from the stream."""
        return Decay(self.width, self.heads)

    def gates(self, x: Stream) -> dict[str, Tensor]:
        """Return the gates of each token by name: `beta`, `log_alpha` if the memory decays, and the mechanism's own."""
        log_alpha = None if self.decay is None else self.decay(x)
        beta = self.beta(x).sigmoid()  # the order of the gates decides how gradients are summed
        return {"beta": beta} if log_alpha is None else {"beta": beta, "log_alpha": log_alpha}

    def delta_inputs(self, q: Keys, k: Keys, v: Tensor, own: Keys | None, gates: dict[str, Tensor]) -> DeltaInputs:
        """Return the inputs of the delta rule, `steps` per token."""
        return DeltaInputs(q, k, v, gates["beta"], gates.get("log_alpha"), None)

    # What all have in common

    def forward(
        self,
        x: Stream,
        state: State | None = None,
        layout: Layout | None = None,
        memory: Tensor | None = None,
        memory_layout: Layout | None = None,
    ) -> tuple[Stream, State]:
        """Return the output of each token, and the memory after the last token of each sequence."""
        if memory is not None or memory_layout is not None:
            raise UsageError(
                f"{type(self).__name__} got a memory, but a delta rule reads and writes the tokens of one sequence in"
                " turn: for cross attention use standard or differential attention"
            )
        if self._can_step and layout is None and isinstance(state, RecurrentState) and x.shape[1] == 1:
            step = self._step(x, state)
            if step is not None:
                return step
        call = self._project(x, state, layout)
        z, matrix = self._run(call, call.v, None if call.past is None else call.past.matrix)
        z = z if layout is None else layout.to_batch(z)
        lengths = None if layout is None or layout.is_full else layout.lengths
        conv_state = ()
        if self.config.conv > 1:
            streams = zip(call.streams, call.conv_state, strict=True)
            conv_state = tuple(next_conv_state(new, self.config.conv, tail, lengths) for new, tail in streams)
        after = RecurrentState.after(call.past, matrix, conv_state, call.streams[0].shape[1], lengths)
        return self.read(z, call.x), after

    def constant_lambda(self) -> tuple[float, float]:
        """Return a fixed lambda of x = k + lambda q, or 0, and the bias of a projected one."""
        return 0.0, 0.0

    def key_feedback(self) -> tuple[Tensor | None, Tensor | None]:
        """Return b and d of each head if the erase direction is sigmoid(b) k and the query is corrected."""
        return None, None

    def _step(self, x: Stream, state: RecurrentState) -> tuple[Stream, State] | None:
        """Decode a token in one native call; None if that is not possible. The law of decoding compares it."""
        modules, parameters = cast(Any, self._modules), cast(Any, self._parameters)  # faster than attribute access
        decay = modules.get("decay")
        if not type(self).__dict__.get("has_decode_step", False):  # a parametrization has replaced the class
            return None
        if decay is not None and (decay.__class__ is not self.decay_type or has_hooks(decay)):
            return None
        rate, rate_up = (None, None) if decay is None else decay.maps()
        names = ("query_conv", "key_conv", "value_conv", "own_conv", "head_norm")
        *convs, head_norm = [parameters[name] if name in parameters else getattr(self, name) for name in names]
        maps = [modules["query"], modules["key"], modules["value"], modules.get("own"), modules["beta"], rate]
        maps += [modules.get("lam", modules.get("gamma")), modules.get("gate"), rate_up]
        *projections, up = [None if map is None else few_rows.plain_weight(map) for map in maps]
        if any((map is None) != (weight is None) for map, weight in zip(maps, (*projections, up), strict=True)):
            return None
        if len({maps[3] is None, convs[3] is None, len(self._conv_channels) == 3}) > 1:  # no longer as constructed
            return None
        weights = cpu.StepWeights(
            tuple(projections),
            tuple(convs),
            (None, None, None) if decay is None else (up, decay.A_log, decay.dt_bias),
            self.key_feedback(),
            head_norm,
            cast(Any, few_rows.plain_weight(modules["output"])),
        )
        tensors = [*projections, *weights.convs, *weights.decay, *weights.feedback, weights.head_norm, weights.output]
        optional = [w for w in (*projections, up, convs[3], *weights.feedback) if w is not None]
        required = (*convs[:3], head_norm, weights.output, *(() if decay is None else weights.decay[1:]))
        if not few_rows.supports(x, *optional, *required, state.matrix, *state.conv_state):
            return None
        if choose_backend(x.device) != "cpu" or not few_rows.have_shapes(
            (*tensors, x), (*self._step_shapes, (len(x), 1, self.width))
        ):
            return None
        if self._check_state(state, (x,) * len(self._conv_channels)) is None:
            return None
        if any(
            tail.shape != (len(x), self.config.conv - 1, c)
            for tail, c in zip(state.conv_state, self._conv_channels, strict=True)
        ):
            return None
        coupling = few_rows.NO_COUPLING if self.coupling is None else self.coupling.native_step(x)
        if coupling is None:
            return None
        lam, erase_first = self.constant_lambda(), self.steps == 2
        step = cpu.layer_step(x, weights, state.matrix, state.conv_state, *lam, erase_first, coupling)
        return None if step is None else (step[0], RecurrentState.after(state, step[1], step[2], 1))

    def inputs(self, x: Stream) -> DeltaInputs:
        """Return the inputs of the delta rule for a batch of whole sequences."""
        call = self._project(x, None, None)
        return self.delta_inputs(call.q, call.k, call.v, call.own, call.gates)

    def weights(self, x: Stream, state: State | None = None, layout: Layout | None = None) -> Float[Tensor, "b h t s"]:
        """Return the influence of each token's value on each output: the response to a unit value.

        The columns are the tokens of `x` only, also with a state: a memory of fixed size has no slots, and its
        contribution does not depend on the values of `x`.
        """
        call = self._project(x, state, layout)
        n, t, h, _ = call.v.shape
        unit = torch.eye(t, dtype=call.q.dtype, device=x.device)[None, :, None].expand(n, t, h, t)
        response = self._run(call, unit, None)[0].to(x.dtype)  # [n t h s]
        return map_by_token(response.transpose(1, 2), 0, layout)

    def values(self, x: Stream) -> Float[Tensor, "b s h v"]:
        """Return the value that each token writes."""
        return self._split_heads(_convolve(self.value(x), self.value_conv))

    def read(self, z: Float[Tensor, "b t h v"], x: Stream) -> Stream:
        """Normalise and gate each head, then project to the stream."""
        z = rms_norm(z, self.head_norm).flatten(2)
        return apply_linear(self.output, z if self.gate is None else z * F.silu(apply_linear(self.gate, x)))

    def cost(self, t: int) -> Cost:
        """Projections, the coupling, and the delta rule in chunks of 64 steps."""
        modules = [module for name, module in self.named_modules() if not name.startswith("coupling")]
        projections = 2 * sum(module.weight.numel() for module in modules if isinstance(module, nn.Linear))
        rule = delta_rule_flops(self.steps * t, self.heads, self.key_width, self.value_width)
        size, n_keys = self.key.weight.element_size(), 2 if self.own is None else 3
        channels = self.heads * (n_keys * self.key_width + self.value_width)
        return Cost(
            parameters=sum(p.numel() for p in self.parameters()),
            linear_flops=t * (projections + self._coupling_flops()) + rule,
            pair_flops=0,
            pairs=0.0,
            state_bytes=self.heads * self.key_width * self.value_width * max(size, 4)
            + (self.config.conv - 1) * channels * size,
        )

    def circuits(self) -> Circuits:
        """QK: queries, keys, own direction and the coupling. OV: values and output. The rest belongs to neither."""
        addresses = ("query", "key") if self.own is None else ("query", "key", "own")
        has_conv = self.config.conv > 1
        return Circuits(
            qk=(
                *(f"{name}.weight" for name in addresses),
                *(f"{name}_conv" for name in addresses if has_conv),
                *self._coupling_parameters(),
            ),
            ov=("value.weight", *(("value_conv",) if has_conv else ()), "output.weight"),
        )

    def pairs(self, x: Stream) -> tuple[Keys, Keys]:
        """Return queries and keys after the convolutions."""
        q, k = _convolve(self.query(x), self.query_conv), _convolve(self.key(x), self.key_conv)
        return self._split_heads(q), self._split_heads(k)

    def _run(self, call: _Call, v: Tensor, matrix: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the recurrence and return the output of each token, and the last memory."""
        z, matrix = delta_rule(*self.delta_inputs(call.q, call.k, v, call.own, call.gates), matrix)
        return (z if self.steps == 1 else z[:, self.steps - 1 :: self.steps]), matrix

    def _project(self, x: Stream, state: State | None, layout: Layout | None) -> _Call:
        """Project, convert to row form (see `qkflow.layout`), convolve, couple and normalise."""
        x = validate_input(x, layout)
        gates = self.gates(x)
        streams = self.query(x), self.key(x), self.value(x)
        streams = streams if self.own is None else (*streams, self.own(x))
        if layout is not None:  # tokens with beta = 0 and log alpha = 0 leave the memory unchanged
            gates = {name: layout.to_rows(layout.zero_padding(gate)) for name, gate in gates.items()}
            streams = tuple(layout.to_rows(stream) for stream in streams)
        past = self._check_state(state, streams)
        conv_state = (None,) * len(streams) if past is None or not past.conv_state else past.conv_state
        weights = (self.query_conv, self.key_conv, self.value_conv, self.own_conv)[: len(streams)]
        convs = zip(streams, weights, conv_state, strict=True)
        q, k, v, *own = (self._split_heads(_convolve(stream, weight, tail)) for stream, weight, tail in convs)
        if self.coupling is not None:
            q, k = self.coupling(q, k)
        unit_own = _l2_normalize(own[0]) if own else None
        return _Call(x, streams, past, conv_state, _l2_normalize(q), _l2_normalize(k), v, unit_own, gates)

    def _check_state(self, state: State | None, streams: tuple[Tensor, ...]) -> RecurrentState | None:
        if state is None:
            return None
        if not isinstance(state, RecurrentState):
            raise wrong_state(self, state, RecurrentState)
        rows = streams[0].shape[0]
        if state.matrix.shape[0] != rows:
            raise UsageError(f"the state holds {len(state.matrix)} rows, the input {rows}: select() the rows first")
        expected = [self.heads, self.value_width, self.key_width]
        taps = [tail.shape[1] + 1 for tail in state.conv_state] or [1]
        if [*state.matrix.shape[1:]] != expected or {*taps} != {self.config.conv}:
            raise UsageError(
                f"{type(self).__name__} expected a state of shape {expected} with convolutions of {self.config.conv}"
                f" tokens, got {[*state.matrix.shape[1:]]} with {max(taps)}: a state of another mechanism"
            )
        if state.conv_state and len(state.conv_state) != len(streams):
            raise UsageError(
                f"{type(self).__name__} expected a state with {len(streams)} convolutions, got"
                f" {len(state.conv_state)}: a state of another mechanism"
            )
        return state

    def _split_heads(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t h k"]:
        return x.unflatten(-1, (self.heads, -1))


class _Call(NamedTuple):
    """Everything about one forward call, in row form except for `x`."""

    x: Stream
    streams: tuple[Tensor, ...]
    """Projected queries, keys, values and own directions, before the convolutions."""
    past: RecurrentState | None
    conv_state: tuple[Tensor | None, ...]
    """The tokens that precede each stream."""
    q: Keys
    k: Keys
    v: Tensor
    own: Keys | None
    gates: dict[str, Tensor]


def dt_bias(count: int) -> nn.Parameter:
    """Return the initial b of (3): softplus(b) is log-uniform in [0.001, 0.1]."""
    dt = torch.empty(count).uniform_(math.log(1e-3), math.log(0.1)).exp()
    return nn.Parameter(dt + (-torch.expm1(-dt)).log())


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x); `F.softplus` is exact only to 1e-9."""
    return torch.logaddexp(x, x.new_zeros(()))


def at_least_float32(x: Tensor) -> Tensor:
    """Convert half precision to float32: gates are multiplied over many tokens."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _convolve(x: Tensor, weight: Tensor | None, tail: Tensor | None = None) -> Tensor:
    return F.silu(x) if weight is None else short_conv(x, weight, tail)


def _l2_normalize(x: Keys) -> Keys:
    """Return x / sqrt(|x|^2 + 1e-6), computed with the RMS norm kernel."""
    x, width = at_least_float32(x), x.shape[-1]
    return rms_norm(x, x.new_full((width,), width**-0.5), _NORM_EPS / width)
