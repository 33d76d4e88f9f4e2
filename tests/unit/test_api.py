"""`qkflow.compare`: its arguments are the fields of a spec, with the defaults of the command line."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from qkflow import DecoderConfig, UsageError, api
from qkflow.cli.compare import Compare
from qkflow.data import CorpusConfig
from qkflow.experiment.spec import ExperimentSpec

PRESETS_ONLY = {"base", "rationale"}


class Asked(Exception):
    """Raised instead of running a study."""


def asked(**arguments: Any) -> ExperimentSpec:
    """The spec that `compare` would run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "run_and_present", ask)
        with pytest.raises(Asked) as error:
            api.compare(**arguments)
    return error.value.args[0]


def ask(spec: ExperimentSpec, folder: Path, **options: Any) -> None:
    raise Asked(spec)


def test_defaults_are_those_of_the_command_line() -> None:
    assert asked() == Compare()._spec()


def test_every_field_of_a_spec_is_an_argument(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "data": CorpusConfig(source=str(tmp_path / "my.txt")),
        "arms": ("standard", "qdelta"),
        "match": "flops",
        "budget": 90.0,
        "size": "100k",
        "model": DecoderConfig(width=16, layers=1, heads=2, hidden=32),
        "tokens": 5000,
        "seeds": 3,
        "first_seed": 7,
        "adaptive": False,
        "learning_rates": (1e-3, 2e-3),
        "optimizer": "adamw",
        "context": 32,
        "batch": 8,
        "margin": 0.01,
        "error_rate": 0.1,
        "passes": 2.0,
        "jobs": 2,
        "threads": 1,
        "device": "cpu",
    }
    assert set(values) == {field.name for field in fields(ExperimentSpec)} - PRESETS_ONLY
    assert set(values) < set(inspect.signature(api.compare).parameters)
    for left_out in ("size", "model"):  # only one of them may be given
        given = {name: value for name, value in values.items() if name != left_out}
        assert asked(**given) == ExperimentSpec(**given)


def test_a_budget_may_be_text_and_an_unknown_option_is_refused() -> None:
    assert asked(arms=["standard", "qdelta"], budget="10m").budget == 600.0
    with pytest.raises(UsageError, match="unknown size"):
        api.compare(size="12m")
    with pytest.raises(TypeError, match="seed"):
        api.compare(seed=3)  # the option is called seeds
