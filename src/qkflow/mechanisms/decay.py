r"""How much of a memory is kept from token to token, read off the token.

    \log \alpha_t = -A \, softplus(W x_t + b)            one for each head; A = e^{A_log}

It begins with A uniform in (0, 16] and with b such that softplus(b) is log-uniform in [0.001, 0.1].
https://arxiv.org/abs/2412.06464, after https://arxiv.org/abs/2405.21060
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkflow.mechanisms.base import projection


class Decay(nn.Module):
    """The logarithm of a share, so never positive, at least in float32.

    >>> Decay(width=32, heads=4)(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 4])
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.rate = projection(width, heads)
        self.A_log = nn.Parameter((16 * (1 - torch.rand(heads))).log())
        dt = torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(dt + (-torch.expm1(-dt)).log())  # softplus takes it to dt

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t h"]:
        """One for each token and head."""
        rate, bias, scale = precise(self.rate(x)), precise(self.dt_bias), precise(self.A_log).exp()
        return -scale * torch.logaddexp(rate + bias, rate.new_zeros(()))  # torch's softplus is cut off: exact to 1e-9


def precise(x: Tensor) -> Tensor:
    """At least in float32: what is multiplied over many tokens loses too much in fewer bits."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
