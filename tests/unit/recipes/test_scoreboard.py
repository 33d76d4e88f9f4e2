"""Records of claims, and the tables and pages made from them."""

from __future__ import annotations

import json
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from qkflow.cli import claims as cli_claims
from qkflow.cli.console import Console
from qkflow.errors import Interrupted, UsageError
from qkflow.experiment.executors.local import LocalExecutor
from qkflow.recipes import CLAIMS, claim
from qkflow.recipes.criteria import ClaimVerdict, Reading
from qkflow.recipes.scoreboard import claim_record, control_rows, score_rows, summary
from qkflow.report.claims import claims_report
from qkflow.report.html import render
from qkflow.training.signals import stop_on_signals


@pytest.fixture
def records(synthetic: ModuleType) -> dict[str, Any]:
    reading = Reading(
        name="coupled - standard", outcome="confirmed", value=-0.05, low=-0.07, high=-0.03, unit="bits", seeds=4
    )
    verdict = ClaimVerdict(outcome="confirmed", readings=(reading,))
    result = synthetic.study(("standard", "coupled"), tuned=True)
    record = claim_record(claim("coupled-better"), verdict, {"main": result, "qk-norm": result})
    return {"coupled-better": json.loads(json.dumps(record))}


def test_a_record_has_the_losses_and_trials_of_every_arm(records: dict[str, Any], synthetic: ModuleType) -> None:
    result = synthetic.study(("standard", "coupled"), tuned=True)
    arms = records["coupled-better"]["studies"]["main"]["arms"]
    assert [arm["arm"] for arm in arms] == ["standard", "coupled"]
    for arm, expected in zip(arms, result.arms, strict=True):
        assert arm["losses"] == pytest.approx(expected.losses, abs=1e-6)
        assert len(arm["tuning"]) == len(expected.tuning) > 0
        assert arm["curve"][-1][0] == expected.curves[0].tokens[-1]
        assert arm["curve"][-1][1] == pytest.approx(np.mean([curve.losses[-1] for curve in expected.curves]), abs=1e-6)


def test_rows_are_made_from_records(records: dict[str, Any]) -> None:
    (row,) = score_rows(records)
    assert (row.number, row.measured, row.outcome) == (
        "1",
        "coupled - standard: -0.0500 (-0.0700 to -0.0300)",
        "confirmed",
    )
    (control,) = control_rows(records)
    assert control[:3] == ("1", "qk-norm", "`coupled` - `standard`")
    assert summary(records) == "1 confirmed, 0 contradicted, 0 undecided"


def test_the_page_shows_outcomes_and_controls(records: dict[str, Any]) -> None:
    page = render(claims_report(records))
    assert "1 confirmed, 0 contradicted, 0 undecided" in page
    assert f"1 of {len(CLAIMS)} published claims" in page
    assert "qk-norm" in page


def test_all_claims_run_nearest_first_until_the_budget_is_spent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    finished: list[str] = []

    def run_claim(chosen: Any, out: Path, **options: Any) -> None:
        finished.append(chosen.name)
        if len(finished) == 3:
            raise Interrupted("stopped")

    monkeypatch.setattr(cli_claims, "run_claim", run_claim)
    monkeypatch.setattr(cli_claims, "_is_finished", lambda chosen, out: chosen.name in finished)
    arguments: dict[str, Any] = {"executor": LocalExecutor(), "console": Console(quiet=True)}
    with pytest.raises(Interrupted):  # Ctrl-C
        cli_claims.run_all(tmp_path, **arguments)
    runs = [cli_claims._planned_runs(claim(name)) for name in finished]
    assert runs == sorted(runs)
    assert runs[0] == min(map(cli_claims._planned_runs, CLAIMS))


@pytest.mark.parametrize("is_in_study", [True, False])
def test_the_budget_stops_a_background_job_within_and_between_studies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_in_study: bool
) -> None:
    def run_claim(*args: Any, **options: Any) -> None:
        if not is_in_study:
            threading.Event().wait(60)
        with stop_on_signals() as stop:
            while not stop():
                threading.Event().wait(0.001)
        raise Interrupted("stopped")

    monkeypatch.setattr(cli_claims, "run_claim", run_claim)
    console = Console(record=True, quiet=False)
    before = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        cli_claims.run_all(tmp_path, executor=LocalExecutor(), console=console, budget=0.05)
    finally:
        signal.signal(signal.SIGINT, before[1])
    assert signal.getsignal(signal.SIGTERM) == before[0]
    assert "the budget is spent: the same command continues" in console.export_text()


def test_claims_without_data_are_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tested: list[tuple[str, bool]] = []

    def run_claim(chosen: Any, out: Path, *, controls: bool, **options: Any) -> None:
        if chosen.name != "coupled-better":
            raise UsageError("no such file")
        tested.append((chosen.name, controls))

    monkeypatch.setattr(cli_claims, "run_claim", run_claim)
    monkeypatch.setattr(cli_claims, "_is_finished", lambda chosen, out: (chosen.name, False) in tested)
    arguments: dict[str, Any] = {"executor": LocalExecutor(), "console": Console(quiet=True)}
    with pytest.raises(UsageError, match="no such file"):  # nothing is recorded
        cli_claims.run_all(tmp_path, **arguments)
    assert tested == [("coupled-better", False), ("coupled-better", True)]
    assert capsys.readouterr().err.count("is skipped: no such file") == len(CLAIMS) - 1
    (tmp_path / "claims.json").write_text("{}")
    cli_claims.run_all(tmp_path, **arguments)


def test_a_record_keeps_earlier_controls_and_is_needed_to_be_finished(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, synthetic: ModuleType
) -> None:
    chosen, result = claim("coupled-better"), synthetic.study(("standard", "coupled"), tuned=True)
    monkeypatch.setattr(cli_claims, "holds_study", lambda folder: True)
    ended = replace(result, state=replace(result.state, ended="all arms are decided"))
    monkeypatch.setattr(cli_claims, "read_result", lambda folder: ended)
    assert not cli_claims._is_finished(chosen, tmp_path)  # killed before the outcome was written
    verdict = ClaimVerdict(outcome="undecided", readings=())
    cli_claims._record(tmp_path, chosen, verdict, {"main": result, "qk-norm": result})
    cli_claims._record(tmp_path, chosen, verdict, {"main": result})
    assert cli_claims._is_finished(chosen, tmp_path)
    assert list(json.loads((tmp_path / "claims.json").read_text())["coupled-better"]["studies"]) == ["main", "qk-norm"]
