"""Training configs: valid values, errors, and conversion to and from plain data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from qkflow.config import from_dict, to_dict
from qkflow.data.tasks import TaskConfig
from qkflow.errors import UsageError
from qkflow.models import ClassifierConfig, DecoderConfig
from qkflow.models.one_layer import OneLayerConfig
from qkflow.training import TrainConfig
from qkflow.training.config import ModelConfig, task_defaults


def test_a_config_survives_the_round_trip_through_plain_data(configure: Any) -> None:
    config = configure(
        schedule="stable", accumulate=2, betas=(0.8, 0.9), clip=None, model={"mechanism": "differential"}
    )
    assert from_dict(TrainConfig, to_dict(config)) == config


@pytest.mark.parametrize(
    "model",
    [
        ClassifierConfig(width=8, layers=1, heads=1, vocabulary=9, classes=2),
        OneLayerConfig(vocabulary=9),
        DecoderConfig(width=8, layers=1, heads=1, hidden=8),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_task_config_survives_the_round_trip_through_plain_data(model: ModelConfig) -> None:
    config = task_defaults(data=TaskConfig(train=50), model=model, steps=3, lr=0.1)
    config = replace(config, optimizer="sgd", momentum=0.9)
    assert from_dict(TrainConfig, to_dict(config)) == config


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"batch": 4, "accumulate": 3}, "batch 4 is not divisible by accumulate 3"),
        ({"lr": 0.0}, "lr must be a finite number above 0, got 0"),
        ({"lr": math.inf}, "lr must be a finite number above 0, got inf"),
        ({"lr": math.nan}, "lr must be a finite number above 0, got nan"),
        ({"clip": -1.0}, "clip must be a finite number above 0"),
        ({"qk_ratio": -1.0}, "qk_ratio must be a finite number above 0"),
        ({"qk_growth": math.inf}, "qk_growth must be a finite number above 0"),
        ({"embedding_ratio": 0.0}, "embedding_ratio must be a finite number above 0"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"warmup": 5}, r"warmup must be between 0 and the number of steps \(4\), got 5"),
        ({"decay": 1.5}, "decay must be between 0 and 1"),
        ({"floor": -0.1}, "floor must be between 0 and 1"),
        ({"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\)"),
        ({"weight_decay": -1.0}, "weight_decay must be"),
        ({"stride": 17}, "stride must be at most the context length 16"),
        ({"checkpoint_every": 0}, "checkpoint_every must be at least 1"),
        ({"checkpoint_minutes": 0.0}, "checkpoint_minutes must be a finite number above 0"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"compile": True, "crossing": False}, "compile requires crossing"),
    ],
)
def test_invalid_values_raise_a_one_line_error(configure: Any, changes: dict[str, Any], fragment: str) -> None:
    with pytest.raises(UsageError, match=fragment) as caught:
        configure(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("key", "value", "nearest"), [("schedule", "cosin", "cosine"), ("device", "gpu", "cpu")])
def test_an_unknown_option_is_refused_with_a_suggestion(configure: Any, key: str, value: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"{value!r}.*{nearest!r}"):
        from_dict(TrainConfig, {**to_dict(configure()), key: value})
