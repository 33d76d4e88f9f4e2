"""What the benchmarks time: passes through an operator, training steps and decoded tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkflow import Decoder

Call = Callable[[], Tensor]
Function = Callable[[], object]


def forward(call: Call, leaves: Sequence[Tensor]) -> Function:
    """Return a forward pass without gradients."""
    return torch.no_grad()(call)


def forward_backward(call: Call, leaves: Sequence[Tensor]) -> Function:
    """Return a forward pass and a backward pass to the leaves."""
    grad_output = torch.randn_like(call())
    return lambda: torch.autograd.grad(call(), leaves, grad_output, allow_unused=True)


PASSES = {"forward": forward, "forward and backward": forward_backward}


def next_token_loss(logits: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def training_step(model: nn.Module, loss: Call, optimizer: torch.optim.Optimizer | None = None) -> Function:
    """Return a training step: loss, gradients, clipping, AdamW."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def decode_tokens(model: Decoder, past: int, tokens: int) -> Function:
    """Return a function that appends `tokens` tokens per call. Reusing an old state would copy it."""
    token = torch.zeros(1, 1, dtype=torch.long)
    with torch.inference_mode():
        _, state = model(torch.randint(0, 256, (1, past)))
        _, state = model(token, state)  # doubles the buffers

    @torch.inference_mode()
    def decode() -> None:
        nonlocal state
        for _ in range(tokens):
            _, state = model(token, state)

    return decode
