"""Validation of experiment specs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from qkflow.config import from_dict, to_dict
from qkflow.data import CorpusConfig
from qkflow.errors import UsageError
from qkflow.experiment.spec import ExperimentSpec, spec_differences
from qkflow.models import DecoderConfig

Ask = Callable[..., ExperimentSpec]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arms": ("standard",)}, "at least two arms"),
        ({"arms": ("standard", "differential", "standard")}, "'standard' is given twice"),
        ({"model": None, "size": "1mb"}, "unknown size '1mb': did you mean '1m'"),
        ({"size": "1m"}, "both a size and a model"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"seeds": 10**9}, "seeds must be at most 1000, got 1000000000"),
        ({"first_seed": -1}, "first_seed must be at least 0, got -1"),
        ({"tokens": 0}, "tokens must be at least 1, got 0"),
        ({"jobs": -1}, "jobs must be at least 1, got -1"),
        ({"budget": 0.0}, "budget must be a finite number above 0, got 0"),
        ({"budget": float("nan")}, "budget must be a finite number above 0, got nan"),
        ({"passes": float("inf")}, "passes must be a finite number above 0"),
        ({"margin": 0.0}, "margin must be between 0 and 1"),
        ({"margin": float("inf")}, "margin must be between 0 and 1"),
        ({"error_rate": 1.0}, "error_rate must be between 0 and 1"),
        ({"error_rate": float("nan")}, "error_rate must be between 0 and 1"),
        ({"learning_rates": ()}, "learning rates must be given"),
        ({"learning_rates": (1e-3, 1e-3)}, "each once"),
        ({"learning_rates": (1e-3, -1.0)}, "a learning rate must be a finite number above 0, got -1"),
    ],
)
def test_invalid_specs_are_refused_on_one_line(ask: Ask, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        ask(**changes)
    assert "\n" not in str(caught.value)


def test_a_spec_survives_json(ask: Ask) -> None:
    for spec in (ask(), ask(model=None, size="1m", learning_rates=(1e-3, 3e-3), budget=90.0, first_seed=7)):
        assert from_dict(ExperimentSpec, json.loads(json.dumps(to_dict(spec)))) == spec


def test_equal_specs_do_not_differ(ask: Ask) -> None:
    assert spec_differences(ask(), ask()) == ()


def test_every_different_field_is_listed(ask: Ask) -> None:
    other = ask(
        arms=("standard", "standard:window=8"),
        data=CorpusConfig(source="mine.txt", tokens="bpe"),
        budget=60.0,
        model=DecoderConfig(width=32, layers=1, heads=2, hidden=8),
    )
    lines = spec_differences(ask(), other)
    assert [line.partition(":")[0] for line in lines] == ["data", "arms", "budget", "model"]
    assert lines[1] == "arms: standard,differential in the study, standard,standard:window=8 requested"
    assert lines[0].endswith("in the study, mine.txt tokens=bpe requested")
    assert lines[2] == "budget: None in the study, 60 requested"
