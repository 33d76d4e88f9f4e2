r"""How the transitions of a delta memory stretch what it holds: each alone, multiplied over a text, and at worst.

    S_t = S_{t-1} T_t + \beta_t v_t k_t^\top,   T_t = \alpha_t (I - \beta_t x_t k_t^\top),   x_t = k_t + \lambda_t q_t

**Alone.** Outside the plane of x and k, T is \alpha. In it, T / \alpha has the determinant 1 - \beta a with
a = k \cdot x, and the squares of its two singular values sum to 2 (1 - \beta a) + n^2 with n = \beta |x| |k|. So

    largest |eigenvalue| = \alpha \max(1, |1 - \beta a|),    |T| = \alpha (n + \sqrt{n^2 + 4 (1 - \beta a)}) / 2

**Multiplied.** With \lambda = 0 T is symmetric: |T| is its largest eigenvalue, and with unit keys no product grows.
Else |T| exceeds it, and a product can grow though no eigenvalue of any factor is larger than one.

**At worst** (ours). For unit q and k, |T| depends on q \cdot k alone. If \lambda |1 - \beta| <= 2 - \beta, as for all
gates up to one, it is largest at q \cdot k = -\lambda (1 - \beta) / (2 - \beta); else at q = k or q = -k:

    |T|^2 <= \alpha^2 (1 + \beta \lambda^2 / (2 - \beta)),    else |T| <= \alpha (|1 - \beta| + \beta \lambda)

No product grows faster than by that a step, and one does grow so: T^\top is a transition with the same gates, that of
the key x / |x| and the query (|x| k - x / |x|) / \lambda, which has length one. A text that alternates the two takes
the memory times T T^\top, whose norm and largest eigenvalue are |T|^2: 1.98 every two tokens at \beta = .99,
\lambda = 1 and \alpha = 1. The bound rises with \beta and \lambda and holds for shorter q and k: it covers all gates up
to these. Gates that vary reach the product of their bounds: turn each q and k until what one token stretches the most,
the next does too. Without decay every \lambda > 0 leaves room to grow.

| symbol             | here          | shape       |
|--------------------|---------------|-------------|
| q_t, k_t           | `q`, `k`      | `[b t h k]` |
| \beta_t, \lambda_t | `beta`, `lam` | `[b t h]`   |
| log \alpha_t       | `log_alpha`   | `[b t h]`   |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from qkflow.errors import UsageError

Queries = Float[Tensor, "b t h k"]
Gates = Float[Tensor, "b t h"]


def mixed(q: Queries, k: Queries, lam: Gates | None = None) -> Queries:
    """The direction in which a memory is corrected, x = k + lambda q."""
    return k if lam is None else k + lam.unsqueeze(-1) * q


def step_sizes(q: Queries, k: Queries, beta: Gates, lam: Gates | None = None) -> Gates:
    r"""How much of its error each token corrects, \beta a with a = k \cdot x: all of it at 1, too much beyond 2.

    >>> k = torch.tensor([0.6, 0.8]).view(1, 1, 1, 2)
    >>> step_sizes(k, k, torch.full((1, 1, 1), 0.5), torch.ones(1, 1, 1)).item()
    1.0
    """
    return beta * (k * mixed(q, k, lam)).sum(-1)


def spectral_radii(
    q: Queries, k: Queries, beta: Gates, log_alpha: Gates | None = None, lam: Gates | None = None
) -> Gates:
    """The largest absolute eigenvalue of each token's transition."""
    inside = (1 - step_sizes(q, k, beta, lam)).abs()
    return _decayed(inside if k.shape[-1] == 1 else inside.clamp_min(1), log_alpha)


def operator_norms(
    q: Queries, k: Queries, beta: Gates, log_alpha: Gates | None = None, lam: Gates | None = None
) -> Gates:
    """The largest singular value of each token's transition: by how much it can stretch a memory.

    >>> q, k = torch.eye(2).view(2, 1, 1, 1, 2)
    >>> one = torch.ones(1, 1, 1)
    >>> round(operator_norms(q, k, one, lam=one).item(), 4), spectral_radii(q, k, one, lam=one).item()
    (1.4142, 1.0)
    """
    if k.shape[-1] == 1:
        return spectral_radii(q, k, beta, log_alpha, lam)
    x = mixed(q, k, lam)
    n = beta * x.norm(dim=-1) * k.norm(dim=-1)
    apart = (normalize(x, dim=-1) - normalize(k, dim=-1)).square().sum(-1)
    # n^2 + 4 (1 - beta a) in a form that keeps its digits where it is nearly zero
    return _decayed((n + ((n - 2).square() + 2 * n * apart).sqrt()) / 2, log_alpha)


