r"""Delta-rule memories of fixed size: `DeltaNet`, `GatedDeltaNet` and `QDelta`, one module with three recurrences.

        x ─► W_q ─► conv ─► silu ─┬────────────┬─► L2 norm ─► q ─┐
                                  │ [coupling] │                 │
        x ─► W_k ─► conv ─► silu ─┴────────────┴─► L2 norm ─► k ─┤
        x ─► W_v ─► conv ─► silu ──────────────────────────► v ──┼─► delta rule ─► norm ─► * ─► W_o ─► y
        x ─► W_β ─► sigmoid ───────────────────────────────► β ──┤                         │
       [x ─► W_a ─► -A softplus(. + b) ────────────────► log α ──┤]                        │
       [x ─► W_λ ─► sigmoid(. - 0.9) ──────────────────────► λ ──┘]                        │
        x ─► W_g ─► silu ──────────────────────────────────────────────────────────────────┘

    S_t = \alpha_t S_{t-1} (I - \beta_t (k_t + \lambda_t q_t) k_t^\top) + \beta_t v_t k_t^\top          (1)
    o_t = S_t q_t / \sqrt{k}                                                                            (2)
    \log \alpha_t = -A softplus(W_a x_t + b),  A = e^{A_log}                                            (3)
    \lambda_t = sigmoid(W_\lambda x_t - 0.9)                                                            (4)

| mechanism                                       | \alpha | \lambda |
|-------------------------------------------------|--------|---------|
| `DeltaNet`, https://arxiv.org/abs/2406.06484     | 1      | 0       |
| `GatedDeltaNet`, https://arxiv.org/abs/2412.06464 | (3)   | 0       |
| `QDelta`, https://arxiv.org/abs/2606.08804       | (3)    | (4)     |

| symbol  | variable    | shape       |                                                 |
|---------|-------------|-------------|-------------------------------------------------|
| q, k    | `q`, `k`    | `[b t h k]` | unit length                                     |
| v       | `v`         | `[b t h v]` |                                                 |
| \beta   | `beta`      | `[b t h]`   | learning rate of the memory                     |
| \alpha  | `log_alpha` | `[b t h]`   | decay                                           |
| \lambda | `lam`       | `[b t h]`   | weight of the query in the corrected direction  |
| S       | `matrix`    | `[b h v k]` | memory                                          |

Our choices where the Q-Delta paper leaves it open: a coupling acts after the convolutions and before the L2 norm; the
initialisation of the projections; the three mechanisms differ in the recurrence only (the published DeltaNet has no
output gate, and values as wide as its keys). Weight decay applies to the convolutions, not to A and b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.mechanisms.base import Circuits, Cost, Stream, conv_weight, projection, wrong_state
from qkflow.mechanisms.coupling import CouplingConfig, QKMechanism
from qkflow.mechanisms.masking import map_by_token, validate_input
from qkflow.ops.csrc import build
from qkflow.ops.delta_rule import MAX_KEY_WIDTH, DeltaInputs, delta_rule, delta_rule_flops
from qkflow.ops.norm import rms_norm
from qkflow.ops.short_conv import MAX_TAPS, next_conv_state, short_conv
from qkflow.state import RecurrentState, State

Keys = Float[Tensor, "b t h k"]
Gates = Float[Tensor, "b t h"]
_NORM_EPS = 1e-6
_LAMBDA_BIAS = -0.9


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

    def __post_init__(self) -> None:
        for name in ("heads", "key_width", "value_expansion"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if not 1 <= self.conv <= MAX_TAPS:
            raise UsageError(f"conv must be from 1 (no convolution) to {MAX_TAPS}, got {self.conv}")


@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig(DeltaConfig):
    """Options of `DeltaNet`."""

    decay: ClassVar[bool] = False
    lam: ClassVar[float | None] = 0.0
    lam_bias: ClassVar[float] = _LAMBDA_BIAS

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> DeltaNet:
        """Return the mechanism of one layer."""
        return DeltaNet(width, heads, layer, layers, config=self)


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(DeltaConfig):
    """Options of `GatedDeltaNet`."""

    decay: ClassVar[bool] = True
    lam: ClassVar[float | None] = 0.0
    lam_bias: ClassVar[float] = _LAMBDA_BIAS

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> GatedDeltaNet:
        """Return the mechanism of one layer."""
        return GatedDeltaNet(width, heads, layer, layers, config=self)


@dataclass(frozen=True, kw_only=True)
class QDeltaConfig(DeltaConfig):
    """Options of `QDelta`."""

    decay: bool = True
    """Whether the memory has a decay gate."""
    lam: float | None = None
    """A constant lambda from 0 (the gated delta rule) to 1; `None` learns it per token."""
    lam_bias: float = _LAMBDA_BIAS
    """Bias before the sigmoid of (4)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lam is not None and not 0 <= self.lam <= 1:
            raise UsageError(f"lam must be from 0 to 1, or None to be learned, got {self.lam}")
        if not math.isfinite(self.lam_bias):
            raise UsageError(f"lam_bias must be a finite number, got {self.lam_bias}")
        if self.lam is not None and self.lam_bias != _LAMBDA_BIAS:
            raise UsageError(f"lam_bias applies to a learned lam only, got lam {self.lam} and lam_bias {self.lam_bias}")

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> QDelta:
        """Return the mechanism of one layer."""
        return QDelta(width, heads, layer, layers, config=self)


