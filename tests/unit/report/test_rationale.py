"""The report on rationales: page, terminal, figures, CSV and JSON."""

import csv
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from qkflow.experiment.metrics.rationale import MetricChange, MetricSummary, RationaleSummary, TrainingPoint
from qkflow.report import build_report, export_csv, export_json, terminal, write_report
from qkflow.report import rationale as report
from qkflow.report.html import minus_signs, render

Read = Callable[[RationaleSummary], Any]


@pytest.fixture
def read(parse: Callable[[str], Any]) -> Read:
    return lambda result: parse(render(build_report(result)))


def printed(result: RationaleSummary, *, colors: bool = False) -> str:
    out = io.StringIO()
    system = "standard" if colors else None
    Console(file=out, width=80, force_terminal=colors, color_system=system).print(terminal(result))
    return out.getvalue()


def test_sections_are_in_order_and_every_reference_has_its_target(
    synthetic: ModuleType, parse: Callable[[str], Any], tmp_path: Path
) -> None:
    result = synthetic.rationale_study(examples=9)
    page = parse(write_report(result, tmp_path / "out" / "report.html").read_text())
    assert page.headings == [
        "3 arms vs. r = 1 on agreement (built-in grammar)",
        "Metrics of each arm",
        "Attention during training",
        "Attention confidence",
        "Variation between seeds",
        "Examples",
        *(f"Example {n + 1}" for n in range(report.MAX_EXAMPLES)),
        "Comparison with the paper",
        "Kinds of instances",
        "Learning-rate tuning",
        "The task",
        "How to reproduce",
    ]
    assert page.text.index(minus_signs(result.answer)) < page.text.index("Means over test instances")
    page.check_references()


def test_the_page_contains_the_numbers_of_the_result(synthetic: ModuleType, read: Read) -> None:
    result = synthetic.rationale_study()
    text = read(result).text
    for arm in result.arms:
        assert arm.description in text
        for metric in result.metrics:
            values, scale = arm.readings[metric.name], 100 if metric.unit == "percent" else 1
            digits = 3 if metric.unit == "" else 2
            for value in (values.mean, *values.by_seed):
                assert minus_signs(f"{scale * value:.{digits}f}") in text, (arm.name, metric.name)
            if change := result.change(arm.name, metric.name):
                ends = f"{scale * change.low:+.{digits}f} to {scale * change.high:+.{digits}f}"
                assert minus_signs(ends.replace("+0.000", "0.000")) in text, (arm.name, metric.name)
        assert f"{100 * arm.at_equal_loss.mean:.2f}" in text
    for number in ("92.43", "41.67", "0.240", "93.41", "76.85", "0.2100", "failed", "rationale outside the text"):
        assert number in text
    assert "qkflow sharpen --task agreement" in text
    assert '"torch": "2.13.0"' in text


def test_words_are_shaded_by_their_share_and_the_rationale_is_underlined(synthetic: ModuleType, read: Read) -> None:
    result = synthetic.rationale_study(examples=1)
    page = read(result)
    words = [attributes for _, attributes in page.elements if "word" in (attributes.get("class") or "").split()]
    (example,) = result.examples
    shares = [share for own in example.attention.values() for share in own]
    assert len(words) == len(shares)
    alphas = [float(word["style"].removeprefix("--a:")) for word in words]
    assert all(
        math.isclose(alpha, 0.55 * math.sqrt(share / max(shares)), abs_tol=1e-3)
        for alpha, share in zip(alphas, shares, strict=True)
    )
    marked = [n for n, word in enumerate(words) if "rationale" in word["class"]]
    n_words = len(example.words)
    assert marked == [line * n_words + example.rationale[0] for line in range(len(example.attention))]
    assert words[1]["title"] == f"author: {shares[1]:.3f}"
    assert "singular (0.75)" in page.text


def test_untrusted_text_stays_text(synthetic: ModuleType, read: Read) -> None:
    bad = synthetic.HOSTILE
    result = synthetic.rationale_study(("r = 1", *bad), seeds=2, words=(*bad, "שלום", "😀"))
    page = read(
        replace(
            result,
            arms=tuple(
                replace(arm, description=bad[0], by_kind={bad[1]: {"mass": 0.2}}, failures=bad) for arm in result.arms
            ),
            metrics=tuple(replace(metric, title=bad[0], description=bad[2]) for metric in result.metrics),
            task=bad[1],
            answer=bad[0],
            notes=bad,
            remarks=bad,
            skipped=dict.fromkeys(bad, 1),
            pooling=bad[2],
            command=bad,
            design={bad[0]: bad[3]},
            published=((bad[1], 1.0, 2.0, 3.0),),
            examples=tuple(replace(one, answer=bad[1], predicted={"r = 1": bad[2]}) for one in result.examples),
        )
    )
    page.check_inert()
    json.loads(page.scripts[0])
    for text in (bad[0], bad[1], "\\u202e", "\\x00", "\\x1b[31m", "{{ 7*7 }}", "שלום", "😀"):
        assert text in page.text


