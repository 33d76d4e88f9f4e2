r"""Attention maps of any mechanism, and statistics of them.

The model runs unchanged; each mechanism is then asked for its `weights` on the input that it received. Weights times
values is the output before the projection (a law of every mechanism), so the maps are those the layer computes with.

Statistics are computed from the shares of each row, a_s = |w_s| / \sum |w|, which leaves a softmax row unchanged. Maps
that are signed or do not sum to one (differential, delta rule, Kuramoto) have no published definition; this is ours.

    pooling     heads are averaged; layers are pooled by
      average   the mean
      max       the elementwise maximum, normalised again (ours)
      rollout   the last row of \prod_l (A_l + I) / 2 (Abnar & Zuidema, https://arxiv.org/abs/2005.00928)
    mass        m = \sum_{s \in rationale} a_s
    AC(tau)     the percentage of instances with m >= tau (ours: the published definition is unknown)
    entropy     H = -\sum_s a_s \log a_s in nats; exp(H) is the effective number of attended tokens

Instances without a rationale have mass NaN and do not count in AC. The area under AC from 0 to 1 is the mean mass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor, nn

from qkflow.errors import UsageError, unknown
from qkflow.mechanisms.base import Mechanism, Stream
from qkflow.models import Stack
from qkflow.probes.diagnostics import Diagnostic, diagnostics

Pooling = Literal["rollout", "average", "max"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
Map = Float[Tensor, "b _ t t"]
"""The map of one layer; layers of a hybrid stack may differ in their number of heads."""
Tokens = Sequence[int] | Int[Tensor, " t"]
Numbers = Float[Tensor, " n"] | Float[np.ndarray, " n"] | Sequence[float]

TAU = 0.5
"""The rationale mass from which attention counts as confident."""
_ROUNDING = 1e-6
"""Tolerance of `mass >= tau`: in float32, half of a uniform attention may sum to slightly less than 0.5."""


# Running a model


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerProbe:
    """The attention of one layer on one text."""

    weights: Float[Tensor, "h t s"]
    """Float32 on the CPU; rows need not sum to one."""
    diagnostics: tuple[Diagnostic, ...]


def attention_maps(model: Stack, tokens: Tokens) -> list[Float[Tensor, "h t s"]]:
    """Return the attention map of each layer on one text.

    >>> from qkflow.models import Decoder, DecoderConfig
    >>> config = DecoderConfig(width=32, layers=2, heads=4, hidden=64, mechanism=("standard", "differential"))
    >>> [tuple(layer.shape) for layer in attention_maps(Decoder(config), [72, 105, 33])]
    [(4, 3, 3), (2, 3, 3)]
    """
    return [layer.weights for layer in probe_layers(model, tokens)]


def probe_layers(model: Stack, tokens: Tokens) -> list[LayerProbe]:
    """Return the attention map and the diagnostics of each layer on one text.

    >>> from qkflow.models import Decoder, DecoderConfig
    >>> model = Decoder(DecoderConfig(width=32, layers=2, heads=4, hidden=64, mechanism="differential"))
    >>> [diagnostic.series for diagnostic in probe_layers(model, [72, 105])[0].diagnostics]
    [('learned', 'initial')]
    """
    with torch.no_grad():
        return [
            LayerProbe(weights=layer.weights(x)[0].float().cpu(), diagnostics=diagnostics(layer, x))
            for layer, x in mechanism_inputs(model, tokens)
        ]


def mechanism_inputs(model: Stack, tokens: Tokens) -> list[tuple[Mechanism, Stream]]:
    """Return every mechanism with its input when the model reads one text, without dropout."""
    ids, vocabulary = torch.as_tensor(tokens, dtype=torch.int64), model.embedding.num_embeddings
    if ids.ndim != 1 or not len(ids) or ids.min() < 0 or ids.max() >= vocabulary:
        raise UsageError(
            f"expected one row of at least one token from 0 to {vocabulary - 1}, got shape {list(ids.shape)}"
            f"{f' from {int(ids.min())} to {int(ids.max())}' if ids.numel() else ''}: use the model's tokenizer"
        )
    with eval_mode(model), torch.no_grad(), record_inputs(model.mechanisms) as inputs:
        model(ids[None].to(model.embedding.weight.device))
    return list(zip(model.mechanisms, inputs, strict=True))


@contextmanager
def record_inputs(modules: Sequence[nn.Module]) -> Iterator[list[Stream]]:
    """Collect the input of each module while a model runs inside the context."""
    inputs: list[Stream] = []

    def record(_: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.append(args[0])

    hooks = [module.register_forward_pre_hook(record) for module in modules]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, and restore the mode of every module on exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def cpu_float64(x: Tensor) -> Tensor:
    """Return a detached copy in float64 on the CPU (not every device has float64)."""
    return x.detach().to("cpu", torch.float64)


# Pooling heads and layers


def pool_maps(
    maps: Sequence[Map],
    lengths: Int[Tensor, " b"],
    pooling: Pooling = "average",
    *,
    query_positions: Int[Tensor, " b"] | None = None,
) -> Float[Tensor, "b t"]:
    """Return the share of each token in the attention of one query per row (default: the last); 0 at padding.

    >>> nearest, first = torch.eye(3)[None, None], torch.tensor([1.0, 0, 0]).expand(1, 1, 3, 3)
    >>> pool_maps([nearest, first], torch.tensor([3])).tolist()
    [[0.5, 0.0, 0.5]]
    >>> pool_maps([nearest, first], torch.tensor([3]), "rollout").tolist()
    [[0.5, 0.0, 0.5]]
    """
    if pooling not in POOLINGS:
        raise unknown("pooling", pooling, POOLINGS)
    if not maps:
        raise UsageError("got no attention maps: read the model with maps=True")
    b, _, t, _ = maps[0].shape
    if len(lengths) != b or not b or int(lengths.min()) < 1 or int(lengths.max()) > t:
        raise UsageError(f"lengths must be one number from 1 to {t} for each of {b} rows, got {lengths.tolist()}")
    lengths = lengths.to(maps[0].device)
    query = lengths - 1 if query_positions is None else query_positions.to(lengths.device)
    valid = torch.arange(t, device=lengths.device) < lengths[:, None]
    if pooling == "rollout":
        return _rollout(maps, query, valid)
    rows = torch.stack([_mean_over_heads(layer[torch.arange(b), :, query], valid[:, None]) for layer in maps])
    return l1_normalize(rows.mean(0) if pooling == "average" else rows.amax(0))


def l1_normalize(x: Float[Tensor, "*n t"]) -> Float[Tensor, "*n t"]:
    """Return |x| divided by the sum of each row; rows of zeros stay zero.

    >>> l1_normalize(torch.tensor([[3.0, -1.0], [0.0, 0.0]])).tolist()
    [[0.75, 0.25], [0.0, 0.0]]
    """
    size = x.abs()
    total = size.sum(-1, keepdim=True)
    return size / total.masked_fill(total == 0, 1)


def _mean_over_heads(rows: Float[Tensor, "b h *q t"], valid: Tensor) -> Float[Tensor, "b *q t"]:
    return l1_normalize(l1_normalize(_at_least_float32(rows).where(valid, 0)).mean(1))


def _at_least_float32(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    return x if x.dtype == torch.float64 else x.float()


def _rollout(maps: Sequence[Map], query: Int[Tensor, " b"], valid: Tensor) -> Float[Tensor, "b t"]:
    t = valid.shape[1]
    row = torch.nn.functional.one_hot(query, t).to(_at_least_float32(maps[0][:0]).dtype)
    identity = torch.eye(t, dtype=row.dtype, device=row.device)
    both_valid = valid[:, None, :, None] & valid[:, None, None, :]
    for layer in reversed(maps):  # vector-matrix products only, never a product of two matrices
        row = (row[:, None] @ l1_normalize(_mean_over_heads(layer, both_valid) + identity))[:, 0]
    return row


# Statistics of attention rows


def rationale_mass(attention: Float[Tensor, "b t"], rationale: Bool[Tensor, "b t"]) -> Float[Tensor, " b"]:
    """Return the share of each row's attention on its rationale; NaN for rows without a rationale.

    >>> rationale_mass(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[True, False, True]])).item()
    0.699999988079071
    >>> rationale_mass(torch.zeros(1, 2), torch.tensor([[True, False]])).item()
    0.0
    """
    inside = l1_normalize(attention).where(rationale, 0).sum(-1)
    return inside.masked_fill(~rationale.any(-1), math.nan)


def confidence(mass: Numbers, tau: float = TAU) -> float:
    """Return AC(tau), the percentage of instances with at least this mass; NaN masses do not count.

    >>> confidence([0.2, 0.5, 0.7, 0.9, math.nan], tau=0.5)
    75.0
    """
    return float(confidence_curve(mass, [tau])[0])


def confidence_curve(mass: Numbers, taus: Sequence[float] | Float[np.ndarray, " k"]) -> Float64[np.ndarray, " k"]:
    """Return AC at each tau.

    >>> confidence_curve([0.2, 0.5, 0.9], [0.0, 0.5, 1.0]).round(1).tolist()
    [100.0, 66.7, 0.0]
    """
    masses = np.asarray(mass, dtype=np.float64)
    masses = masses[~np.isnan(masses)]
    is_confident = reaches(masses[:, None], np.asarray(taus, dtype=np.float64))
    return 100 * is_confident.mean(0) if len(masses) else np.full(len(taus), math.nan)


def reaches(mass: np.ndarray, tau: float | np.ndarray) -> np.ndarray:
    """Return whether each mass is at least tau, up to rounding.

    >>> reaches(np.array([0.4, 0.4999999, 0.9]), 0.5).tolist()
    [False, True, True]
    """
    return mass >= tau - _ROUNDING


def attention_entropy(attention: Float[Tensor, "b t"]) -> Float[Tensor, " b"]:
    """Return the entropy of each row in nats; NaN for rows of zeros.

    >>> attention_entropy(torch.tensor([[0.0, 1.0], [0.5, 0.5]])).exp().tolist()
    [1.0, 2.0]
    """
    shares = l1_normalize(attention)
    entropy = -torch.xlogy(shares, shares).sum(-1) + 0.0  # no negative zero
    return entropy.masked_fill((shares == 0).all(-1), math.nan)


def effective_tokens(attention: Float[Tensor, "b t"]) -> Float[Tensor, " b"]:
    """Return exp(entropy): the number of tokens that a uniform attention of the same entropy has.

    >>> effective_tokens(torch.tensor([[0.25, 0.25, 0.25, 0.25, 0.0]])).item()
    4.0
    """
    return attention_entropy(attention).exp()


# Summary of a model on one text


@dataclass(frozen=True, kw_only=True)
class AttentionLink:
    """The weight of one token in the attention of a later one, in one head; positions and heads count from 0."""

    query: int
    key: int
    head: int
    weight: float


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """Attention statistics of one layer, means over heads; NaN where a layer attends to nothing."""

    entropy_last: float
    """Entropy of the last token's attention, in nats."""
    effective_tokens_last: float
    entropy_mean: float
    """Mean over all tokens."""
    effective_tokens_mean: float
    strongest: AttentionLink | None
    """The largest weight between two different tokens in any head; `None` for a single token."""


