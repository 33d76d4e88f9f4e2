"""Seeds come in rounds. Runs are written without training; the statistics are real."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qkflow.errors import UsageError
from qkflow.experiment import runner
from qkflow.experiment.decisions import Decisions
from qkflow.experiment.planner import make_design
from qkflow.experiment.runner import run_experiment
from qkflow.experiment.spec import ExperimentSpec
from qkflow.experiment.stats.rounds import plan_rounds
from qkflow.experiment.study_dir import write_design

Ask = Callable[..., ExperimentSpec]
ARMS = ("standard", "differential", "standard:window=8", "standard:window=4")
WINDOW_4 = "standard_window=4"
SEEDS = plan_rounds(8, is_limited=True).seeds_by_round


class Killed(BaseException):
    """The process was killed."""


@pytest.fixture
def spec(ask: Ask) -> ExperimentSpec:
    """Four arms with at most eight seeds."""
    return ask(arms=ARMS, seeds=8, margin=0.03)


@pytest.fixture
def world(fake_training: Any) -> Any:
    """Differential is much worse, a window of 8 is equivalent, and a window of 4 is too noisy to tell."""
    fake_training.effects = {"differential": 0.3}
    fake_training.noise = {WINDOW_4: 0.1}
    return fake_training


def decided(study: Path) -> list[dict[str, Any]]:
    """The decisions after the design, without times and without those about runs."""
    records = [record for record in Decisions(study).records[1:] if record["kind"] != "run"]
    return [{key: value for key, value in record.items() if key != "elapsed"} for record in records]


def recorded_runs(study: Path) -> set[str]:
    return {record["folder"] for record in Decisions(study).of_kind("run")}


def rounds(study: Path) -> list[tuple[int, int]]:
    """The number of arms and of seeds of each round."""
    return [(len(round_.arms), len(round_.seeds)) for round_ in Decisions(study).rounds()]


def test_a_decided_arm_gets_no_further_seeds_and_the_baseline_runs_in_every_round(
    spec: ExperimentSpec, inline: Any, world: Any, tmp_path: Path
) -> None:
    result = run_experiment(spec, tmp_path, executor=inline())
    decisions = Decisions(tmp_path)
    assert [verdict.kind for verdict in result.verdicts] == ["worse", "equivalent", "undecided"]
    assert result.arms[0].seeds == result.arms[3].seeds == tuple(range(8))
    for verdict, arm in zip(result.verdicts[:2], result.arms[1:3], strict=True):
        assert verdict.round is not None
        assert arm.seeds == tuple(range(SEEDS[verdict.round - 1]))
        assert all((arm.name in round_.arms) == (round_.number <= verdict.round) for round_ in decisions.rounds())
    assert all(round_.arms[0] == "standard" for round_ in decisions.rounds())
    assert len(world.started) == len(set(world.started)) == sum(arms * seeds for arms, seeds in rounds(tmp_path))
    assert result.state.ended == "8 seeds are the most"
    assert result.state.rounds == len(SEEDS)


def test_verdicts_are_final(spec: ExperimentSpec, inline: Any, world: Any, tmp_path: Path) -> None:
    run_experiment(spec, tmp_path, executor=inline())
    decisions = Decisions(tmp_path)
    by_round = [decisions.verdicts(number) for number in range(1, len(SEEDS) + 1)]
    for arm in ARMS[1:]:
        known = [verdicts[arm] for verdicts in by_round if verdicts[arm].kind != "undecided"]
        assert len({verdict.sentence for verdict in known}) <= 1
        assert all(verdict == known[0] for verdict in known)


def test_an_equivalent_arm_keeps_its_share_of_the_error_rate(
    spec: ExperimentSpec, inline: Any, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, given = runner.judge_round, []

    def spy(*losses: Any, **options: Any) -> Any:
        given.append({arm: verdict.kind for arm, verdict in options["decided"].items()})
        return judge(*losses, **options)

    monkeypatch.setattr(runner, "judge_round", spy)
    run_experiment(spec, tmp_path, executor=inline())
    assert given[0] == {}
    assert given[-1] == {"differential": "worse", "standard:window=8": "equivalent", "standard:window=4": "undecided"}


def test_the_study_ends_when_all_arms_are_decided(
    spec: ExperimentSpec, inline: Any, world: Any, tmp_path: Path
) -> None:
    world.noise = {}
    result = run_experiment(spec, tmp_path, executor=inline())
    assert {verdict.kind for verdict in result.verdicts} == {"worse", "equivalent"}
    assert result.state.ended == "all arms are decided"
    assert len(world.started) < 4 * 8
    run_experiment(None, tmp_path, executor=inline())
    assert len(world.started) == len(set(world.started))
    with pytest.raises(UsageError, match="all arms are decided: more time would change nothing"):
        run_experiment(None, tmp_path, executor=inline(), more=60.0)


class Clock:
    """The seconds that a study has taken: one per run. A round is expected to take five."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world: Any) -> None:
        monkeypatch.setattr(runner._Session, "_elapsed", lambda session: float(len(world.started)))
        monkeypatch.setattr(runner._Session, "_round_seconds", lambda session, round_: 5.0)


