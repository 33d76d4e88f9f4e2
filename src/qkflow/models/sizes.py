"""Named sizes, and the solver that gives two models the same number of parameters."""

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
"""The names of the sizes: each is within 2 % of what it says, with its own vocabulary and a tied head."""


def size(name: str, *, vocabulary: int | None = None, mechanism: str | tuple[str, ...] = "standard") -> DecoderConfig:
    """The config of a named size, with the vocabulary it was published for, or bytes, unless another is given.

    >>> size("1m").width, parameters(size("1m"))
    (128, 1007104)
    """
    if name not in _SHAPES:
        raise unknown("size", name, SIZES)
    width, layers, heads, hidden, usual = _SHAPES[name]
    return DecoderConfig(
        width=width,
        layers=layers,
        heads=heads,
        hidden=hidden,
        vocabulary=usual if vocabulary is None else vocabulary,
        mechanism=mechanism,
    )


@lru_cache(maxsize=1024)  # a mechanism's name means one thing in a process
def parameters(config: DecoderConfig) -> int:
    """How many parameters a decoder of this config has, without allocating them."""
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(config).parameters())


def matched(config: DecoderConfig, target: int) -> DecoderConfig:
    """The config with the feed-forward width that brings its parameters nearest to `target`.

    >>> baseline = size("1m")
    >>> other = matched(size("1m", mechanism="differential"), parameters(baseline))
    >>> abs(parameters(other) / parameters(baseline) - 1) < 0.001
    True
    """
    one, two = parameters(replace(config, hidden=1)), parameters(replace(config, hidden=2))
    hidden = 1 + round((target - one) / (two - one))
    if hidden < 1:
        raise UsageError(
            f"{config.mechanism} at width {config.width} has {one} parameters before its feed-forward network: "
            f"{target} cannot be matched; choose a larger size, or a smaller vocabulary"
        )
    return replace(config, hidden=hidden)