@dataclass(frozen=True, kw_only=True)
class AttentionStats:
    """Attention statistics of a model on one text."""

    layers: tuple[LayerAttention, ...]
    pooled: Mapping[Pooling, tuple[float, ...]]
    """The share of each token in the last token's attention, for each pooling."""


@dataclass(frozen=True, kw_only=True)
class RationaleConfidence:
    """How much of the last token's attention is on given tokens."""

    positions: tuple[int, ...]
    mass: Mapping[Pooling, float]
    uniform: float
    """The mass under uniform attention."""


def attention_stats(maps: Sequence[Float[Tensor, "_ t t"]]) -> AttentionStats:
    """Return the statistics of every layer, and the pooled attention of the last token.

    >>> uniform = torch.ones(1, 2, 2).tril() / torch.tensor([[1.0], [2.0]])
    >>> stats = attention_stats([uniform])
    >>> stats.layers[0].effective_tokens_last, stats.pooled["average"]
    (2.0, (0.5, 0.5))
    """
    batched = [layer.double()[None] for layer in maps]
    lengths = torch.tensor([batched[0].shape[-1]])
    pooled: dict[Pooling, tuple[float, ...]] = {
        pooling: tuple(pool_maps(batched, lengths, pooling)[0].tolist()) for pooling in POOLINGS
    }
    return AttentionStats(layers=tuple(map(_layer_attention, maps)), pooled=pooled)


