"""What `qkflow reproduce` prints: published beside measured, in units that the table names."""

import statistics
from dataclasses import replace
from types import ModuleType

import pytest
from rich.console import Console

from qkflow.cli import main, reproduce
from qkflow.cli.reproduce import about, beside, ratios_beside
from qkflow.recipes import RECIPES, PublishedRatio, measured, recipe

SPREADS = PublishedRatio(quantity="variance over seeds", arm="standard+uncoupled", against="coupled", published=8.0)
TIMES = PublishedRatio(quantity="seconds a token", arm="coupled", against="standard", published=2.4)


def shown(table: object) -> str:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


@pytest.mark.parametrize("name", RECIPES)
def test_every_arm_of_a_recipe_has_a_row_and_a_published_figure_or_finding(name: str, synthetic: ModuleType) -> None:
    found = recipe(name)
    told = shown(beside(found, synthetic.study(tuple(found.table))))
    rows = {line.split()[0]: line for line in told.splitlines() if line.split()[0] in found.table}
    assert set(rows) == set(found.table) - {found.baseline}
    units = {"coupled-150m": "nats a token", "coupled-steps": "equivalent", "coupled-affine": "better"}
    units |= {"qdelta-ablation-340m": "%", "kuramoto-1m": "%", "kuramoto-5m": "unclear"}
    assert all(units.get(name, "") in row for row in rows.values())


def test_a_published_change_keeps_its_unit(synthetic: ModuleType) -> None:
    arms = ("standard", "coupled")
    assert "-0.0694 nats a token" in shown(beside(recipe("coupled-150m"), synthetic.study(arms)))
    assert "+0.0980 nats a token" in shown(beside(recipe("coupled-corpora-web"), synthetic.study(arms)))
    told = shown(beside(recipe("coupled-60m"), synthetic.study(tuple(recipe("coupled-60m").table))))
    assert told.count("-2.24% to -2.14%") == 2  # of Hamiltonian and of Euler, since it is not said which is which


def test_the_notes_say_what_is_printed_derived_unclear_and_ours() -> None:
    told = about(recipe("coupled-350m"), "enwik8")
    assert "  standard: perplexity 19.55 (derived)" in told
    assert "  coupled: perplexity 19.35" in told
    assert told[-1] == "published of WikiText-103, measured on enwik8"
    assert any(line.startswith("derived: ") and "19.35" in line for line in told)
    told = about(recipe("coupled-60m"), "enwik8")
    assert "  coupled, standard+euler: perplexity 22.55 to 22.62" in told
    assert any(line.startswith("unclear: ") for line in told)
    assert any(line.startswith("ours: ") for line in told)


def test_variances_are_compared_over_the_seeds_that_both_arms_have(synthetic: ModuleType) -> None:
    arms = ("standard", "coupled", "standard+uncoupled")
    summary = synthetic.study(arms, seeds=6, failed=[("coupled", 2)])
    ours, theirs = (dict(zip(arm.seeds, arm.bits_per_byte, strict=True)) for arm in reversed(summary.arms[1:]))
    want = statistics.variance(ours[seed] for seed in theirs) / statistics.variance(theirs.values())
    found = measured(SPREADS, summary)
    assert found is not None
    assert found.value == pytest.approx(want)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value < found.high


def test_times_are_compared_the_slower_arm_above_one(synthetic: ModuleType) -> None:
    summary = synthetic.study(("standard", "coupled"))
    found = measured(TIMES, summary)
    assert found is not None
    assert found.value == pytest.approx(1.18)
    unmeasured = replace(summary, arms=tuple(replace(arm, tokens_per_second=None) for arm in summary.arms))
    assert measured(TIMES, unmeasured) is None


def test_ratios_that_the_runs_do_not_tell_are_dashes(synthetic: ModuleType) -> None:
    found = recipe("coupled-60m")
    lines = shown(ratios_beside(found, synthetic.study(tuple(found.table), seeds=1))).splitlines()
    assert next(line for line in lines if line.startswith("variance")).split()[-3:] == ["8", "-", "-"]
    assert next(line for line in lines if line.startswith("seconds")).split()[-3:] == ["2.4", "1.18", "-"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["coupled-corpora-pubmed", "--scale", "paper"], "give one of yours as CORPUS"),
        (["coupled-60m", "--vocabulary-files", "gpt2"], "--vocabulary-files is for --scale paper"),
        (["qdelta-340m", "--scale", "paper", "--vocabulary-files", "gpt2"], "for GPT-2's tokens"),
        (["coupled-60m", "--scale", "paper", "--budget", "1h"], "--budget is for --scale laptop"),
        (["coupled-60", "--scale", "paper"], "did you mean 'coupled-60m'"),
    ],
)
def test_what_a_recipe_cannot_use_is_refused_before_anything_is_run(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(*_: object, **__: object) -> None:
        pytest.fail("a study was begun")

    monkeypatch.setattr(reproduce, "conduct", begun)
    assert main(["reproduce", *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_recipes_are_listed_by_the_names_that_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in RECIPES)
