r"""The delta rule, token by token in float64: the definition that every faster form is tested against.

    x_t = k_t + \lambda_t q_t                                                       (1)  erase direction
    S_t = \alpha_t S_{t-1} (I - \beta_t x_t k_t^\top) + \beta_t v_t k_t^\top          (2)
    o_t = \sigma S_t q_t                                                            (3)

| symbol    | here             | shape       |                                |
|-----------|------------------|-------------|--------------------------------|
| q_t, k_t  | `q`, `k`         | `[n t h k]` |                                |
| v_t       | `v`              | `[n t h v]` |                                |
| \beta_t   | `beta`           | `[n t h]`   | write strength                 |
| \alpha_t  | `exp(log_alpha)` | `[n t h]`   | decay; 1 if `log_alpha` is None |
| \lambda_t | `lam`            | `[n t h]`   | 0 if None                      |
| S_t       | `S`              | `[n h v k]` |                                |

This is Q-Delta (https://arxiv.org/abs/2606.08804). With \lambda = 0 it is the gated delta rule
(https://arxiv.org/abs/2412.06464), and with \alpha = 1 as well the delta rule (https://arxiv.org/abs/2406.06484).
"""

from __future__ import annotations

import torch

from qkflow.ops.delta_rule.inputs import Gates, Keys, States, Values


def delta_rule_recurrent(
    q: Keys,
    k: Keys,
    v: Values,
    beta: Gates,
    log_alpha: Gates | None,
    lam: Gates | None,
    state: States | None,
    scale: float,
) -> tuple[Values, States]:
    """Outputs and the final state, both in float64."""
    q, k, v, beta = (tensor.double() for tensor in (q, k, v, beta))
    x = k if lam is None else k + lam.double().unsqueeze(-1) * q  # (1)
    alpha = torch.ones_like(beta) if log_alpha is None else log_alpha.double().exp()
    n, t, h, width = k.shape
    S = k.new_zeros(n, h, v.shape[-1], width) if state is None else state.double()
    outputs = []
    for i in range(t):
        S = S * alpha[:, i, :, None, None]
        error = v[:, i] - torch.einsum("nhvk,nhk->nhv", S, x[:, i])
        S = S + torch.einsum("nh,nhv,nhk->nhvk", beta[:, i], error, k[:, i])  # (2)
        outputs.append(torch.einsum("nhvk,nhk->nhv", S, q[:, i]))  # (3)
    return scale * torch.stack(outputs, 1), S
