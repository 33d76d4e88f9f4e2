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


def test_the_sizes_are_those_we_name() -> None:
    assert set(SIZES) == set(NAMED)


@pytest.mark.parametrize("mechanism", ["standard", "differential"])
@pytest.mark.parametrize("name", NAMED)
def test_a_size_is_within_two_percent_of_its_name(name: str, mechanism: str) -> None:
    assert abs(parameters(size(name, mechanism=mechanism)) / NAMED[name] - 1) < 0.02


@pytest.mark.parametrize("name", NAMED)
def test_small_sizes_speak_bytes_and_large_ones_what_was_published_for_them(name: str) -> None:
    assert size(name).vocabulary == (257 if name in SMALL else GPT2_VOCABULARY if name in LARGE else LLAMA_VOCABULARY)
    assert size(name, vocabulary=1000).vocabulary == 1000


def test_parameters_are_those_of_the_model_itself() -> None:
    config = size("1m", mechanism="differential")
    assert parameters(config) == sum(p.numel() for p in Decoder(config).parameters())


@pytest.mark.parametrize("mechanism", ["standard", "differential", "standard:key_heads=1", "differential:qk_norm=True"])
@pytest.mark.parametrize(("name", "factor"), [*((name, 1.0) for name in NAMED), ("1m", 0.9), ("5m", 1.3)])
def test_a_matched_model_is_within_half_a_percent_of_its_target(name: str, factor: float, mechanism: str) -> None:
    target = round(factor * parameters(size(name)))
    config = matched(size(name, mechanism=mechanism), target)
    assert abs(parameters(config) / target - 1) < 0.005


@pytest.mark.parametrize("mechanism", ["standard", "differential"])
def test_no_other_width_comes_nearer(mechanism: str) -> None:
    target = 1_234_567
    best = matched(size("1m", mechanism=mechanism), target)
    for hidden in (best.hidden - 1, best.hidden + 1):
        assert abs(parameters(best) - target) <= abs(parameters(replace(best, hidden=hidden)) - target)


def test_a_hybrid_stack_is_matched_too() -> None:
    stack = ("standard", "differential", "standard:key_heads=1", "differential:key_heads=1", "standard")
    config = matched(size("1m", mechanism=stack), 1_000_000)
    assert config.mechanism == stack
    assert abs(parameters(config) / 1e6 - 1) < 0.005


def test_a_target_below_what_the_rest_takes_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot match 100 parameters"):
        matched(size("1m"), 100)


def test_an_unknown_size_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown size '60mb': did you mean '60m'"):
        size("60mb")
