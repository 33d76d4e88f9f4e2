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
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkflow.errors import UsageError, unknown
from qkflow.layout import Layout
from qkflow.mechanisms.base import Mechanism, Stream
from qkflow.mechanisms.registry import mechanism as find_mechanism
from qkflow.mechanisms.softmax import StandardAttention
from qkflow.ops.csrc.eager import has_values

Activation = str | Callable[[Tensor], Tensor]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class EncoderLayer(nn.Module):
    """`torch.nn.TransformerEncoderLayer(batch_first=True)` with a mechanism as its attention.

    The arguments have PyTorch's names, order and defaults, except that `batch_first` must be true, as it is by default.
    `mechanism` is a spec; the default, like PyTorch's layer, has no positions. The layer sets `causal`, `bias` and
    `dropout` of the mechanism, where it has them and the spec leaves them at their defaults. `layer` and `layers` tell
    it its depth.

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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
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
        self.d_model, self.nhead = d_model, nhead
        if self.self_attn.group is not None:
            raise UsageError(
                f"{mechanism!r} reads phases, which the norms of an encoder layer would destroy: use a Classifier"
            )
        if self.self_attn.causal != causal:
            raise UsageError(
                f"{mechanism!r} has causal={self.self_attn.causal}, the layer causal={causal}: make them equal"
            )
        self.self_attn.batch_first = True  # pyright: ignore[reportArgumentType]  # nn.TransformerEncoder reads it
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias)
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias)
        self.dropout, self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout), nn.Dropout(dropout)
        self.activation = _ACTIVATIONS[activation] if isinstance(activation, str) else activation
        self.norm_first = norm_first
        if device is not None or dtype is not None:  # tensors without data cannot be moved
            self.to(device=device, dtype=dtype)

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
            layer.linear1.weight.device,
            layer.linear1.weight.dtype,
        )
        target = cast(StandardAttention, copy.self_attn)
        weights = attention.state_dict()
        for kind in ("weight", "bias") if attention.in_proj_bias is not None else ("weight",):
            parts = (*weights[f"in_proj_{kind}"].chunk(3), weights[f"out_proj.{kind}"])
            for projection, part in zip((target.query, target.key, target.value, target.output), parts, strict=True):
                projection.get_parameter(kind).data.copy_(part)
        for name in ("linear1", "linear2", "norm1", "norm2"):
            copy.get_submodule(name).load_state_dict(layer.get_submodule(name).state_dict())
        return copy.train(layer.training)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        layout: Layout | None = None,
    ) -> Tensor:
        """Return the output of each token, zero at padding; `src` is [b, t, d], or one sequence [t, d].

        `src_mask`, [t, t] or [b * heads, t, t], is true where a token must not attend to another, or is added to the
        scores. Standard attention and its variants take it; a causal layer applies it as well. The attention output of
        a token that may attend to nothing is zero before the output projection, as in PyTorch's training mode (its
        fast path for inference returns NaN). `is_causal` says that `src_mask` is causal, which is checked, except in
        compiled graphs; then a causal layer does not apply it.

        `src_key_padding_mask` is true (or minus infinity) at padding, which may be on either side and hold any values.
        A `layout` in its place saves every layer from computing it.
        """
        if src.ndim not in (2, 3) or src.shape[-1] != self.d_model:
            raise UsageError(
                f"src must be [batch, tokens, {self.d_model}] or [tokens, {self.d_model}], got {[*src.shape]}"
            )
        if src.ndim == 2:
            padding = None if src_key_padding_mask is None else src_key_padding_mask.unsqueeze(0)
            return self.forward(src.unsqueeze(0), src_mask, padding, is_causal, layout=layout).squeeze(0)
        mask = self._allowed_pairs(src, src_mask, is_causal)
        if src_key_padding_mask is not None:
            if layout is not None:
                raise UsageError("got a src_key_padding_mask and a layout: pass one of them")
            layout = Layout.from_mask(~_is_padding(src_key_padding_mask))
        if layout is None:
            return self._layer(src, mask, None)
        layout.check(src)
        return layout.zero_padding(self._layer(layout.zero_padding(src), mask, layout))

    def _layer(self, x: Stream, mask: Tensor | None, layout: Layout | None) -> Stream:
        if self.norm_first:
            x = x + self._attend(self.norm1(x), mask, layout)
            return x + self._feed_forward(self.norm2(x))
        x = self.norm1(x + self._attend(x, mask, layout))
        return self.norm2(x + self._feed_forward(x))

    def _attend(self, x: Stream, mask: Tensor | None, layout: Layout | None) -> Stream:
        options = {} if mask is None else {"mask": mask}  # only standard attention takes it
        return self.dropout1(self.self_attn(x, layout=layout, **options)[0])

    def _feed_forward(self, x: Stream) -> Stream:
        return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))

    def _allowed_pairs(self, src: Stream, src_mask: Tensor | None, is_causal: bool) -> Tensor | None:
        """Return the mask in the form of `StandardAttention`; None if the mechanism needs none."""
        if src_mask is None:
            if is_causal and not self.self_attn.causal:
                raise UsageError(
                    "is_causal=True, but every token sees its whole sequence: pass a causal src_mask, or construct with"
                    " causal=True"
                )
            return None
        b, t = src.shape[:2]
        shapes = (t, t), (b * self.nhead, t, t)
        is_number = src_mask.is_floating_point()
        if src_mask.shape not in shapes or not (is_number or src_mask.dtype == torch.bool):
            raise UsageError(
                f"src_mask must be boolean or floating-point, of shape {[*shapes[0]]} or {[*shapes[1]]}, got"
                f" {src_mask.dtype} {[*src_mask.shape]}"
            )
        if is_causal:
            if has_values(src_mask) and not _is_causal(src_mask):
                raise UsageError("is_causal=True, but src_mask is not causal: pass is_causal=False, or a causal mask")
            if self.self_attn.causal:
                return None
        if not isinstance(self.self_attn, StandardAttention):
            raise UsageError(
                f"{type(self.self_attn).__name__} does not support src_mask, because it chooses its pairs itself: for a"
                " causal mask construct with causal=True and pass is_causal=True, otherwise use standard attention"
            )
        mask = src_mask if is_number else ~src_mask
        return mask[None, None] if mask.ndim == 2 else mask.unflatten(0, (b, self.nhead))


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


def _is_causal(mask: Tensor) -> bool:
    is_later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    expected = is_later if mask.dtype == torch.bool else torch.zeros_like(mask).masked_fill(is_later, -torch.inf)
    return bool((mask == expected).all())


def _is_padding(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    is_padding = mask == -torch.inf
    if not mask.is_floating_point() or not bool(((mask == 0) | is_padding).all()):
        raise UsageError("src_key_padding_mask must be boolean, true at padding, or hold 0 and minus infinity")
    return is_padding
