"""Softmax attention, with and without the attention map."""
