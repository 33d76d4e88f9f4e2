r"""The delta rule, token by token in float64: the definition that every faster form is tested against.

    S_t = S_{t-1} A_t (I - \beta_t x_t k_t^\top) + \beta_t v_t k_t^\top,   A_t = diag(\alpha_t)        (1)
    o_t = \sigma S_t q_t                                                                            (2)

| symbol    | here             | shape                      |                                       |
|-----------|------------------|----------------------------|---------------------------------------|
| q_t, k_t  | `q`, `k`         | `[n t h k]`                |                                       |
| v_t       | `v`              | `[n t h v]`                |                                       |
| \beta_t   | `beta`           | `[n t h]`                  | write strength                        |
| \alpha_t  | `exp(log_alpha)` | `[n t h]` or `[n t h k]`   | decay; 1 if `log_alpha` is None       |
| x_t       | `erase`          | `[n t h k]`                | direction that is read and corrected; k_t if None |
| S_t       | `S`              | `[n h v k]`                |                                       |

| rule                                              | x                  | \alpha         |
|---------------------------------------------------|--------------------|----------------|
| delta rule, https://arxiv.org/abs/2406.06484      | k                  | 1              |
| gated delta rule, https://arxiv.org/abs/2412.06464 | k                 | per head       |
| Kimi delta attention, https://arxiv.org/abs/2510.26692 | k             | per channel    |
| Q-Delta, https://arxiv.org/abs/2606.08804         | k + \lambda q      | per head       |
| Comba, https://arxiv.org/abs/2506.02475           | a multiple of k    | per head       |
"""

from __future__ import annotations

import torch

from qkflow.ops.delta_rule.inputs import Decays, Gates, Keys, States, Values


def delta_rule_recurrent(
    q: Keys,
    k: Keys,
    v: Values,
    beta: Gates,
    log_alpha: Decays | None,
    erase: Keys | None,
    state: States | None,
    scale: float,
) -> tuple[Values, States]:
    """Outputs and the final state, both in float64."""
    q, k, v, beta = (tensor.double() for tensor in (q, k, v, beta))
    x = k if erase is None else erase.double()
    alpha = torch.ones_like(beta) if log_alpha is None else log_alpha.double().exp()
    alpha = alpha if alpha.ndim == 4 else alpha.unsqueeze(-1)
    n, t, h, width = k.shape
    S = k.new_zeros(n, h, v.shape[-1], width) if state is None else state.double()
    outputs = []
    for i in range(t):
        S = S * alpha[:, i, :, None]
        error = v[:, i] - torch.einsum("nhvk,nhk->nhv", S, x[:, i])
        S = S + torch.einsum("nh,nhv,nhk->nhvk", beta[:, i], error, k[:, i])  # (1)
        outputs.append(torch.einsum("nhvk,nhk->nhv", S, q[:, i]))  # (2)
    return scale * torch.stack(outputs, 1), S
