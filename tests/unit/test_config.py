from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from qkflow.config import from_dict, to_dict
from qkflow.errors import UsageError
from qkflow.models import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int
    name: str = "a"


@dataclass(frozen=True, kw_only=True)
class Outer:
    count: int
    rate: float = 0.5
    on: bool = False
    side: Literal["left", "right"] = "left"
    window: int | None = None
    inner: Inner = Inner(depth=1)
    maybe: Inner | None = None
    either: str | tuple[str, ...] = "x"
    pair: tuple[int, float] = (1, 2.0)


def test_config_round_trip() -> None:
    config = Outer(count=3, on=True, window=4, inner=Inner(depth=2), maybe=Inner(depth=3, name="b"), either=("p", "q"))
    data = to_dict(config)
    assert data["either"] == ["p", "q"]
    assert data["pair"] == [1, 2.0]
    assert data["maybe"] == {"depth": 3, "name": "b"}
    assert from_dict(Outer, data) == config


@pytest.mark.parametrize("mechanism", ["standard:window=8", ("standard", "differential:key_heads=1")])
def test_model_config_round_trip(mechanism: Any) -> None:
    config = DecoderConfig(width=8, layers=2, heads=2, hidden=4, mechanism=mechanism)
    assert from_dict(DecoderConfig, to_dict(config)) == config


def test_missing_fields_have_defaults() -> None:
    assert from_dict(Outer, {"count": 1}) == Outer(count=1)


def test_integer_is_converted_to_float() -> None:
    config = from_dict(Outer, {"count": 1, "rate": 2, "pair": [3, 4]})
    assert (config.rate, type(config.rate)) == (2.0, float)
    assert config.pair == (3, 4.0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"count": 1, "windw": 2}, r"unknown config key 'windw': did you mean 'window'\?"),
        ({"count": 1, "inner": {"deepth": 2}}, r"unknown config key 'deepth' in 'inner': did you mean 'depth'\?"),
        ({"count": 1, "maybe": {"dept": 2}}, "unknown config key 'dept' in 'maybe'"),
        ({}, "config key 'count' is missing"),
        ({"count": 1, "inner": {}}, "config key 'depth' in 'inner' is missing"),
        ({"count": 1, "inner": {"depth": "2"}}, r"config key 'inner\.depth' got '2': expected int"),
        ({"count": "1"}, "config key 'count' got '1': expected int"),
        ({"count": 1.5}, r"config key 'count' got 1\.5: expected int"),
        ({"count": True}, "config key 'count' got True: expected int"),
        ({"count": 1, "on": 1}, "config key 'on' got 1: expected bool"),
        ({"count": 1, "rate": True}, "config key 'rate' got True: expected float"),
        ({"count": 1, "rate": "fast"}, "config key 'rate' got 'fast': expected float"),
        ({"count": 1, "window": "wide"}, r"config key 'window' got 'wide': expected int \| None"),
        ({"count": 1, "side": "lft"}, r"unknown value for config key 'side' 'lft': did you mean 'left'\?"),
        ({"count": 1, "inner": 3}, "config key 'inner' got 3: expected Inner"),
        ({"count": 1, "either": ["p", 2]}, r"config key 'either' got \['p', 2\]: expected str \| tuple"),
        ({"count": 1, "pair": [1, 2.0, 3]}, "config key 'pair'"),
        ({"count": None}, "config key 'count' got None: expected int"),
    ],
)
def test_invalid_data_raises_one_line_error_with_the_key_path(data: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        from_dict(Outer, data)
    assert "\n" not in str(caught.value)


def test_other_classes_raise() -> None:
    with pytest.raises(TypeError, match="not a dataclass"):
        from_dict(int, {})
