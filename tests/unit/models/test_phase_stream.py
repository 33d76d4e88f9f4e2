"""Decoders with a phase stream; test_decoder.py tests what all decoders have in common."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from qkflow.data import CorpusConfig
from qkflow.errors import UsageError
from qkflow.mechanisms import StandardAttention
from qkflow.models import Decoder, DecoderConfig, matched, parameters, size
from qkflow.models.blocks import PhaseBlock
from qkflow.models.generation import Sampling, generate
from qkflow.training.config import TrainConfig
from qkflow.training.optim import build_optimizer

STREAMS = ["kuramoto", "kuramoto:frustrated=True,harmonics=2", "group", "group:group=so3,frustrated=True"]
every_stream = pytest.mark.parametrize("spec", STREAMS)


def model(spec: str = "kuramoto", *, tied: bool | None = None, dropout: float = 0.0) -> Decoder:
    width = 18 if "so3" in spec else 16
    decoder = Decoder(
        DecoderConfig(
            width=width, layers=2, heads=4, hidden=12, vocabulary=13, mechanism=spec, tied=tied, dropout=dropout
        )
    ).double()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return decoder


def tokens(b: int, t: int) -> Tensor:
    return torch.randint(0, 13, (b, t))


def close(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, rtol=0, atol=1e-11)


def test_cached_generation_equals_generation_without_cache() -> None:
    decoder = model()
    prompts = [[1, 2, 3], [4]]
    for prompt, row in zip(
        prompts, generate(decoder, prompts, tokens=5, sampling=Sampling(temperature=0.0)), strict=True
    ):
        for new in row:
            assert int(decoder(torch.tensor([prompt]))[0][0, -1].argmax()) == new
            prompt.append(new)


@pytest.mark.parametrize("tied", [None, True, False])
@every_stream
def test_declared_cost_matches_torch(spec: str, tied: bool | None) -> None:
    decoder = model(spec, tied=tied)
    cost, x = decoder.cost(10), tokens(1, 10)
    assert cost.parameters == sum(p.numel() for p in decoder.parameters())
    with torch.no_grad(), nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as ops:
        decoder(x)
    assert cost.linear_flops + cost.pair_flops * 100 == ops.get_total_flops()
    assert decoder(x)[1].nbytes == cost.state_bytes


def test_head_reads_points_and_can_be_tied() -> None:
    untied, tied = model(), model(tied=True)
    assert untied.head is not None
    assert untied.head.weight.shape == (13, 32)
    assert tied.head is None
    x = torch.randn(3, 32, dtype=torch.float64)
    angles = tied.embedding.weight
    points = torch.stack([angles.cos(), angles.sin()], -1).flatten(1)
    close(
        tied.logits(x), x @ points.T / 32**0.5
    )  # the score of a token with itself is the width, which would dominate the softmax
    close(untied.logits(x), x @ untied.head.weight.T)


@every_stream
def test_full_turns_do_not_change_the_logits(spec: str) -> None:
    """Full rotations or rescaling of an embedding change no score."""
    decoder, x = model(spec), tokens(2, 5)
    expected = decoder(x)[0]
    with torch.no_grad():
        weight = decoder.embedding.weight
        if spec.startswith("kuramoto"):
            weight.add_(2 * torch.pi * torch.randint(-3, 4, weight.shape).double())
        else:
            each = weight.unflatten(1, (-1, decoder.group.size))  # type: ignore[union-attr]
            each.mul_(0.5 + torch.rand(*each.shape[:2], 1, dtype=torch.float64))
    close(decoder(x)[0], expected)


def test_phase_block_applies_attention_then_feed_forward() -> None:
    block = cast(PhaseBlock, model().blocks[0])
    theta = torch.randn(2, 5, 16, dtype=torch.float64)
    middle = theta + block.mechanism(theta)[0]
    moved = block.feed_forward(torch.stack([middle.cos(), middle.sin()], -1).flatten(2))
    close(block(theta)[0], middle + moved)


@pytest.mark.parametrize("spec", ["group", "group:group=so3"])
def test_stream_stays_on_the_group(spec: str) -> None:
    decoder = model(spec)
    x = decoder.embedding(tokens(2, 5))
    for block in decoder.blocks:
        x, _ = block(x)
        close(decoder.norm(x), x)


def test_dropout_applies_in_training_only() -> None:
    decoder, x = model(dropout=0.5), tokens(2, 5)
    assert not torch.equal(decoder.train()(x)[0], decoder(x)[0])
    assert torch.equal(decoder.eval()(x)[0], decoder(x)[0])


@pytest.mark.parametrize("name", ["1m", "5m"])
@pytest.mark.parametrize("spec", ["kuramoto", "kuramoto:frustrated=True"])
def test_presets_match_the_baseline_in_parameters(spec: str, name: str) -> None:
    baseline = parameters(size(name))
    assert parameters(matched(size(name, mechanism=spec), baseline)) == pytest.approx(baseline, rel=0.005)


@every_stream
def test_optimizer_uses_the_param_options(spec: str) -> None:
    decoder = model(spec)
    param_options, named = decoder.param_options(), dict(decoder.named_parameters())
    assert set(param_options) <= set(named)
    assert not param_options["embedding.weight"].decay
    config = TrainConfig(data=CorpusConfig(), model=decoder.config, steps=10, weight_decay=0.1)
    groups = build_optimizer(decoder, config).param_groups
    group_of = {id(p): group for group in groups for p in group["params"]}
    assert set(group_of) == {id(p) for p in named.values()}
    for name, pace in param_options.items():
        assert group_of[id(named[name])]["rate"] == pace.rate
        if not pace.decay:
            assert group_of[id(named[name])]["weight_decay"] == 0
    assert group_of[id(named["blocks.0.feed_forward.up.weight"])]["weight_decay"] == 0.1


@every_stream
def test_training_reduces_the_loss(spec: str) -> None:
    decoder = model(spec)
    x = torch.arange(24).remainder(7).view(1, 24)
    optimizer = torch.optim.Adam(decoder.parameters(), lr=0.02)
    losses = []
    for _ in range(15):
        loss = F.cross_entropy(decoder(x[:, :-1])[0][0], x[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(
    ("mixed", "reads"),
    [
        (("kuramoto", "standard"), "elements of torus, the other an ordinary stream"),
        (("standard", "group"), "an ordinary stream, the other elements of su2"),
        (("kuramoto", "group"), "elements of torus, the other elements of su2"),
    ],
)
def test_mixed_streams_raise(mixed: tuple[str, str], reads: str) -> None:
    with pytest.raises(UsageError, match=f"cannot be in one stack: one reads {reads}"):
        Decoder(DecoderConfig(width=16, layers=2, heads=2, hidden=8, mechanism=mixed))


def test_mechanisms_of_one_group_share_a_stack() -> None:
    mixed = ("kuramoto", "kuramoto:frustrated=True", "group:group=torus")
    decoder = Decoder(DecoderConfig(width=16, layers=3, heads=2, hidden=8, vocabulary=13, mechanism=mixed))
    assert decoder(tokens(1, 4))[0].shape == (1, 4, 13)


def test_phase_block_requires_a_group() -> None:
    with pytest.raises(UsageError, match="StandardAttention has no group"):
        PhaseBlock(StandardAttention(16, 2), 16, 8)
