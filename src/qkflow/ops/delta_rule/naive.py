r"""The delta rule as it is published, token by token in float64: the truth that every faster form is held to.

    x_t = k_t + \lambda_t q_t
    S_t = \alpha_t S_{t-1} (I - \beta_t x_t k_t^\top) + \beta_t v_t k_t^\top
    o_t = \sigma S_t q_t                                             S: [v, k], \sigma = 1 / \sqrt{k} unless given

Q-Delta, https://arxiv.org/abs/2606.08804. Without \lambda it is the gated delta rule (https://arxiv.org/abs/2412.06464),
without \alpha besides the delta rule (https://arxiv.org/abs/2406.06484).
"""

from __future__ import annotations

import torch

from qkflow.ops.delta_rule.inputs import Inputs, Memories, Values


def recurrent(given: Inputs, state: Memories | None, scale: float) -> tuple[Values, Memories]:
    """Outputs, and the memory after the last token, both in float64."""
    q, k, v, beta = (x.double() for x in given[:4])
    x = k if given.lam is None else k + given.lam.double().unsqueeze(-1) * q
    alpha = torch.ones_like(beta) if given.log_alpha is None else given.log_alpha.double().exp()
    n, t, h, width = k.shape
    S = k.new_zeros(n, h, v.shape[-1], width) if state is None else state.double()
    outputs = []
    for i in range(t):
        S = S * alpha[:, i, :, None, None]
        error = v[:, i] - torch.einsum("nhvk,nhk->nhv", S, x[:, i])
        S = S + torch.einsum("nh,nhv,nhk->nhvk", beta[:, i], error, k[:, i])
        outputs.append(torch.einsum("nhvk,nhk->nhv", S, q[:, i]))
    return scale * torch.stack(outputs, 1), S