_AnyConfig = DeltaNetConfig | GatedDeltaNetConfig | QDeltaConfig


class Decay(nn.Module):
    """Equation (3): A starts uniform in (0, 16], and softplus(b) log-uniform in [0.001, 0.1].

    >>> Decay(width=32, heads=4)(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 4])
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.rate = projection(width, heads)
        self.A_log = nn.Parameter((16 * (1 - torch.rand(heads))).log())
        dt = torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(dt + (-torch.expm1(-dt)).log())  # softplus(dt_bias) = dt

    def forward(self, x: Stream) -> Gates:
        """Return log alpha, at least in float32."""
        rate, bias, A = _at_least_float32(self.rate(x)), _at_least_float32(self.dt_bias), _at_least_float32(self.A_log)
        return -A.exp() * torch.logaddexp(rate + bias, rate.new_zeros(()))  # F.softplus is exact only to 1e-9


class DeltaMechanism(QKMechanism):
    """A memory that every token corrects; the config says which gates it has."""

    config_type: ClassVar[type[_AnyConfig]]

    def __init__(
        self, width: int, heads: int, layer: int = 0, layers: int = 1, *, config: _AnyConfig | None = None
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
        self.decay = Decay(width, self.heads) if config.decay else None
        self.gate = projection(width, values) if config.gate else None
        self.head_norm = nn.Parameter(torch.ones(self.value_width))
        self.output = projection(values, width)
        self.lam = projection(width, self.heads) if config.lam is None else None

    def forward(self, x: Stream, state: State | None = None, layout: Layout | None = None) -> tuple[Stream, State]:
        """Return the output of each token, and the memory after the last token of each sequence."""
        call = self._project(x, state, layout)
        z, matrix = delta_rule(*call.inputs, None if call.past is None else call.past.matrix)
        z = z if layout is None else layout.to_batch(z)
        lengths = None if layout is None or layout.is_full else layout.lengths
        conv_state = ()
        if self.config.conv > 1:
            streams = zip(call.streams, call.conv_state, strict=True)
            conv_state = tuple(next_conv_state(new, self.config.conv, tail, lengths) for new, tail in streams)
        after = RecurrentState.after(call.past, matrix, conv_state, call.streams[0].shape[1], lengths)
        return self.read(z, call.x), after

    def inputs(self, x: Stream) -> DeltaInputs:
        """Return the inputs of the delta rule for a batch of whole sequences."""
        return self._project(x, None, None).inputs

    def weights(self, x: Stream, state: State | None = None, layout: Layout | None = None) -> Float[Tensor, "b h t s"]:
        """Return the influence of each token's value on each output: the response to a unit value.

        The columns are the tokens of `x` only, also with a state: a memory of fixed size has no slots, and its
        contribution does not depend on the values of `x`.
        """
        inputs = self._project(x, state, layout).inputs
        n, t, h, _ = inputs.v.shape
        unit = torch.eye(t, dtype=inputs.q.dtype, device=x.device)[None, :, None].expand(n, t, h, t)
        response = delta_rule(*inputs._replace(v=unit))[0].to(x.dtype)  # [n t h s]
        return map_by_token(response.transpose(1, 2), 0, layout)

    def values(self, x: Stream) -> Float[Tensor, "b s h v"]:
        """Return the value that each token writes."""
        return self._split_heads(_convolve(self.value(x), self.value_conv))

    def read(self, z: Float[Tensor, "b t h v"], x: Stream) -> Stream:
        """Normalise and gate each head, then project to the stream."""
        z = rms_norm(z, self.head_norm).flatten(2)
        return self.output(z if self.gate is None else z * F.silu(self.gate(x)))

    def cost(self, t: int) -> Cost:
        """Projections, the coupling, and the delta rule in chunks of 64 tokens."""
        modules = [module for name, module in self.named_modules() if not name.startswith("coupling")]
        projections = 2 * sum(module.weight.numel() for module in modules if isinstance(module, nn.Linear))
        rule = delta_rule_flops(t, self.heads, self.key_width, self.value_width)
        size, channels = self.key.weight.element_size(), self.heads * (2 * self.key_width + self.value_width)
        return Cost(
            parameters=sum(p.numel() for p in self.parameters()),
            linear_flops=t * (projections + self._coupling_flops()) + rule,
            pair_flops=0,
            pairs=0.0,
            state_bytes=self.heads * self.key_width * self.value_width * max(size, 4)
            + (self.config.conv - 1) * channels * size,
        )

    def circuits(self) -> Circuits:
        """QK: queries, keys and the coupling. OV: values and output. Gates, decay and norm belong to neither."""
        qk_convs, ov_convs = (("query_conv", "key_conv"), ("value_conv",)) if self.config.conv > 1 else ((), ())
        return Circuits(
            qk=("query.weight", "key.weight", *qk_convs, *self._coupling_parameters()),
            ov=("value.weight", *ov_convs, "output.weight"),
        )

    def pairs(self, x: Stream) -> tuple[Keys, Keys]:
        """Return queries and keys after the convolutions."""
        q, k = _convolve(self.query(x), self.query_conv), _convolve(self.key(x), self.key_conv)
        return self._split_heads(q), self._split_heads(k)

    def gates(self, x: Stream) -> tuple[Gates, Gates | None, Gates | None]:
        """Return beta, log alpha and lambda; `None` for gates that the recurrence does not have."""
        log_alpha = None if self.decay is None else self.decay(x)
        beta, lam = self.beta(x).sigmoid(), None  # the order of the gates decides how gradients are summed
        if self.lam is not None:
            lam = (_at_least_float32(self.lam(x)) + self.config.lam_bias).sigmoid()  # (4)
        elif self.config.lam:
            lam = x.new_full((*x.shape[:2], self.heads), self.config.lam)
        return beta, log_alpha, lam

    def _project(self, x: Stream, state: State | None, layout: Layout | None) -> _Call:
        """Project, convert to row form, convolve, couple and normalise."""
        x = validate_input(x, layout)
        beta, log_alpha, lam = self.gates(x)
        streams = self.query(x), self.key(x), self.value(x)
        if layout is not None:  # tokens with beta = 0 and log alpha = 0 leave the memory unchanged
            beta = layout.to_rows(layout.zero_padding(beta))
            streams = tuple(layout.to_rows(stream) for stream in streams)
            log_alpha = None if log_alpha is None else layout.to_rows(layout.zero_padding(log_alpha))
            lam = None if lam is None else layout.to_rows(lam)
        past = self._check_state(state, len(streams[0]))
        conv_state = (None, None, None) if past is None or not past.conv_state else past.conv_state
        convs = zip(streams, (self.query_conv, self.key_conv, self.value_conv), conv_state, strict=True)
        q, k, v = (self._split_heads(_convolve(stream, weight, tail)) for stream, weight, tail in convs)
        if self.coupling is not None:
            q, k = self.coupling(q, k)
        inputs = DeltaInputs(_l2_normalize(q), _l2_normalize(k), v, beta, log_alpha, lam)
        return _Call(x, streams, past, conv_state, inputs)

    def _check_state(self, state: State | None, rows: int) -> RecurrentState | None:
        if state is None:
            return None
        if not isinstance(state, RecurrentState):
            raise wrong_state(self, state, RecurrentState)
        if len(state.matrix) != rows:
            raise UsageError(f"the state holds {len(state.matrix)} rows, the input {rows}: select() the rows first")
        expected = [self.heads, self.value_width, self.key_width]
        taps = [tail.shape[1] + 1 for tail in state.conv_state] or [1]
        if [*state.matrix.shape[1:]] != expected or {*taps} != {self.config.conv}:
            raise UsageError(
                f"{type(self).__name__} expected a state of shape {expected} with convolutions of {self.config.conv}"
                f" tokens, got {[*state.matrix.shape[1:]]} with {max(taps)}: a state of another mechanism"
            )
        return state

    def _split_heads(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t h k"]:
        return x.view(*x.shape[:2], self.heads, -1)


class _Call(NamedTuple):
    """Everything about one forward call, in row form except for `x`."""

    x: Stream
    streams: tuple[Tensor, ...]
    """Projected queries, keys and values, before the convolutions."""
    past: RecurrentState | None
    conv_state: tuple[Tensor | None, ...]
    """The tokens that precede each stream."""
    inputs: DeltaInputs


class DeltaNet(DeltaMechanism):
    """The delta rule without decay.

    >>> layer = DeltaNet(width=32, heads=4)
    >>> y, state = layer(torch.randn(2, 10, 32))
    >>> state.nbytes == layer(torch.randn(2, 1, 32), state)[1].nbytes
    True
    """

    config_type = DeltaNetConfig


class GatedDeltaNet(DeltaMechanism):
    """DeltaNet with a decay gate.

    >>> layer = GatedDeltaNet(width=32, heads=4)
    >>> layer.weights(torch.randn(1, 5, 32)).shape
    torch.Size([1, 4, 5, 5])
    """

    config_type = GatedDeltaNetConfig


class QDelta(DeltaMechanism):
    """Gated DeltaNet that also corrects the memory in the direction of the query.

    >>> layer = QDelta(width=32, heads=4)
    >>> x = torch.randn(2, 10, 32)
    >>> y, state = layer(x[:, :9])
    >>> last, state = layer(x[:, 9:], state)  # decoding uses the same recurrence as training
    >>> torch.allclose(last, layer(x)[0][:, 9:], atol=1e-5), state.length.tolist()
    (True, [10, 10])
    """

    config_type = QDeltaConfig


def _at_least_float32(x: Tensor) -> Tensor:
    """Convert half precision to float32: gates are multiplied over many tokens."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _convolve(x: Tensor, weight: Tensor | None, tail: Tensor | None = None) -> Tensor:
    return F.silu(x) if weight is None else short_conv(x, weight, tail)


def _l2_normalize(x: Keys) -> Keys:
    """Return x / sqrt(|x|^2 + 1e-6), computed with the RMS norm kernel."""
    x, width = _at_least_float32(x), x.shape[-1]
    return rms_norm(x, x.new_full((width,), width**-0.5), _NORM_EPS / width)
