"""Tiny models of every mechanism, with random parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qkflow.hf import QKFlowForCausalLM
from qkflow.models import Decoder, DecoderConfig

MakeModel = Callable[..., QKFlowForCausalLM]


@pytest.fixture
def shape() -> Callable[..., DecoderConfig]:
    """The config of a tiny decoder over a mechanism."""

    def tiny(mechanism: str | tuple[str, ...] = "standard", **options: Any) -> DecoderConfig:
        layers = 2 if isinstance(mechanism, str) else len(mechanism)
        sizes = {"width": 36 if "so3" in str(mechanism) else 32, "layers": layers, "heads": 2, "hidden": 24}
        return DecoderConfig(mechanism=mechanism, **{"vocabulary": 257, **sizes, **options})

    return tiny


@pytest.fixture
def decoder(shape: Callable[..., DecoderConfig]) -> Callable[..., Decoder]:
    """A decoder with random parameters: initial zeros and ones could hide mistakes."""

    def make(mechanism: str | tuple[str, ...] = "standard", **options: Any) -> Decoder:
        model = Decoder(shape(mechanism, **options)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        return model

    return make


@pytest.fixture
def causal(decoder: Callable[..., Decoder]) -> MakeModel:
    """The same for transformers, in float64, so that a cache changes no visible digit."""

    def make(mechanism: str | tuple[str, ...] = "standard", **options: Any) -> QKFlowForCausalLM:
        return QKFlowForCausalLM.from_decoder(decoder(mechanism, **options).double(), end=256)

    return make
