r"""Kuramoto attention on the torus: tokens are phases that synchronize (https://arxiv.org/abs/2606.11585).

    s_{tu} = \tau \sum_j g_j \cos(\theta_{uj} - \theta_{tj} + \omega_j (u - t))      gated cosines, with a drift   (1)
    A_{tu} = softmax_u s_{tu}                                                                                      (2)
    \Delta\theta_{tj} = \eta_j \sum_u A_{tu} \sin(\theta_{uj} - \theta_{tj})         Kuramoto coupling             (3)

With frustration (Sakaguchi's phase lag \alpha and harmonics m) the coupling is

    \Delta\theta_{tj} = \eta_j \sum_m a_{mj} \sum_u A_{tu} \sin(m (\theta_{uj} - \theta_{tj}) + \alpha_{mj})       (4)

| symbol   | here    | shape       |
|----------|---------|-------------|
| \theta_t | `theta` | `[b t h j]` |
| A        | `map`   | `[b h t u]` |

These functions form every pair of phases in memory. `fused.py` computes the same without.
"""

from __future__ import annotations

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

Map = Float[Tensor, "b h t u"]


def coupling(theta: Float[Tensor, "b t h j"], map: Map) -> Float[Tensor, "b t h j"]:
    r"""Equation (3) for \eta = 1.

    >>> theta = torch.tensor([0.0, torch.pi / 2]).view(1, 2, 1, 1)
    >>> coupling(theta, torch.tensor([[[[0.0, 0.0], [1.0, 0.0]]]])).flatten().tolist()
    [0.0, -1.0]
    """
    difference = theta[:, None] - theta[:, :, None]  # [b t u h j]: theta_u - theta_t
    return einsum(map, difference.sin(), "b h t u, b t u h j -> b t h j")


def energy(theta: Float[Tensor, "b t h j"], map: Map) -> Float[Tensor, "b t h"]:
    r"""E_t = -\sum_u A_{tu} \sum_j \cos(\theta_{uj} - \theta_{tj}); equation (3) is its gradient descent.

    >>> energy(torch.zeros(1, 2, 1, 3), torch.tensor([[[[1.0, 0.0], [0.5, 0.5]]]])).flatten().tolist()
    [-3.0, -3.0]
    """
    difference = theta[:, None] - theta[:, :, None]
    return -einsum(map, difference.cos(), "b h t u, b t u h j -> b t h")


def order_parameter(theta: Float[Tensor, "*n t j"]) -> Float[Tensor, "*n j"]:
    r"""R_j = |\frac{1}{T} \sum_t e^{i \theta_{tj}}|: 0 for evenly spread phases, 1 for equal phases.

    >>> order_parameter(torch.tensor([[0.0, 0.3], [torch.pi, 0.3]])).round(decimals=6).tolist()
    [0.0, 1.0]
    """
    return torch.linalg.vector_norm(torch.stack([theta.cos(), theta.sin()], -1).mean(-3), dim=-1)
