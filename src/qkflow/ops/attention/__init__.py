"""Softmax attention, with and without the attention map."""

from qkflow.ops.attention.fused import attention
from qkflow.ops.attention.naive import Mask, attention_map, attention_naive, causal_mask

__all__ = ["Mask", "attention", "attention_map", "attention_naive", "causal_mask"]
