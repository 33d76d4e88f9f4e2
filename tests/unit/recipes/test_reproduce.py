"""The output of `qkflow reproduce`: published and measured figures with their units."""

import statistics
from dataclasses import replace
from types import ModuleType

import pytest
from rich.console import Console

from qkflow.cli import main, reproduce
from qkflow.cli.reproduce import comparison_table, notes, ratio_table
from qkflow.recipes import RECIPES, measure_ratio, recipe

VARIANCES, TIMES = recipe("coupled-60m").ratios


def rendered(table: object, width: int = 160) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


@pytest.mark.parametrize("name", RECIPES)
def test_every_arm_has_a_row_with_a_published_figure_or_finding(name: str, synthetic: ModuleType) -> None:
    chosen = recipe(name)
    output = rendered(comparison_table(chosen, synthetic.study(tuple(chosen.table))))
    rows = {line.split()[0]: line for line in output.splitlines() if line.split()[0] in chosen.table}
    assert set(rows) == set(chosen.table) - {chosen.baseline}
    expected = {
        "coupled-150m": "-0.0694 nats per token",
        "coupled-corpora-web": "+0.0980 nats per token",
        "coupled-steps": "equivalent",
        "coupled-affine": "better",
        "qdelta-ablation-340m": "%",
        "kuramoto-1m": "+1.30%",
        "kuramoto-5m": "unclear",
        "frustrated-1m": "-0.97%",
    }
    assert all(expected.get(name, "") in row for row in rows.values())


def test_a_range_is_shown_for_both_integrators(synthetic: ModuleType) -> None:
    chosen = recipe("coupled-60m")
    output = rendered(comparison_table(chosen, synthetic.study(tuple(chosen.table))))
    assert output.count("-2.24% to -2.14%") == 2  # the paper does not say which is which


@pytest.mark.parametrize("name", ["kuramoto-code-5m", "frustrated-1m"])
def test_the_table_fits_into_80_columns(name: str, synthetic: ModuleType) -> None:
    chosen = recipe(name)
    output = rendered(comparison_table(chosen, synthetic.study(tuple(chosen.table))), width=80)
    assert max(map(len, output.splitlines())) <= 80
    assert ("nats" if "code" in name else "-0.97%") in output


def test_notes_say_what_is_published_derived_unclear_and_ours() -> None:
    lines = notes(recipe("coupled-350m"), "enwik8")
    assert {"  standard: perplexity 19.55 (derived)", "  coupled: perplexity 19.35"} <= set(lines)
    assert lines[-1] == "published on WikiText-103, measured on enwik8"
    assert any(line.startswith("derived: ") and "19.35" in line for line in lines)
    lines = notes(recipe("coupled-60m"), "enwik8")
    assert "  coupled, standard+euler: perplexity 22.55 to 22.62" in lines
    assert any(line.startswith("unclear: ") for line in lines)
    assert any(line.startswith("ours: ") for line in lines)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("kuramoto-1m", "  kuramoto: 1.637 +- 0.010 bits per character"),
        ("frustrated-1m", "  standard: 1.611 bits per character"),
        ("frustrated-1m", "  kuramoto:frustrated=True: 1.5953 +- 0.0014 bits per character"),
        ("kuramoto-code-5m", "  kuramoto: -0.012 to -0.010 bits per byte"),
        (
            "kuramoto-5m",
            "  kuramoto: median 1.448 against 1.452, mean 1.468 against 1.456 bits per character, five seeds",
        ),
    ],
)
def test_figures_keep_the_digits_of_the_paper(name: str, line: str) -> None:
    assert line in notes(recipe(name), "enwik8")


def test_variances_are_compared_over_shared_seeds(synthetic: ModuleType) -> None:
    arms = ("standard", "coupled", "standard+uncoupled")
    result = synthetic.study(arms, seeds=6, failed=[("coupled", 2)])
    uncoupled, coupled = (dict(zip(arm.seeds, arm.losses, strict=True)) for arm in reversed(result.arms[1:]))
    expected = statistics.variance(uncoupled[seed] for seed in coupled) / statistics.variance(coupled.values())
    ratio = measure_ratio(VARIANCES, result)
    assert ratio is not None
    assert ratio.value == pytest.approx(expected)
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < ratio.value < ratio.high


def test_the_ratio_of_times_is_above_one_for_the_slower_arm(synthetic: ModuleType) -> None:
    result = synthetic.study(("standard", "coupled"))
    ratio = measure_ratio(TIMES, result)
    assert ratio is not None
    assert ratio.value == pytest.approx(1.18)
    untimed = replace(result, arms=tuple(replace(arm, tokens_per_second=None) for arm in result.arms))
    assert measure_ratio(TIMES, untimed) is None


def test_unknown_ratios_are_dashes(synthetic: ModuleType) -> None:
    chosen = recipe("coupled-60m")
    lines = rendered(ratio_table(chosen, synthetic.study(tuple(chosen.table), seeds=1))).splitlines()
    assert next(line for line in lines if line.startswith("variance")).split()[-3:] == ["8", "-", "-"]
    assert next(line for line in lines if line.startswith("seconds")).split()[-3:] == ["2.4", "1.18", "-"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["coupled-corpora-pubmed", "--scale", "paper"], "give your own copy as CORPUS"),
        (["coupled-60m", "--vocabulary-files", "gpt2"], "--vocabulary-files is for GPT-2's tokens"),
        (["qdelta-340m", "--scale", "paper", "--vocabulary-files", "gpt2"], "--vocabulary-files is for GPT-2's tokens"),
        (["coupled-60m", "--scale", "paper", "--budget", "1h"], "--budget is for --scale laptop"),
        (["coupled-60", "--scale", "paper"], "did you mean 'coupled-60m'"),
    ],
)
def test_flags_that_do_not_apply_are_refused_before_the_study(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "run_and_present", lambda *_, **__: pytest.fail("the study was run"))
    assert main(["reproduce", *flags]) == 2
    assert message in capsys.readouterr().err


def test_all_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in RECIPES)