@pytest.mark.parametrize(
    ("arms", "seeds"), [((), 0), (("r = 1",), 1), (("r = 1", "r = 20"), 0), (("r = 1", "r = 20"), 1)]
)
def test_a_study_without_results_has_a_page(
    synthetic: ModuleType, read: Read, arms: tuple[str, ...], seeds: int
) -> None:
    result = synthetic.rationale_study(arms or ("r = 1",), seeds=seeds, examples=0)
    if not arms:
        result = replace(result, arms=(), changes=(), finished=0)
    text = read(result).text
    assert ("No verdict yet." in text) == (seeds == 0)
    assert ("0 of " in text and "preliminary" in text) == (
        result.finished == 0 and bool(result.arms) is False
    ) or seeds == 0
    assert ("may not be shown" in text) == (result.finished > 0)
    if seeds == 1 and len(arms) == 2:
        assert "no interval" in text
        assert "One seed says little." in text


def test_missing_numbers_are_dashes(synthetic: ModuleType, read: Read) -> None:
    result = synthetic.rationale_study(("r = 1", "r = 20"), seeds=3)
    unknown = MetricSummary(mean=None, by_seed=())
    arms = tuple(
        replace(arm, readings={**arm.readings, "mass": unknown}, curve=(), at_equal_loss=None) for arm in result.arms
    )
    changes = tuple(change for change in result.changes if change.metric != "mass")
    text = read(replace(result, arms=arms, changes=changes, equal_loss=None)).text
    assert "There is no loss that every finished run has passed" in text
    assert "No finished run has instances with a rationale." in text
    assert "nan" not in text.lower().replace("dominant", "")


@pytest.mark.parametrize("seeds", [0, 1, 5])
def test_tables_fit_80_columns(synthetic: ModuleType, seeds: int) -> None:
    result = synthetic.rationale_study(seeds=seeds)
    text = printed(result)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert (result.answer or "No verdict yet.") in " ".join(text.split())
    assert ("0 of 4 runs are finished" in text) == (seeds == 0)
    assert ("(no interval)" in text) == (seeds == 1)


def test_the_terminal_shows_the_rows_of_the_page(synthetic: ModuleType) -> None:
    result = synthetic.rationale_study()
    lines = printed(result).splitlines()
    table = report.change_table(result)
    for row in table.select(table.terminal).texts():
        assert any(all(cell in line for cell in row) for line in lines), row
    for name, *cells in report.metric_table(result).texts():
        assert any(line.startswith(name) and all(cell in line for cell in cells[:3]) for line in lines)


def test_names_cannot_control_the_terminal(synthetic: ModuleType) -> None:
    result = synthetic.rationale_study(("r = 1", *synthetic.HOSTILE), seeds=2)
    text = printed(replace(result, remarks=synthetic.HOSTILE))
    assert not {"\x1b", "\x00", "\x07", "\u202e"} & set(text)
    assert "[bold red]" in text  # markup is not interpreted
    assert "\x1b" in printed(synthetic.rationale_study(), colors=True)


@pytest.mark.parametrize(
    ("name", "mean", "p_holm", "expected"),
    [
        ("mass", 0.1, 0.01, "better"),
        ("mass", -0.1, 0.01, "worse"),
        ("sufficiency", -0.1, 0.01, "better"),
        ("sufficiency", 0.1, 0.01, "worse"),
        ("mass", 0.1, 0.06, ""),
        ("mass", 0.1, None, ""),
        ("effective", -2.0, 0.001, ""),
    ],
)
def test_a_decision_needs_a_small_corrected_p_value_and_a_direction(
    synthetic: ModuleType, name: str, mean: float, p_holm: float | None, expected: str
) -> None:
    metric = next(metric for metric in synthetic.METRICS if metric.name == name)
    change = MetricChange(arm="r = 20", metric=metric.name, mean=mean, low=None, high=None, p=0.001, p_holm=p_holm)
    assert report.decision(metric, change, 0.95) == expected


def test_the_path_has_a_thin_line_per_seed_and_a_bold_mean(synthetic: ModuleType) -> None:
    result = synthetic.rationale_study(("r = 1", "r = 20"), seeds=3)
    figure = report.path_chart(result)
    thin, bold = figure["data"][:6], figure["data"][6:]
    assert [trace["meta"]["arm"] for trace in (*thin, *bold)] == [0, 0, 0, 1, 1, 1, 0, 1]
    assert all(trace["line"]["width"] < bold[0]["line"]["width"] for trace in thin)
    losses = [path[4].loss for path in result.arms[0].paths]
    assert math.isclose(bold[0]["x"][4], math.prod(losses) ** (1 / 3))
    assert bold[1]["y"][-1] == pytest.approx(100 * sum(path[-1].mass for path in result.arms[1].paths) / 3)
    assert figure["layout"]["xaxis"]["autorange"] == "reversed"
    assert figure["layout"]["shapes"][0]["x0"] == result.equal_loss


