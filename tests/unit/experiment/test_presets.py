"""Presets of `sharpen`: which specs are valid, and models that fit their tasks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from qkflow.config import from_dict, to_dict
from qkflow.data.tasks import TaskConfig
from qkflow.errors import UsageError
from qkflow.experiment.presets import sharpen_spec
from qkflow.experiment.spec import ExperimentSpec, RationaleSpec, parse_arm
from qkflow.training import TrainConfig, train
from qkflow.training.step import build_model

SMALL = TaskConfig(train=20, test=10)


def base_of(spec: ExperimentSpec) -> TrainConfig:
    assert spec.base is not None
    return spec.base


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ratios": (1.0, 0.0)}, "r must be a finite number above 0, got 1, 0"),
        ({"ratios": (1.0, -2.0)}, "r must be a finite number above 0, got 1, -2"),
        ({"ratios": (1.0, math.nan)}, "r must be a finite number above 0, got 1, nan"),
        ({"ratios": (1.0, 20.0), "growths": (math.inf,)}, "r must be a finite number above 0, got 1, 20, inf"),
        ({"ratios": (1.0, 20.0, 20.0)}, "--ratios has a number twice"),
        ({"ratios": (1.0, 20.0, 20.0000001)}, "--ratios has a number twice"),
        ({"growths": (40.0, 40.0)}, "--growth has a number twice"),
        ({"rates": (0.1, 0.1)}, "learning rates must be given, each once"),
        ({"ratios": (1.0,)}, "at least two arms are needed: give --ratios 1,20"),
        ({"ratios": (), "growths": (2.0, 3.0)}, "the first ratio is the baseline"),
        ({"rates": (math.nan,)}, "lr must be a finite number above 0"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch": -1}, "batch must be at least 1, got -1"),
        ({"jobs": 0}, "jobs must be at least 1, got 0"),
        ({"form": "CACO"}, "--form is for the task synthetic, got 'CACO' for agreement"),
        ({"data": TaskConfig(name="synthetic"), "mechanism": "differential"}, "the one-layer model of the theory"),
        ({"growths": (1.0,)}, "r cannot grow from 1 to 1"),
        ({"mechanism": "standard:r=20"}, "'standard:r=20' has a ratio: use --ratios 1,20"),
        ({"published": True}, "leave out --published"),
    ],
)
def test_invalid_specs_are_refused_on_one_line(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        sharpen_spec(**{"data": SMALL, **changes})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_invalid_rationale_options_are_refused() -> None:
    for changes, says in (
        ({"tau": math.nan}, "tau must be above 0 and at most 1, got nan"),
        ({"fraction": 1.5}, "fraction must be above 0 and at most 1, got 1.5"),
    ):
        with pytest.raises(UsageError, match=says):
            RationaleSpec(**changes)
    with pytest.raises(UsageError, match="did you mean 'average'"):
        from_dict(RationaleSpec, {"pooling": "averag"})


def test_arms_are_ordinary_arms() -> None:
    spec = sharpen_spec(SMALL, ratios=(1.0, 20.0), growths=(40.0,), mechanism="standard:window=8")
    assert spec.arms == ("standard:window=8,r=1", "standard:window=8,r=20", "standard:window=8,r=1,growth=40")
    assert parse_arm("standard:r=100,embeddings=50").embedding_ratio == 50


def test_a_spec_survives_json() -> None:
    for data in (SMALL, TaskConfig(name="synthetic", train=20, test=10)):
        spec = sharpen_spec(data)
        assert from_dict(ExperimentSpec, json.loads(json.dumps(to_dict(spec)))) == spec


def test_the_one_layer_model_learns_early_in_a_run_of_the_synthetic_task(tmp_path: Path) -> None:
    spec = sharpen_spec(TaskConfig(name="synthetic", train=64, test=16), steps=250, batch=16)
    result = train(base_of(spec), tmp_path / "run")
    assert result.metrics["loss"] < 2.0  # 3.9 at the start


@pytest.mark.parametrize("mechanism", ["standard:window=8", "differential", "differential:window=8", "qdelta"])
def test_every_mechanism_fits_the_model_of_the_default_task(mechanism: str) -> None:
    assert build_model(base_of(sharpen_spec(SMALL, mechanism=mechanism)).model)