def product_norms(
    q: Queries, k: Queries, beta: Gates, log_alpha: Gates | None = None, lam: Gates | None = None, *, window: int
) -> Float[Tensor, "b w h"]:
    """The largest singular value of the product of `window` transitions, for windows that overlap by half.

    >>> q, k = torch.nn.functional.normalize(torch.randn(2, 1, 9, 1, 4), dim=-1)
    >>> half = torch.full((1, 9, 1), 0.5)
    >>> product_norms(q, k, half, lam=half, window=4).shape, bool(product_norms(q, k, half, window=4).max() < 1.00001)
    (torch.Size([1, 3, 1]), True)
    """
    if not 1 <= window <= k.shape[1]:
        raise UsageError(f"a window must be from 1 to the text's {k.shape[1]} tokens, got {window}")

    def windows(x: Tensor) -> Tensor:
        return x.unfold(1, window, max(1, window // 2))  # [b t h ...] to [b w h ... i]

    alpha = torch.ones_like(beta) if log_alpha is None else log_alpha.exp()
    x, k = (rearrange(windows(y), "b w h k i -> b w h i k") for y in (mixed(q, k, lam), k))
    beta, alpha = windows(beta), windows(alpha)
    if 2 * window < k.shape[-1]:  # outside the span of these vectors, and on some inside it, there is the decay alone
        basis = torch.linalg.qr(torch.cat([x, k], -2).mT)[0]
        x, k = x @ basis, k @ basis
    product = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device).expand(*k.shape[:3], -1, -1)
    for i in range(window):
        stretched = (product @ x[..., i, :, None]) * k[..., i, None, :]
        product = alpha[..., i, None, None] * (product - beta[..., i, None, None] * stretched)
    finite = product.isfinite().all(-1).all(-1)
    norms = torch.linalg.matrix_norm(product.where(finite[..., None, None], 0), ord=2)
    return norms.where(finite, math.nan)


def worst_norms(
    beta: Float[Tensor, "*shape"],
    log_alpha: Float[Tensor, "*shape"] | None = None,
    lam: Float[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """What the operator norm can be at most with such gates, whatever the queries and keys up to length one.

    >>> round(worst_norms(torch.tensor([0.99]), lam=torch.tensor([1.0])).square().item(), 3)
    1.98
    """
    lam = torch.zeros_like(beta) if lam is None else lam.abs()
    inner, outer = (1 + beta * lam.square() / (2 - beta)).sqrt(), (1 - beta).abs() + beta * lam
    worst = torch.where(lam * (1 - beta).abs() <= 2 - beta, inner, outer)
    return _decayed(worst.where(lam > 0, 1), log_alpha)


@dataclass(frozen=True, kw_only=True, eq=False)
class WorstCase:
    """Two tokens whose alternation makes a memory grow as fast as any text can with such gates."""

    growth: float
    """By how much a step multiplies the memory; below one it shrinks."""
    q: Float[Tensor, "2 k"]
    """Their queries, of length one."""
    k: Float[Tensor, "2 k"]
    """Their keys, of length one."""


def worst_case(beta: float, lam: float, alpha: float = 1.0, width: int = 2) -> WorstCase:
    """The text that makes a memory with gates up to these grow the fastest, and how fast that is.

    >>> round(worst_case(0.99, 1.0).growth ** 2, 2), worst_case(0.99, 0.0).growth
    (1.98, 1.0)
    """
    _check(beta=beta, alpha=alpha)
    if width < 2:
        raise UsageError(f"a worst case needs keys of width 2 or more, got {width}")
    growth = alpha * _worst(beta, lam)
    q, k = torch.zeros(2, width, dtype=torch.float64), torch.zeros(2, width, dtype=torch.float64)
    size, far = abs(lam), 2 - beta
    turned = 1.0 if far == 0 else max(-1.0, min(1.0, -size * (1 - beta) / far))
    k[0, 0] = 1
    q[0, :2] = math.copysign(1, lam) * torch.tensor([turned, math.sqrt(1 - turned**2)], dtype=torch.float64)
    x = k[0] + lam * q[0]
    k[1] = x / x.norm()
    q[1] = ((lam + 2 * q[0] @ k[0]) * k[0] - q[0]) / x.norm()  # (|x| k - x / |x|) / lam, without dividing by it
    return WorstCase(growth=growth, q=q, k=k)


def safe_alpha(beta: float, lam: float) -> float:
    """The weakest decay with which no text whose gates are at most these makes a memory grow.

    >>> round(safe_alpha(0.99, 1.0), 4), safe_alpha(0.99, 0.0)
    (0.7106, 1.0)
    """
    _check(beta=beta)
    return 1 / _worst(beta, lam)


def safe_lambda(beta: float, alpha: float) -> float:
    """The largest lambda with which no text makes a memory grow that decays so at every step: 0 without decay.

    >>> round(safe_lambda(0.99, 0.9), 4), safe_lambda(0.99, 1.0)
    (0.4892, 0.0)
    """
    _check(beta=beta, alpha=alpha)
    if beta == 0 or alpha == 0:
        return math.inf
    growth, rest = 1 / alpha, abs(1 - beta)
    if growth * rest <= 1:
        return math.sqrt((growth**2 - 1) * (2 - beta) / beta)
    return (growth - rest) / beta


def _worst(beta: float, lam: float) -> float:
    if not math.isfinite(lam):
        raise UsageError(f"lam must be finite, got {lam}")
    return float(worst_norms(torch.tensor(beta, dtype=torch.float64), lam=torch.tensor(lam, dtype=torch.float64)))


def _check(*, beta: float, alpha: float = 1.0) -> None:
    for name, value, most in (("beta", beta, 2), ("alpha", alpha, 1)):
        if not 0 <= value <= most:
            raise UsageError(f"{name} must be from 0 to {most}, got {value}")


def _decayed(x: Float[Tensor, "*shape"], log_alpha: Float[Tensor, "*shape"] | None) -> Float[Tensor, "*shape"]:
    return x if log_alpha is None else x * log_alpha.exp()