def with_losses(result: RationaleSummary, *losses: float) -> RationaleSummary:
    path = tuple(TrainingPoint(step=n, loss=loss, mass=0.5, performance=1.0) for n, loss in enumerate(losses))
    return replace(result, arms=(replace(result.arms[0], paths=(path,)),))


def test_points_that_a_logarithmic_axis_cannot_show_are_left_out(synthetic: ModuleType) -> None:
    result = with_losses(synthetic.rationale_study(("r = 1",), seeds=1), 1.0, 0.0, math.nan, 0.5)
    assert [trace["x"] for trace in report.path_chart(result)["data"]] == [[1.0, 0.5], [1.0, 0.5]]


@pytest.mark.parametrize(("lowest", "expected"), [(0.9, ("nticks", 5)), (0.05, ("dtick", "D2")), (1e-6, ("dtick", 1))])
def test_ticks_depend_on_the_range_of_losses(
    synthetic: ModuleType, lowest: float, expected: tuple[str, str | int]
) -> None:
    result = with_losses(synthetic.rationale_study(("r = 1",), seeds=1), 1.0, lowest)
    assert expected in report.path_chart(result)["layout"]["xaxis"].items()


def test_strips_connect_the_runs_of_a_seed(synthetic: ModuleType) -> None:
    result = synthetic.rationale_study(("r = 1", "r = 20"), seeds=2)
    figure = report.metric_strips(result, "mass")
    values = [[100 * x for x in arm.readings["mass"].by_seed] for arm in result.arms]
    assert figure["data"][0]["x"] == [values[0][0], values[1][0]]
    assert figure["layout"]["xaxis"]["title"]["text"] == "mass (%)"
    assert report.metric_strips(synthetic.rationale_study(seeds=0), "mass")["data"] == []


def test_long_paths_are_thinned_and_keep_their_end() -> None:
    points = [TrainingPoint(step=n, loss=1.0, mass=0.5, performance=1.0) for n in range(1000)]
    kept = report.thin(points)
    assert len(kept) <= report.MAX_POINTS
    assert kept[-1].step == 999


def test_json_contains_the_whole_result(synthetic: ModuleType, tmp_path: Path) -> None:
    result = synthetic.rationale_study(("r = 1", *synthetic.HOSTILE), seeds=2)
    point = TrainingPoint(step=1, loss=math.inf, mass=math.nan, performance=1.0)
    arms = (replace(result.arms[0], paths=((point,),)), *result.arms[1:])
    path = export_json(replace(result, arms=arms), tmp_path / "results.json")
    record = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert record["arms"][0]["paths"] == [[{"loss": None, "mass": None, "performance": 1.0, "step": 1}]]
    assert record["arms"][1]["readings"]["mass"]["by_seed"] == list(result.arms[1].readings["mass"].by_seed)
    assert record["arms"][1]["tried"] == {"0.001": 0.21, "0.01": 0.05, "0.1": None}
    assert record["arms"][2]["name"] == synthetic.HOSTILE[1]
    assert record["changes"][0]["p_holm"] == result.changes[0].p_holm
    assert record["examples"][0]["words"] == list(result.examples[0].words)


def test_csv_has_one_row_per_run_and_per_difference(synthetic: ModuleType, tmp_path: Path) -> None:
    result = synthetic.rationale_study(("r = 1", "=1+1", "@x", *synthetic.HOSTILE), seeds=2)
    tables = {}
    for path in export_csv(result, tmp_path / "results.csv"):
        with path.open(newline="") as file:
            tables[path.name] = list(csv.DictReader(file))
    assert set(tables) == {"results.csv", "results-comparisons.csv"}
    assert len(tables["results.csv"]) == 2 * len(result.arms)
    assert float(tables["results.csv"][3]["mass"]) == result.arms[1].readings["mass"].by_seed[1]
    lows = {(change.arm, change.metric): change.low for change in result.changes}
    assert sorted(float(row["low"]) for row in tables["results-comparisons.csv"]) == sorted(lows.values())
    for row in (*tables["results.csv"], *tables["results-comparisons.csv"]):
        assert not row["arm"].startswith(("=", "+", "-", "@"))


def test_generation_tasks_show_the_first_word_during_training(synthetic: ModuleType) -> None:
    result = synthetic.rationale_study()
    assert report.path_table(result).columns[-1].title == "accuracy (%)"
    assert report.path_table(replace(result, kind="generation")).columns[-1].title == "first word correct (%)"