@pytest.mark.parametrize("budget", [1.0, 13.0, 14.0, 21.0])
def test_time_decides_only_whether_another_round_starts(
    spec: ExperimentSpec, inline: Any, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: float
) -> None:
    without_limit = tmp_path / "all"
    run_experiment(spec, without_limit, executor=inline())
    world.started.clear()
    Clock(monkeypatch, world)
    study = tmp_path / "study"
    write_design(study, replace(make_design(spec, inline(), notice=lambda text: None), budget=budget))
    result = run_experiment(None, study, executor=inline())
    assert result.state.ended == "the budget is spent"
    before_end = decided(study)[:-1]
    assert before_end == decided(without_limit)[: len(before_end)]
    ends, elapsed = [], 0
    for arms, seeds in rounds(without_limit):
        elapsed += arms * seeds
        ends.append(elapsed)
    expected = 1 + sum(end + 5 <= budget for end in ends)
    assert result.state.rounds == len(rounds(study)) == expected

    run_experiment(None, study, executor=inline())  # it has ended: time that passes later changes nothing
    assert result.state.rounds == Decisions(study).judged_rounds()
    more = run_experiment(None, study, executor=inline(), more=1000.0)
    assert more.state.ended == "8 seeds are the most"
    assert [r for r in decided(study) if r["kind"] in ("round", "verdicts")] == decided(without_limit)[:-1]


def test_a_study_without_a_budget_has_no_limit(
    spec: ExperimentSpec, inline: Any, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner._Session, "_elapsed", lambda session: 1e9)
    assert run_experiment(spec, tmp_path, executor=inline()).state.ended == "8 seeds are the most"


