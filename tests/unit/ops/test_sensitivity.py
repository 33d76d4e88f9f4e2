"""The Jacobian of a coupling, block by block."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from qkflow.errors import UsageError
from qkflow.ops.sensitivity import JacobianBlocks, jacobian, sensitivity
from qkflow.ops.symplectic.naive import leapfrog, mlp_force


def pairs(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64), torch.randn(*shape, generator=g, dtype=torch.float64)


def moved(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    w1, w2 = (torch.randn(3, 3, generator=g, dtype=torch.float64) for _ in range(2))
    bias = torch.ones(3, dtype=torch.float64)
    return leapfrog(q, k, lambda q: mlp_force(q, w1, bias, w2, bias), 0.3, 2)


@given(n=st.integers(1, 4), g=st.integers(1, 3), seed=st.integers(0, 100))
@settings(deadline=None, max_examples=10)
def test_blocks_match_torch_func_jacobian(n: int, g: int, seed: int) -> None:
    q, k = pairs(n, g, 3, seed=seed)
    result = jacobian(moved, q, k)
    for i in range(n):
        for j in range(g):
            expected = torch.autograd.functional.jacobian(moved, (q[i, j], k[i, j]))
            assert_close(
                JacobianBlocks(*(block[i, j] for block in result)),
                JacobianBlocks(*expected[0], *expected[1]),
                rtol=1e-12,
                atol=1e-12,
            )


def test_norms_are_root_mean_squares_over_pairs() -> None:
    q, k = pairs(5, 4)
    result = sensitivity(lambda q, k: (q + 0.25 * k, 3 * k - 0.5 * q), q, k)
    assert (result.query_on_query, result.query_on_key) == pytest.approx((1.0, 0.25), abs=1e-15)
    assert (result.key_on_query, result.key_on_key) == pytest.approx((0.5, 3.0), abs=1e-15)
    assert (result.query_change, result.key_change) == pytest.approx((0.0, 2.0), abs=1e-15)
    blocks = jacobian(moved, *pairs(6, 3))
    expected = torch.stack([torch.linalg.matrix_norm(block) for block in blocks.key_on_query]).square().mean() / 3
    assert sensitivity(moved, *pairs(6, 3)).key_on_query == pytest.approx(float(expected.sqrt()))


def test_unused_inputs_have_zero_blocks() -> None:
    result = sensitivity(lambda q, k: (2 * q, k), *pairs(3, 2))
    assert (result.query_on_key, result.key_on_query, result.key_change) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_works_without_grad_mode(mode: type) -> None:
    expected = sensitivity(moved, *pairs(2, 3))
    with mode():
        q, k = pairs(2, 3)
        assert sensitivity(moved, q, k) == expected
    assert not q.requires_grad


def test_different_shapes_raise() -> None:
    with pytest.raises(UsageError, match="must have the same shape"):
        jacobian(moved, torch.zeros(2, 3), torch.zeros(1, 3))
