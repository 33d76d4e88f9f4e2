from __future__ import annotations

from dataclasses import replace

import pytest

from qkflow.errors import UsageError
from qkflow.models import SIZES, Decoder, matched, parameters, size
from qkflow.models.sizes import GPT2_VOCABULARY, LLAMA_VOCABULARY

SMALL = {"100k": 1e5, "500k": 5e5, "1m": 1e6, "5m": 5e6}
LARGE = {"60m": 60e6, "150m": 150e6, "350m": 350e6}
LLAMA = {"340m": 340e6, "1.3b": 1.3e9}
NAMED = {**SMALL, **LARGE, **LLAMA}


def test_names_of_the_sizes() -> None:
    assert set(SIZES) == set(NAMED)


@pytest.mark.parametrize("name", NAMED)
def test_parameter_count_is_within_two_percent_of_the_name(name: str) -> None:
    assert abs(parameters(size(name)) / NAMED[name] - 1) < 0.02
    if name in SMALL:
        assert abs(parameters(size(name, mechanism="differential")) / NAMED[name] - 1) < 0.02


@pytest.mark.parametrize("name", NAMED)
def test_small_sizes_use_bytes_and_large_sizes_the_published_vocabulary(name: str) -> None:
    assert size(name).vocabulary == (257 if name in SMALL else GPT2_VOCABULARY if name in LARGE else LLAMA_VOCABULARY)
    assert size(name, vocabulary=1000).vocabulary == 1000


def test_parameters_equals_the_count_of_an_allocated_model() -> None:
    config = size("1m", mechanism="differential")
    assert parameters(config) == sum(p.numel() for p in Decoder(config).parameters())


@pytest.mark.parametrize(
    "mechanism",
    [
        *("standard", "differential", "standard:key_heads=1", "differential:qk_norm=True"),
        *("kda", "eda", "comba", "qdelta:erase=own"),
    ],
)
@pytest.mark.parametrize(("name", "factor"), [("100k", 1.0), ("60m", 1.0), ("1m", 0.9), ("5m", 1.3)])
def test_matched_parameter_count_is_within_half_a_percent(name: str, factor: float, mechanism: str) -> None:
    target = round(factor * parameters(size(name)))
    config = matched(size(name, mechanism=mechanism), target)
    assert abs(parameters(config) / target - 1) < 0.005


@pytest.mark.parametrize("mechanism", ["standard", "differential"])
def test_matched_width_is_the_nearest(mechanism: str) -> None:
    target = 1_234_567
    best = matched(size("1m", mechanism=mechanism), target)
    for hidden in (best.hidden - 1, best.hidden + 1):
        assert abs(parameters(best) - target) <= abs(parameters(replace(best, hidden=hidden)) - target)


def test_hybrid_stacks_can_be_matched() -> None:
    stack = ("standard", "differential", "standard:key_heads=1", "differential:key_heads=1", "standard")
    config = matched(size("1m", mechanism=stack), 1_000_000)
    assert config.mechanism == stack
    assert abs(parameters(config) / 1e6 - 1) < 0.005


def test_unreachable_target_raises() -> None:
    with pytest.raises(UsageError, match="cannot match 100 parameters"):
        matched(size("1m"), 100)


def test_unknown_size_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown size '60mb': did you mean '60m'"):
        size("60mb")