def rationale_confidence(stats: AttentionStats, positions: Sequence[int]) -> RationaleConfidence:
    """Return the mass on the given tokens for each pooling."""
    n_tokens = len(stats.pooled["average"])
    rationale = torch.zeros(1, n_tokens, dtype=torch.bool)
    rationale[0, list(positions)] = True
    mass: dict[Pooling, float] = {
        pooling: float(rationale_mass(torch.tensor([shares], dtype=torch.float64), rationale))
        for pooling, shares in stats.pooled.items()
    }
    return RationaleConfidence(positions=tuple(positions), mass=mass, uniform=len(positions) / n_tokens)


def token_positions(words: str, pieces: Sequence[bytes]) -> tuple[int, ...]:
    """Return the positions of the tokens that spell the given words, wherever they occur as whole words.

    >>> token_positions("author guards", [b"the", b" auth", b"or", b" of", b" guards"])
    (1, 2, 4)
    """
    text = b"".join(pieces).decode("utf-8", "surrogateescape")
    if not words.split():
        raise UsageError("--rationale is empty: give words of the text")
    spans = []
    for word in words.split():
        matches = [match.span() for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text)]
        if not matches:
            raise UsageError(f"--rationale {word!r} is not a word of the text: give words of the text")
        spans += [tuple(len(text[:end].encode("utf-8", "surrogateescape")) for end in span) for span in matches]
    starts = [sum(map(len, pieces[:position])) for position in range(len(pieces))]
    return tuple(
        position
        for position, (start, piece) in enumerate(zip(starts, pieces, strict=True))
        if any(start < end and first < start + len(piece) for first, end in spans)
    )


def _layer_attention(weights: Float[Tensor, "h t t"]) -> LayerAttention:
    heads, n_tokens, _ = weights.shape
    entropy = attention_entropy(weights.double().flatten(0, 1)).unflatten(0, (heads, n_tokens))
    last, flat = entropy[:, -1], entropy.flatten()
    return LayerAttention(
        entropy_last=_finite_mean(last),
        effective_tokens_last=_finite_mean(last.exp()),
        entropy_mean=_finite_mean(flat),
        effective_tokens_mean=_finite_mean(flat.exp()),
        strongest=_strongest_link(weights),
    )


def _strongest_link(weights: Float[Tensor, "h t t"]) -> AttentionLink | None:
    n_tokens = weights.shape[-1]
    if n_tokens < 2:
        return None
    size = weights.abs().nan_to_num(0.0) * torch.ones(n_tokens, n_tokens).tril(-1)
    index = int(size.argmax())
    head, query, key = index // n_tokens**2, index // n_tokens % n_tokens, index % n_tokens
    return AttentionLink(query=query, key=key, head=head, weight=float(weights[head, query, key]))


def _finite_mean(values: Float[Tensor, " n"]) -> float:
    finite = values[values.isfinite()]
    return float(finite.mean()) if len(finite) else math.nan
