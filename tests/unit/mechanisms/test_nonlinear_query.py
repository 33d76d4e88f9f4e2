"""Nonlinear queries, against a direct transcription of the published ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.testing import assert_close

from qkflow.errors import UsageError
from qkflow.mechanisms import NonlinearQueryAttention, StandardAttention, mechanism
from qkflow.mechanisms.nonlinear_query import NonlinearQuery
from qkflow.ops.rotary import apply_rotary, rotary_factors

WIDTH, HEADS = 32, 4


def published(layer: NonlinearQueryAttention, x: Tensor) -> Tensor:
    """Half the scale of the scores instead of half the query, PyTorch's norms, and a map in memory."""
    query = layer.query
    assert isinstance(query, NonlinearQuery)
    input_norm = nn.RMSNorm(WIDTH, eps=1e-5, dtype=x.dtype)
    output_norm = nn.LayerNorm(WIDTH, eps=1e-5, bias=False, dtype=x.dtype)
    parameters = {"weight": query.inner_norm}, {"weight": query.outer_norm}
    hidden = F.gelu(torch.func.functional_call(input_norm, parameters[0], (x,)) @ query.inner.weight.T)
    q = x + torch.func.functional_call(output_norm, parameters[1], (hidden @ query.outer.weight.T,))
    k, v = x @ layer.key.weight.T, x @ layer.value.weight.T
    q, k, v = (rearrange(y, "b t (h k) -> b t h k", h=HEADS) for y in (q, k, v))
    head = WIDTH // HEADS
    factors = rotary_factors(0, x.shape[1], heads=HEADS, width=head, base=10000.0, like=x)
    scores = torch.einsum("bthk,bshk->bhts", apply_rotary(q, factors), apply_rotary(k, factors)) / (2 * head**0.5)
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    z = torch.einsum("bhts,bshv->bthv", scores.masked_fill(future, -torch.inf).softmax(-1), v)
    return z.flatten(2) @ layer.output.weight.T


def test_equals_the_published_attention_with_gradients() -> None:
    layer = NonlinearQueryAttention(WIDTH, HEADS).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64, requires_grad=True)
    actual, expected = layer(x)[0], published(layer, x)
    assert_close(actual, expected, rtol=0, atol=1e-12)
    leaves, cotangent = [x, *layer.parameters()], torch.randn_like(actual)
    gradients = (torch.autograd.grad(y, leaves, cotangent) for y in (actual, expected))
    for gradient, expected_gradient in zip(*gradients, strict=True):
        assert_close(gradient, expected_gradient, rtol=0, atol=1e-11)


def test_adds_two_norms_to_the_parameters_of_standard_attention() -> None:
    counts = [
        sum(p.numel() for p in kind(WIDTH, HEADS).parameters()) for kind in (NonlinearQueryAttention, StandardAttention)
    ]
    assert counts[0] - counts[1] == 2 * WIDTH


def test_a_qk_norm_cancels_the_factor_of_one_half() -> None:
    layer, x = (
        mechanism("nonlinear-query:qk_norm=True")(WIDTH, HEADS, layer=0, layers=1).double(),
        torch.randn(1, 5, WIDTH).double(),
    )
    weights = layer.weights(x)
    query = layer.query
    layer.query = nn.Sequential(query, _Double())
    assert_close(layer.weights(x), weights, rtol=0, atol=1e-4)  # up to the epsilon of the norm


class _Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize(("width", "heads", "message"), [(30, 4, "heads must divide"), (15, 5, "must be even, got 15")])
def test_other_widths_raise(width: int, heads: int, message: str) -> None:
    config = NonlinearQueryAttention.config_type(rotary_base=None)
    with pytest.raises(UsageError, match=message):
        NonlinearQueryAttention(width, heads, config=config)


def test_heads_that_are_not_as_wide_as_the_model_raise() -> None:
    with pytest.raises(UsageError, match="as wide as the model, got heads of 24 in all for 32"):
        NonlinearQueryAttention(WIDTH, HEADS).query_map(WIDTH, 24)
