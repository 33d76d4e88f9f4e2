r"""Muon: orthogonalized momentum for the hidden matrices, AdamW for all other parameters.

For the weight W [m, n] of a linear layer in a block, with gradient G and learning rate eta:

    1. B = mu B + (1 - mu) G                 momentum
    2. M = mu B + (1 - mu) G                 Nesterov's look-ahead
    3. O = newton_schulz(M)                  close to U V^T, where M = U S V^T
    4. W = (1 - eta lambda) W - 0.2 eta sqrt(max(m, n)) O

The factor in step 4 gives updates the root mean square that AdamW's have, so one learning rate serves both. See Jordan
et al., "Muon: an optimizer for hidden layers in neural networks" (2024), and Liu et al., "Muon is scalable for LLM
training" (2025), for the factor. `torch.optim.Muon` computes step 3 in bfloat16, which most CPUs emulate; this one
computes it in float32, for all matrices of one shape at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from qkflow.ops.newton_schulz import newton_schulz

MOMENTUM = 0.95
_RMS = 0.2
"""The root mean square of AdamW's updates, relative to the learning rate."""


class Muon(torch.optim.AdamW):
    """AdamW, except for parameter groups with `muon` true, whose matrices take the steps above."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make one step."""
        for group in self.param_groups:
            if group["muon"]:
                self._step_matrices(group)
        super().step(closure)  # skips the matrices, whose gradients are gone

    def _step_matrices(self, group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_shape.setdefault(parameter.shape, []).append(parameter)
        for shape, parameters in by_shape.items():
            gradients = torch.stack([parameter.grad for parameter in parameters if parameter.grad is not None])
            buffers = [self._buffer(parameter) for parameter in parameters]
            for buffer, gradient in zip(buffers, gradients.unbind(), strict=True):
                buffer.lerp_(gradient, 1 - MOMENTUM)
                gradient.lerp_(buffer, MOMENTUM)
            rate = group["lr"] * _RMS * math.sqrt(max(shape))
            for parameter, update in zip(parameters, newton_schulz(gradients).unbind(), strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=rate)
                parameter.grad = None

    def _buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


def hidden_matrices(blocks: Iterable[nn.Module]) -> set[Tensor]:
    """The weights of the linear layers in the blocks of a model: the parameters that Muon orthogonalizes."""
    return {module.weight for block in blocks for module in block.modules() if isinstance(module, nn.Linear)}
