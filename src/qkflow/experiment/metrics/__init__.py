"""Metric sets besides the held-out loss: recall accuracy and attention on rationales."""
