"""Models made of mechanisms."""

from qkflow.models.blocks import Block, RMSNorm, SwiGLU
from qkflow.models.decoder import Decoder, DecoderConfig, DecoderState
from qkflow.models.generation import Sampling, generate, stream
from qkflow.models.sizes import SIZES, matched, parameters, size

__all__ = [
    "SIZES",
    "Block",
    "Decoder",
    "DecoderConfig",
    "DecoderState",
    "RMSNorm",
    "Sampling",
    "SwiGLU",
    "generate",
    "matched",
    "parameters",
    "size",
    "stream",
]
