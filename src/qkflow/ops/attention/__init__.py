"""Softmax attention, with and without the attention map."""

from qkflow.ops.attention.dispatch import BACKENDS, attention, choose_backend, requested_backend, use_backend
from qkflow.ops.attention.naive import Mask, attention_map, attention_naive, causal_mask

__all__ = [
    "BACKENDS",
    "Mask",
    "attention",
    "attention_map",
    "attention_naive",
    "causal_mask",
    "choose_backend",
    "requested_backend",
    "use_backend",
]
