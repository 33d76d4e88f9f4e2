"""Models: decoder, classifier, encoder layer, and the one-layer model of the theory."""

from qkflow.models.blocks import Block, RMSNorm, SwiGLU
from qkflow.models.classifier import Classifier, ClassifierConfig
from qkflow.models.decoder import Decoder, DecoderConfig
from qkflow.models.encoder import EncoderLayer
from qkflow.models.generation import Sampling, generate, stream
from qkflow.models.sizes import SIZES, matched, parameters, size
from qkflow.models.stack import DecoderState, Stack, StackConfig

__all__ = [
    "SIZES",
    "Block",
    "Classifier",
    "ClassifierConfig",
    "Decoder",
    "DecoderConfig",
    "DecoderState",
    "EncoderLayer",
    "RMSNorm",
    "Sampling",
    "Stack",
    "StackConfig",
    "SwiGLU",
    "generate",
    "matched",
    "parameters",
    "size",
    "stream",
]
