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


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[ExperimentSpec]:
    """The specs that would be run."""
    asked: list[ExperimentSpec] = []
    monkeypatch.setattr(api, "run_and_present", lambda spec, folder, **options: asked.append(spec))
    return asked


def test_defaults_are_those_of_the_command_line(specs: list[ExperimentSpec]) -> None:
    api.compare()
    assert specs == [Compare()._spec()]


def test_every_field_of_a_spec_is_an_argument(specs: list[ExperimentSpec], tmp_path: Path) -> None:
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
        api.compare(**given)
        assert specs[-1] == ExperimentSpec(**given)


def test_a_budget_may_be_text_and_an_unknown_option_is_refused(specs: list[ExperimentSpec]) -> None:
    api.compare(arms=["standard", "qdelta"], budget="10m")
    assert specs[0].budget == 600.0
    with pytest.raises(UsageError, match="unknown size"):
        api.compare(size="12m")
    with pytest.raises(TypeError, match="seed"):
        api.compare(seed=3)  # the option is called seeds
