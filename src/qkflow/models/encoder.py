"""An encoder layer with any mechanism, in place of `torch.nn.TransformerEncoderLayer(batch_first=True)`.

norm_first=False    x ─┬─► mechanism ─► dropout ─► + ─► norm1 ─┬─► feed-forward ─► dropout ─► + ─► norm2 ─► y
                       └───────────────────────────┘           └──────────────────────────────┘

norm_first=True     x ─┬─► norm1 ─► mechanism ─► dropout ─► + ─┬─► norm2 ─► feed-forward ─► dropout ─► + ─► y
                       └────────────────────────────────────┘  └───────────────────────────────────────┘

The feed-forward network is linear2(dropout(activation(linear1(x)))).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qkflow.errors import UsageError, unknown
from qkflow.layout import Layout
from qkflow.mechanisms.base import Mechanism, Stream
from qkflow.mechanisms.registry import mechanism as find_mechanism
from qkflow.mechanisms.softmax import StandardAttention

Activation = str | Callable[[Tensor], Tensor]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class EncoderLayer(nn.Module):
    """`torch.nn.TransformerEncoderLayer(batch_first=True)` with a mechanism as its attention.

    The arguments have PyTorch's names and defaults, except that `batch_first` must be true. `mechanism` is a spec; the
    default, like PyTorch's layer, has no positions. The layer sets `causal`, `bias` and `dropout` of the mechanism,
    where it has them and the spec leaves them at their defaults. `layer` and `layers` tell it its depth.

    >>> layer = EncoderLayer(32, nhead=4, dim_feedforward=64, mechanism="differential:rotary_base=None").eval()
    >>> is_padding = torch.tensor([[False, False, True], [False, False, False]])
    >>> layer(torch.randn(2, 3, 32), src_key_padding_mask=is_padding).shape
    torch.Size([2, 3, 32])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = True,
        norm_first: bool = False,
        bias: bool = True,
        *,
        mechanism: str = "standard:rotary_base=None",
        causal: bool = False,
        layer: int = 0,
        layers: int = 1,
    ) -> None:
        super().__init__()
        if not batch_first:
            raise UsageError("batch_first=False is not supported: pass batches of [batch, tokens, width]")
        if isinstance(activation, str) and activation not in _ACTIVATIONS:
            raise unknown("activation", activation, _ACTIVATIONS)
        if not 0 <= dropout < 1:
            raise UsageError(f"dropout must be at least 0 and below 1, got {dropout}")
        factory = _with_defaults(find_mechanism(mechanism), causal=causal, bias=bias, dropout=dropout)
        self.self_attn: Mechanism = factory(d_model, nhead, layer, layers)
        if self.self_attn.group is not None:
            raise UsageError(
                f"{mechanism!r} reads phases, which the norms of an encoder layer would destroy: use a Classifier"
            )
        if self.self_attn.causal != causal:
            raise UsageError(f"{mechanism!r} has causal={self.self_attn.causal}, the layer causal={causal}")
        self.self_attn.batch_first = True  # pyright: ignore[reportArgumentType]  # nn.TransformerEncoder reads it
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias)
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias)
        self.dropout, self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout), nn.Dropout(dropout)
        self.activation = _ACTIVATIONS[activation] if isinstance(activation, str) else activation
        self.norm_first = norm_first

    @classmethod
    def from_torch(cls, layer: nn.TransformerEncoderLayer) -> EncoderLayer:
        """Return a layer of standard attention with a copy of the weights of PyTorch's layer.

        >>> source = nn.TransformerEncoderLayer(32, nhead=4, batch_first=True).eval()
        >>> x = torch.randn(2, 5, 32)
        >>> torch.allclose(EncoderLayer.from_torch(source)(x), source(x), atol=1e-5)
        True
        """
        attention = layer.self_attn
        copy = cls(
            attention.embed_dim,
            attention.num_heads,
            layer.linear1.out_features,
            layer.dropout.p,
            layer.activation,
            layer.norm1.eps,
            attention.batch_first,
            layer.norm_first,
            attention.in_proj_bias is not None,
        ).to(layer.linear1.weight)
        own = copy.self_attn
        assert isinstance(own, StandardAttention)
        weights = attention.state_dict()
        for kind in ("weight", "bias") if attention.in_proj_bias is not None else ("weight",):
            parts = (*weights[f"in_proj_{kind}"].chunk(3), weights[f"out_proj.{kind}"])
            for projection, part in zip((own.query, own.key, own.value, own.output), parts, strict=True):
                projection.get_parameter(kind).data.copy_(part)
        for name in ("linear1", "linear2", "norm1", "norm2"):
            copy.get_submodule(name).load_state_dict(layer.get_submodule(name).state_dict())
        return copy.train(layer.training)

    def forward(
        self,
        src: Stream,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Bool[Tensor, "b t"] | Float[Tensor, "b t"] | None = None,
        is_causal: bool = False,
        *,
        layout: Layout | None = None,
    ) -> Stream:
        """Return the output of each token, zero at padding.

        `src_key_padding_mask` is true (or minus infinity) at padding, which may be on either side and hold any values.
        A `layout` in its place saves every layer from computing it.
        """
        self._check_mask(src_mask, is_causal)
        if src_key_padding_mask is not None:
            if layout is not None:
                raise UsageError("got a src_key_padding_mask and a layout: pass one of them")
            layout = Layout.from_mask(~_is_padding(src_key_padding_mask))
        if layout is None:
            return self._layer(src, None)
        layout.check(src)
        return layout.zero_padding(self._layer(layout.zero_padding(src), layout))

    def _layer(self, x: Stream, layout: Layout | None) -> Stream:
        if self.norm_first:
            x = x + self._attend(self.norm1(x), layout)
            return x + self._feed_forward(self.norm2(x))
        x = self.norm1(x + self._attend(x, layout))
        return self.norm2(x + self._feed_forward(x))

    def _attend(self, x: Stream, layout: Layout | None) -> Stream:
        return self.dropout1(self.self_attn(x, layout=layout)[0])

    def _feed_forward(self, x: Stream) -> Stream:
        return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))

    def _check_mask(self, src_mask: Tensor | None, is_causal: bool) -> None:
        if is_causal and not self.self_attn.causal:
            raise UsageError("is_causal=True, but every token sees its whole sequence: construct with causal=True")
        if src_mask is not None and not is_causal:
            raise UsageError(
                "src_mask is not supported, because mechanisms choose their pairs themselves: construct with"
                " causal=True, or with a window in the mechanism, and leave it out"
            )


def _with_defaults(factory: Any, **options: Any) -> Any:
    """Set the options that the config has and that are at their defaults."""
    if not dataclasses.is_dataclass(factory):
        return factory
    defaults = {field.name: field.default for field in dataclasses.fields(factory)}
    changes = {
        name: value
        for name, value in options.items()
        if name in defaults and getattr(factory, name) == defaults[name] != value
    }
    return dataclasses.replace(factory, **changes) if changes else factory  # pyright: ignore[reportArgumentType]


def _is_padding(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    is_padding = mask == -torch.inf
    if not mask.is_floating_point() or not bool(((mask == 0) | is_padding).all()):
        raise UsageError("src_key_padding_mask must be boolean, true at padding, or hold 0 and minus infinity")
    return is_padding