def test_an_unfinished_study_is_not_extended(
    spec: ExperimentSpec, inline: Any, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(name: str) -> None:
        raise Killed

    world.on_start = kill
    with pytest.raises(Killed):
        run_experiment(spec, tmp_path, executor=inline())
    with pytest.raises(UsageError, match=r"has not ended: finish it with `qkflow compare --resume"):
        run_experiment(None, tmp_path, executor=inline(), more=60.0)


def test_a_failed_arm_waits_and_goes_on_when_its_run_succeeds(
    spec: ExperimentSpec, inline: Any, world: Any, watcher: Any, tmp_path: Path
) -> None:
    world.failing = {f"{WINDOW_4} seed-2"}
    result = run_experiment(spec, tmp_path, executor=inline(), observer=watcher)
    assert watcher.failures == [("standard:window=4 seed 2", "it broke")]
    assert result.state.ended == "runs failed"
    ended = Decisions(tmp_path).last_decision()
    assert ended["failed"] == ["standard:window=4"]
    n_rounds = len(rounds(tmp_path))
    assert n_rounds == result.state.rounds == 2

    run_experiment(None, tmp_path, executor=inline())  # it fails again
    assert len(rounds(tmp_path)) == n_rounds
    world.failing = set()
    result = run_experiment(None, tmp_path, executor=inline())
    assert result.state.ended == "8 seeds are the most"
    assert result.arms[3].seeds == tuple(range(8))


@pytest.mark.parametrize("failing", ["standard seed-0", "differential seed-1"])
def test_other_arms_are_judged_if_one_fails_unless_it_is_the_baseline(
    spec: ExperimentSpec, inline: Any, world: Any, tmp_path: Path, failing: str
) -> None:
    world.failing = {failing}
    result = run_experiment(spec, tmp_path, executor=inline())
    if failing.startswith("standard"):
        assert (result.state.rounds, result.state.ended) == (1, "runs failed")
    else:
        assert (result.state.rounds, result.state.ended) == (len(SEEDS), "8 seeds are the most")
        assert [verdict.kind for verdict in result.verdicts] == ["undecided", "equivalent", "undecided"]
        assert len(result.arms[1].seeds) == 1


def test_an_old_failure_note_of_a_finished_run_stops_nothing(
    spec: ExperimentSpec, inline: Any, world: Any, tmp_path: Path
) -> None:
    """attempt.json has no checksum: nothing may depend on it once a run is finished."""
    run_experiment(spec, tmp_path, executor=inline())
    before = decided(tmp_path)
    records = Decisions(tmp_path).records
    (tmp_path / "runs/standard/seed-0/attempt.json").write_text('{"failed": "no", "failed_for_good": true}')
    result = run_experiment(None, tmp_path, executor=inline())
    assert decided(tmp_path) == before
    assert Decisions(tmp_path).records == records
    assert not result.arms[0].failures


def test_the_first_seed_is_the_one_asked_for(spec: ExperimentSpec, inline: Any, world: Any, tmp_path: Path) -> None:
    result = run_experiment(replace(spec, first_seed=100), tmp_path, executor=inline())
    assert result.arms[0].seeds == tuple(range(100, 108))
    assert [round_.seeds[-1] for round_ in Decisions(tmp_path).rounds()] == [99 + seeds for seeds in SEEDS]


def test_a_study_killed_before_or_during_any_decision_makes_the_same_ones(
    spec: ExperimentSpec, inline: Any, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(spec, arms=(ARMS[0], ARMS[3]), seeds=3, learning_rates=(1e-3, 3e-3))
    run_experiment(spec, tmp_path / "all", executor=inline())
    expected, runs = decided(tmp_path / "all"), recorded_runs(tmp_path / "all")
    append = Decisions.append
    for number in range(len(Decisions(tmp_path / "all").records)):
        study, count, cut = tmp_path / "killed", iter(range(10**6)), (None, 0, 20)[number % 3]

        def kill(self: Decisions, kind: str, values: Any, number: int = number, cut: int | None = cut) -> None:
            if next(count) != number:  # noqa: B023
                return append(self, kind, values)
            if cut is None:  # after the decision, before anything follows from it
                append(self, kind, values)
            elif cut:
                with open(self.path, "ab") as file:
                    file.write(b'{"arms": ["standard", "differential"]'[:cut])
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(Decisions, "append", kill)
            with pytest.raises(Killed):
                run_experiment(spec, study, executor=inline())
        run_experiment(None, study, executor=inline())
        assert decided(study) == expected
        assert recorded_runs(study) == runs
        shutil.rmtree(study)


def test_a_study_killed_in_any_run_makes_the_same_decisions(
    spec: ExperimentSpec, inline: Any, world: Any, tmp_path: Path
) -> None:
    run_experiment(spec, tmp_path / "all", executor=inline())
    expected, started = decided(tmp_path / "all"), list(world.started)

    def kill(name: str) -> None:
        world.on_start = lambda name: None
        raise Killed

    study = tmp_path / "killed"
    for victim in started[::3]:
        world.on_start = lambda name, victim=victim: kill(name) if name == victim else None
        with pytest.raises(Killed):
            run_experiment(spec, study, executor=inline())
    run_experiment(None, study, executor=inline())
    assert decided(study) == expected
