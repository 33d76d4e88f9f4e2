"""SO(n): rotation matrices, with the projection of a matrix to the nearest rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qkflow.errors import NotFiniteError, UsageError
from qkflow.ops import kuramoto
from qkflow.ops.csrc.eager import is_transformed
from qkflow.ops.groups.protocol import Algebra, Coordinates, Elements, EmbeddedGroup


@dataclass(frozen=True)
class Rotations(EmbeddedGroup):
    """SO(n), as matrices in row-major order.

    >>> SO3.points(torch.eye(3).flatten() * 2).tolist() == torch.eye(3).flatten().tolist()
    True
    """

    n: int = 3

    def __post_init__(self) -> None:
        if self.n < 2:
            raise UsageError(f"rotations need at least 2 dimensions, got {self.n}")

    @property
    def name(self) -> str:
        """For example `so3`."""
        return f"so{self.n}"

    @property
    def size(self) -> int:
        """Number of matrix entries."""
        return self.n**2

    ambient = size

    @property
    def dim(self) -> int:
        """Number of coordinate planes."""
        return self.n * (self.n - 1) // 2

    def points(self, x: Coordinates) -> Elements:
        """The nearest rotation."""
        return _nearest_rotation(self._matrix(x)).flatten(-2)

    def tangent(self, g: Elements, m: Elements) -> Coordinates:
        """`g` times the skew-symmetric part of g^T m."""
        g, product = self._matrix(g), _times(self._matrix(g).mT, self._matrix(m))
        return _times(g, (product - product.mT) / 2).flatten(-2)

    def push(self, g: Elements, a: Algebra) -> Coordinates:
        """`g` times the skew-symmetric matrix with entries `a`."""
        rows, columns = torch.triu_indices(self.n, self.n, 1, device=a.device).unbind(0)
        basis = F.one_hot(rows * self.n + columns, self.n**2) - F.one_hot(columns * self.n + rows, self.n**2)
        skew = (a.unsqueeze(-1) * basis.to(a.dtype)).sum(-2)
        return self.multiply(g, skew)

    def multiply(self, g: Elements, h: Elements) -> Elements:
        """The matrix product."""
        return _times(self._matrix(g), self._matrix(h)).flatten(-2)

    def turn(self, angle: Float[Tensor, "*n"]) -> Elements:
        """Rotations by the same angle in the planes of axes 1 and 2, 3 and 4, and so on."""
        cos, sin = kuramoto.points(angle).unbind(-1)
        one, nothing, planes = torch.ones_like(cos), torch.zeros_like(cos), self.n // 2
        rows = []
        for row in range(self.n):
            entries = [nothing] * self.n
            entries[row] = cos if row < 2 * planes else one
            if row < 2 * planes:
                entries[row ^ 1] = -sin if row % 2 == 0 else sin
            rows += entries
        return torch.stack(rows, -1)

    def identity(self) -> Coordinates:
        """The identity matrix."""
        return torch.eye(self.n).flatten()

    def random(self, *shape: int, generator: torch.Generator | None = None) -> Coordinates:
        """Polar factors of Gaussian matrices."""
        return self.points(torch.randn(*shape, self.n**2, generator=generator))

    def distance(self, g: Elements, h: Elements) -> Float[Tensor, "*n"]:
        """The root of the sum of the squared rotation angles, one per plane."""
        angles = torch.linalg.eigvals(_times(self._matrix(g).mT, self._matrix(h))).angle()
        return (angles.square().sum(-1) / 2).sqrt()

    def _matrix(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n, self.n))


class _Polar(torch.autograd.Function):
    r"""The rotation nearest to a matrix M = U \Sigma V^\top: R = U V^\top, with signs such that det R = 1.

    dR = U ((U^\top dM V - V^\top dM^\top U)_{ij} / (\sigma_i + \sigma_j)) V^\top,  which is self-adjoint. PyTorch's
    derivatives of U and V divide by \sigma_i - \sigma_j, which is zero on the group. For a second derivative it is R X
    with  X P + P X = R^\top dM - dM^\top R,  P = R^\top M.
    """

    @staticmethod
    def forward(ctx: Any, m: Tensor) -> Tensor:
        u, s, vh = _signed_svd(m)
        ctx.save_for_backward(m, u, s, vh)
        return _times(u, vh).to(m.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        m, u, s, vh = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _polar_derivative(m, grads[0])
        g = _times(_times(u.mT, grads[0].to(u.dtype)), vh.mT)
        s_sums = (s.unsqueeze(-1) + s.unsqueeze(-2)).abs().clamp_min(torch.finfo(s.dtype).tiny)
        return _times(_times(u, (g - g.mT) / s_sums), vh).to(grads[0].dtype)


class _TransformedPolar(torch.autograd.Function):
    """The same in the form that `torch.func` transforms, with the derivative that can be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(m: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        u, _, vh = _signed_svd(m)
        return _times(u, vh).to(m.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _polar_derivative(ctx.saved_tensors[0], grads[0])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _polar_derivative(ctx.saved_tensors[0], tangents[0])


def _nearest_rotation(m: Tensor) -> Tensor:
    is_plain = torch.compiler.is_compiling() or not is_transformed()
    return _Polar.apply(m) if is_plain else _TransformedPolar.apply(m)  # pyright: ignore[reportReturnType]


def _signed_svd(m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Singular vectors and values, with signs such that the product of the vectors has determinant 1."""
    try:
        u, s, vh = torch.linalg.svd(m.float() if m.dtype in (torch.bfloat16, torch.float16) else m)
    except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage]
        raise NotFiniteError("rotations must be finite, got NaN or infinite values") from error
    flip = torch.ones_like(s)
    flip[..., -1] = (torch.linalg.det(u) * torch.linalg.det(vh)).sign()
    return u * flip.unsqueeze(-2), s * flip, vh


def _polar_derivative(m: Tensor, grad: Tensor) -> Tensor:
    """The derivative in a direction and, since it is self-adjoint, the gradient."""
    r = _nearest_rotation(m)
    p, g, one = _times(r.mT, m), _times(r.mT, grad), torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)
    system = torch.einsum("...ik,jl->...ijkl", p, one) + torch.einsum("ik,...jl->...ijkl", one, p)
    system = system.flatten(-4, -3).flatten(-2)  # X -> P X + X P as a matrix
    tiny = torch.finfo(m.dtype).tiny  # at padding the system would be singular
    system = system + tiny * torch.eye(system.shape[-1], dtype=m.dtype, device=m.device)
    x = torch.linalg.solve(system, (g - g.mT).flatten(-2))
    return _times(r, x.unflatten(-1, m.shape[-2:]))


def _times(a: Tensor, b: Tensor) -> Tensor:
    """The product of many small matrices, as a sum, which is faster than batched matrix products."""
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


SO3 = Rotations(3)
