"""Tiny models of every mechanism, away from their start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qkflow.hf import QKFlowForCausalLM
from qkflow.models import Decoder, DecoderConfig

Make = Callable[..., QKFlowForCausalLM]


@pytest.fixture
def shape() -> Callable[..., DecoderConfig]:
    """The shape of a tiny decoder over a mechanism."""

    def tiny(mechanism: str | tuple[str, ...] = "standard", **options: Any) -> DecoderConfig:
        layers = 2 if isinstance(mechanism, str) else len(mechanism)
        sizes = {"width": 36 if "so3" in str(mechanism) else 32, "layers": layers, "heads": 2, "hidden": 24}
        return DecoderConfig(mechanism=mechanism, **{"vocabulary": 257, **sizes, **options})

    return tiny


@pytest.fixture
def decoder(shape: Callable[..., DecoderConfig]) -> Callable[..., Decoder]:
    """A decoder whose parameters are away from zero and one, which would hide mistakes behind them."""

    def make(mechanism: str | tuple[str, ...] = "standard", **options: Any) -> Decoder:
        model = Decoder(shape(mechanism, **options)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        return model

    return make


@pytest.fixture
def causal(decoder: Callable[..., Decoder]) -> Make:
    """The same for transformers, in double precision: a cache may then change nothing that is seen."""

    def make(mechanism: str | tuple[str, ...] = "standard", **options: Any) -> QKFlowForCausalLM:
        return QKFlowForCausalLM.from_decoder(decoder(mechanism, **options).double(), end=256)

    return make
