"""What a run may be made of."""

from __future__ import annotations

from typing import Any

import pytest

from qkflow.config import from_dict, to_dict
from qkflow.errors import UsageError
from qkflow.training import TrainConfig


def test_a_config_survives_json(configure: Any) -> None:
    config = configure(
        schedule="stable", accumulate=2, betas=(0.8, 0.9), clip=None, model={"mechanism": "differential"}
    )
    assert from_dict(TrainConfig, to_dict(config)) == config


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch": 4, "accumulate": 3}, "batch 4 does not divide into 3"),
        ({"lr": 0.0}, "lr must be a finite number above 0, got 0"),
        ({"lr": float("inf")}, "lr must be a finite number above 0, got inf"),
        ({"lr": float("nan")}, "lr must be a finite number above 0, got nan"),
        ({"clip": -1.0}, "clip must be a finite number above 0"),
        ({"warmup": 5}, "warmup must lie between 0 and the 4 steps of the run, got 5"),
        ({"decay": 1.5}, "decay must lie between 0 and 1"),
        ({"floor": -0.1}, "floor must lie between 0 and 1"),
        ({"betas": (0.9, 1.0)}, r"betas must lie in \[0, 1\)"),
        ({"weight_decay": -1.0}, "weight_decay must be"),
        ({"stride": 17}, "stride 17 is longer than the context 16"),
        ({"checkpoint_every": 0}, "checkpoint_every must be at least 1"),
        ({"checkpoint_minutes": 0.0}, "checkpoint_minutes must be a finite number above 0"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"compile": True, "crossing": False}, "compile needs crossing"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(configure: Any, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        configure(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("key", "value", "near"), [("schedule", "cosin", "cosine"), ("device", "gpu", "cpu")])
def test_a_word_that_is_not_known_is_refused_with_the_nearest(configure: Any, key: str, value: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"{value!r}: did you mean {near!r}"):
        from_dict(TrainConfig, {**to_dict(configure()), key: value})
