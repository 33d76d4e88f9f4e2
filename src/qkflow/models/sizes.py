"""Named model sizes, and matching of parameter counts."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from qkflow.errors import UsageError, unknown
from qkflow.models.decoder import Decoder, DecoderConfig

GPT2_VOCABULARY = 50257
LLAMA_VOCABULARY = 32000

_SHAPES = {  # name: (width, layers, heads, hidden, vocabulary)
    "100k": (64, 2, 4, 132, 257),
    "500k": (96, 4, 4, 284, 257),
    "1m": (128, 5, 4, 336, 257),
    "5m": (256, 6, 4, 720, 257),
    "60m": (512, 8, 8, 2112, GPT2_VOCABULARY),
    "150m": (768, 16, 12, 2000, GPT2_VOCABULARY),
    "340m": (1024, 21, 16, 3392, LLAMA_VOCABULARY),
    "350m": (1024, 24, 16, 2688, GPT2_VOCABULARY),
    "1.3b": (2048, 21, 16, 6832, LLAMA_VOCABULARY),
}

SIZES = tuple(_SHAPES)
"""The names of the sizes; parameter counts are within 2 % of the name, with the size's vocabulary and a tied head."""


def size(name: str, *, vocabulary: int | None = None, mechanism: str | tuple[str, ...] = "standard") -> DecoderConfig:
    """Return the config of a named size; `vocabulary` defaults to the published one, or to bytes.

    >>> size("1m").width, parameters(size("1m"))
    (128, 1007104)
    """
    if name not in _SHAPES:
        raise unknown("size", name, SIZES)
    width, layers, heads, hidden, published = _SHAPES[name]
    return DecoderConfig(
        width=width,
        layers=layers,
        heads=heads,
        hidden=hidden,
        vocabulary=published if vocabulary is None else vocabulary,
        mechanism=mechanism,
    )


@lru_cache(maxsize=1024)
def parameters(config: DecoderConfig) -> int:
    """Return the number of parameters of a decoder, without allocating them."""
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(config).parameters())


def matched(config: DecoderConfig, target: int) -> DecoderConfig:
    """Return the config with the feed-forward width whose parameter count is nearest to `target`.

    >>> baseline = size("1m")
    >>> other = matched(size("1m", mechanism="differential"), parameters(baseline))
    >>> abs(parameters(other) / parameters(baseline) - 1) < 0.001
    True
    """
    one, two = parameters(replace(config, hidden=1)), parameters(replace(config, hidden=2))
    hidden = 1 + round((target - one) / (two - one))
    if hidden < 1:
        raise UsageError(
            f"cannot match {target} parameters: {config.mechanism} at width {config.width} has {one} with the smallest"
            " feed-forward network; choose a larger size or a smaller vocabulary"
        )
    return replace(config, hidden=hidden)
