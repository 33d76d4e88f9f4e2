"""What a forward call answers with, without what transformers spends on making it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutputWithPast

Output = TypeVar("Output", CausalLMOutputWithPast, SequenceClassifierOutputWithPast)


def output(kind: type[Output], values: dict[str, Any]) -> Output:
    """`kind(**values)` in a fifth of the time, which a step with a cache would feel.

    >>> output(CausalLMOutputWithPast, {"loss": None, "logits": torch.ones(1)}).to_tuple()
    (tensor([1.]),)
    """
    if torch.compiler.is_compiling():
        return kind(**values)
    made = kind.__new__(kind)
    for name, value in values.items():
        if value is not None:
            made[name] = value
    return made


for _kind in (CausalLMOutputWithPast, SequenceClassifierOutputWithPast):
    _kind()  # the first of its kind becomes known to torch's trees
