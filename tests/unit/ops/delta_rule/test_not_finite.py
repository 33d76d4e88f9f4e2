"""Where NaN and infinity of one token spread: in the recurrence to later tokens, in the fast forms over a chunk."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from qkflow.errors import NotFiniteError
from qkflow.mechanisms import mechanism
from qkflow.ops.delta_rule import delta_rule

CHUNK, LENGTH, AT = 8, 30, 20
START = AT // CHUNK * CHUNK
"""The first token of the chunk of token AT."""


def outputs(backend: str, per_channel: bool, name: str, content: float | None) -> Tensor:
    """Outputs [b t h v], with `content` in one operand of one token of one head of the first row."""
    generator = torch.Generator().manual_seed(1)
    shape = 2, LENGTH, 2
    q, k, v = (torch.randn(*shape, 6, generator=generator, dtype=torch.float64) for _ in range(3))
    operands = {"q": q, "k": k / k.norm(dim=-1, keepdim=True), "v": v}
    log_alpha = -torch.rand(*shape, *([6] if per_channel else []), generator=generator, dtype=torch.float64)
    beta = torch.rand(shape, generator=generator, dtype=torch.float64)
    if content is not None:
        operands[name][0, AT, 1, 2] = content
    return delta_rule(**operands, beta=beta, log_alpha=log_alpha, backend=backend, chunk=CHUNK)[0]


@pytest.mark.parametrize("content", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("backend", ["naive", "chunked", "cpu"])
def test_not_finite_numbers_spread_within_their_chunk(
    backend: str, per_channel: bool, name: str, content: float
) -> None:
    """Zero times NaN is NaN: fast forms multiply all tokens of a chunk. No output is wrong and finite."""
    expected, actual = outputs(backend, per_channel, name, None), outputs(backend, per_channel, name, content)
    is_equal = (actual == expected).all(-1)
    assert is_equal[1].all()  # another sequence
    assert is_equal[0, :, 0].all()  # another head
    first = AT if backend == "naive" else START
    assert is_equal[0, :first, 1].all()
    earlier = actual[0, first:AT, 1]
    assert (is_equal[0, first:AT, 1] | earlier.isnan().any(-1)).all()
    assert not actual[0, AT, 1].isfinite().all()
    if backend != "naive" and name == "v":
        assert earlier.isnan().any()


@pytest.mark.parametrize("spec", ["deltanet", "gated-deltanet", "qdelta", "kda", "eda", "comba"])
def test_a_layer_refuses_a_token_with_nan(spec: str) -> None:
    """Its gates are NaN, so no output is computed."""
    layer, x = mechanism(spec)(16, 2, layer=0, layers=1), torch.randn(1, 20, 16)
    x[0, 15, 3] = math.nan
    with pytest.raises(NotFiniteError, match="got values from nan"):
        layer(x)
