"""Differential attention against its formulas, written with loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from qkflow.mechanisms import DifferentialAttention, DifferentialConfig, StandardAttention

WIDTH = 24


def turn(x: Tensor, position: int) -> Tensor:
    out = x.clone()
    for i in range(len(x) // 2):
        angle = position * 10000.0 ** (-2 * i / len(x))
        out[2 * i] = x[2 * i] * math.cos(angle) - x[2 * i + 1] * math.sin(angle)
        out[2 * i + 1] = x[2 * i] * math.sin(angle) + x[2 * i + 1] * math.cos(angle)
    return out


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / torch.sqrt((x * x).sum() / len(x) + 1e-5)


def transcription(layer: DifferentialAttention, x: Tensor, *, heads: int, groups: int, depth: int) -> Tensor:
    """`heads` differential heads over `groups` of keys and values; in the notation of the paper."""
    d = WIDTH // heads // 2
    p = dict(layer.named_parameters())
    lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
    lam = (
        torch.exp((p["lambda_q1"] * p["lambda_k1"]).sum())
        - torch.exp((p["lambda_q2"] * p["lambda_k2"]).sum())
        + lambda_init
    )
    rows = []
    for sequence in x:
        outputs = []
        for t in range(len(sequence)):
            gathered = []
            for head in range(heads):
                group = head // (heads // groups)
                query, key = p["query.weight"], p["key.weight"]
                value = p["value.weight"][2 * d * group : 2 * d * (group + 1)]
                o = torch.zeros(2 * d, dtype=x.dtype)
                for half, sign in ((0, 1.0), (1, -lam)):
                    q_rows = slice(d * (2 * head + half), d * (2 * head + half + 1))
                    k_rows = slice(d * (2 * group + half), d * (2 * group + half + 1))
                    q = turn(query[q_rows] @ sequence[t], t)
                    scores = [q @ turn(key[k_rows] @ sequence[s], s) / math.sqrt(d) for s in range(t + 1)]
                    total = sum(torch.exp(score) for score in scores)
                    for s, score in enumerate(scores):
                        o = o + sign * torch.exp(score) / total * (value @ sequence[s])
                gathered.append(normed(o, p["head_norm"]) * (1 - lambda_init))
            outputs.append(p["output.weight"] @ torch.cat(gathered))
        rows.append(torch.stack(outputs))
    return torch.stack(rows)


@pytest.mark.parametrize(("heads", "groups"), [(3, 3), (2, 1), (1, 1)])
@pytest.mark.parametrize("depth", [0, 3])
def test_values_and_gradients_match_the_equations(heads: int, groups: int, depth: int) -> None:
    config = DifferentialConfig(key_heads=None if groups == heads else groups)
    layer = DifferentialAttention(WIDTH, 2 * heads, depth, 4, config=config).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64, requires_grad=True)
    actual, expected = layer(x)[0], transcription(layer, x, heads=heads, groups=groups, depth=depth)
    assert_close(actual, expected, rtol=0, atol=1e-12)
    leaves, weight = [x, *layer.parameters()], torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(y, leaves, weight) for y in (actual, expected)), strict=True):
        assert_close(a, b, rtol=0, atol=1e-11)


def test_parameters_are_those_of_standard_attention_and_five_vectors() -> None:
    layer = DifferentialAttention(WIDTH, 4)
    standard = {name: p.shape for name, p in StandardAttention(WIDTH, 4).named_parameters()}
    shapes = {name: p.shape for name, p in layer.named_parameters()}
    assert {name: shapes[name] for name in standard} == standard
    assert {name: tuple(shapes[name]) for name in shapes.keys() - standard.keys()} == {
        "lambda_q1": (6,),
        "lambda_k1": (6,),
        "lambda_q2": (6,),
        "lambda_k2": (6,),
        "head_norm": (12,),
    }


def test_initialisation_is_as_published() -> None:
    vectors = [DifferentialAttention(512, 4).lambda_q1 for _ in range(8)]
    values = torch.cat([vector.detach() for vector in vectors])
    assert abs(float(values.mean())) < 0.02
    assert float(values.std()) == pytest.approx(0.1, rel=0.1)
    assert torch.equal(DifferentialAttention(32, 4).head_norm, torch.ones(16))


def test_lambda_belongs_to_qk_and_the_head_norm_to_ov() -> None:
    circuits = DifferentialAttention(32, 4, config=DifferentialConfig(qk_norm=True)).circuits()
    assert {"lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "query_norm", "key_norm"} <= set(circuits.qk)
    assert "head_norm" in circuits.ov
