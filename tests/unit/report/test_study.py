"""The page of a study: its sections, its numbers, and untrusted text that stays text."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from qkflow.experiment.result import ExperimentResult
from qkflow.report import build_report, write_report
from qkflow.report.attention_maps import AttentionMaps
from qkflow.report.html import minus_signs, render
from qkflow.report.study import comparison_table

ARMS = ("standard", "differential", "coupled")
Read = Callable[..., Any]


@pytest.fixture
def read(parse: Callable[[str], Any]) -> Read:
    """The parsed page of a study without its folder."""
    return lambda result, maps=None: parse(render(build_report(result, maps)))


@pytest.fixture
def written(synthetic: ModuleType, parse: Callable[[str], Any], tmp_path: Path) -> Read:
    """The parsed page of a study with attention maps."""

    def write(result: ExperimentResult) -> Any:
        runs = synthetic.folder(tmp_path, [arm.name for arm in result.arms], layers=1, excerpts=1, width=32)
        return parse(write_report(result, tmp_path / "out" / "report.html", runs=runs).read_text())

    return write


def in_folder(result: ExperimentResult, path: Path) -> ExperimentResult:
    return replace(result, folder=str(path))


def test_sections_are_in_order_and_every_reference_has_its_target(
    synthetic: ModuleType, written: Read, tmp_path: Path
) -> None:
    page = written(in_folder(synthetic.study(ARMS, tuned=True, failed=[("coupled", 1)]), tmp_path))
    assert page.headings == [
        "2 arms vs. standard on python-stdlib",
        "Verdicts",
        "Learning curves",
        "Differences",
        "Variation between seeds",
        "Training speed",
        "Cost and memory",
        "Attention on held-out text",
        "Diagnostics of the mechanisms",
        page.headings[9],  # the title of the diagnostic of differential attention
        "Learning-rate tuning",
        "Failed runs",
        "The corpus",
        "How to reproduce",
    ]
    page.check_references()


def test_the_page_contains_the_numbers_of_the_result(synthetic: ModuleType, read: Read) -> None:
    result = synthetic.study(ARMS)
    text = read(result).text
    for item in result.comparisons:
        assert minus_signs(f"{item.difference.mean:+.4f}") in text
        assert minus_signs(f"{item.difference.low:+.4f} to {item.difference.high:+.4f}") in text
    for arm in result.arms:
        assert f"{arm.mean:.4f}" in text
        assert f"{arm.parameters:,}" in text
        for loss in arm.losses:
            assert f"{loss:.4f}" in text
    for verdict in result.verdicts:
        assert minus_signs(verdict.sentence) in text
    for note in result.notes:
        assert note.value in text
    assert result.digest in text
    assert "qkflow compare 'my text.txt' --arms standard,differential,coupled" in text
    assert '"torch": "2.13.0"' in text


def test_scripts_are_allowed_by_hash_and_nothing_else_is_loaded(synthetic: ModuleType) -> None:
    source = render(build_report(synthetic.study()))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', source)
    assert policy is not None
    assert source.index("Content-Security-Policy") < source.index("<style>")
    directives = dict(part.split(" ", 1) for part in policy[1].replace("&#39;", "'").split("; "))
    assert directives["default-src"] == "'none'"
    assert "unsafe" not in directives["script-src"]
    assert directives["script-src"].count("'sha256-") == 2
    assert directives["form-action"] == directives["base-uri"] == "'none'"
    assert source.lstrip().startswith("<!doctype html>")
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", source)


def test_untrusted_text_stays_text(synthetic: ModuleType, written: Read, tmp_path: Path) -> None:
    bad = synthetic.HOSTILE
    result = synthetic.study(("standard", *bad), seeds=2, failed=[(bad[0], 0)])
    page = written(
        replace(
            result,
            folder=str(tmp_path),
            data=bad[1],
            command=("qkflow", bad[2], bad[3]),
            remarks=bad,
            design={bad[0]: bad[2], "deep": [{"x": bad[3]}]},
            environment={"cpu": bad[1]},
            notes=tuple(replace(result.notes[0], name=text, value=text, meaning=text) for text in bad),
        )
    )
    page.check_inert()
    for text in (bad[0], bad[1], "\\u202e", "\\x00", "\\x1b[31m", "{{ 7*7 }}"):
        assert text in page.text
    assert "49" not in page.text.split("{{ 7*7 }}")[1][:20]
    data = json.loads(page.scripts[0])
    assert "</script>" in data["maps"][3]["name"]
    assert "<" in data["excerpts"][0]["tokens"]


@pytest.mark.parametrize(("arms", "seeds"), [(("standard",), 0), (("standard",), 2), (ARMS, 0), (ARMS, 1), (ARMS, 2)])
def test_a_study_without_results_has_a_page(
    synthetic: ModuleType, read: Read, arms: tuple[str, ...], seeds: int
) -> None:
    text = read(synthetic.study(arms, seeds=seeds)).text
    assert "There are no attention maps to show yet." in text
    assert "JavaScript is disabled" in text
    assert ("No run is finished yet." in text) == (seeds == 0)
    assert ("No seed has a finished run of an arm" in text) == (seeds == 0 or len(arms) == 1)


def test_the_page_reports_what_is_missing(synthetic: ModuleType, read: Read) -> None:
    one_seed = read(synthetic.study(ARMS, seeds=1)).text
    assert "One seed only: no interval can be given." in one_seed
    assert "no interval" in one_seed
    assert (
        "6 of 12 runs are finished; these results are preliminary."
        in read(synthetic.study(ARMS, seeds=4, unfinished=True)).text
    )
    failed = read(synthetic.study(ARMS, failed=[("coupled", 1)])).text
    assert "14 of 15 runs are finished, 1 failed." in failed
    assert "coupled: seed 1: the loss was not finite" in failed
    assert "preliminary" not in failed
    complete = read(synthetic.study(ARMS), AttentionMaps(missing=["standard: gone"])).text
    assert "are finished" not in complete
    assert "standard: gone" in complete


def test_the_page_says_why_a_small_p_value_can_be_undecided(synthetic: ModuleType, read: Read) -> None:
    assert "Each round spends a part of it" in read(synthetic.study(ARMS)).text


def test_the_page_of_a_running_study_says_what_is_open_and_for_how_long(synthetic: ModuleType, read: Read) -> None:
    ended = synthetic.study(ARMS, seeds=4)
    first, second = (
        replace(verdict, kind=kind) for verdict, kind in zip(ended.verdicts, ("better", "undecided"), strict=True)
    )
    result = replace(ended, verdicts=(first, second), folder="my studies/a")
    state = replace(ended.state, ended=None, rounds=1, elapsed=120.0)
    text = read(replace(result, state=state)).text
    assert "qkflow compare --resume 'my studies/a'" in text
    assert "1 round is judged, 1 arm is open of 2, at most about 8m left." in text
    text = read(replace(result, state=replace(state, rounds=3), verdicts=(second, replace(second, arm=first.arm)))).text
    assert "3 rounds are judged, 2 arms are open of 2" in text
    unlimited = replace(result, state=replace(state, budget=None))
    assert "1 arm is open of 2." in read(unlimited).text
    design = {**result.design, "rule": {"seeds_by_round": [2, 3, 4, 6]}}
    assert "1 arm is open of 2, at most about 40s left." in read(replace(unlimited, design=design)).text


def test_the_answer_is_one_line_for_any_number_of_arms(synthetic: ModuleType) -> None:
    names = ("standard", "differential", "coupled", "qdelta", "kuramoto", "a+b", "standard:window=64", "x:window=64")
    assert build_report(synthetic.study()).answer.startswith("differential: worse by 0.0")
    answer = build_report(synthetic.study(names, seeds=10)).answer
    assert answer.startswith("Better than standard: coupled")
    assert all(name in answer for name in names[1:])
    assert build_report(synthetic.study(("standard",))).answer == "No verdict yet."


def test_missing_numbers_are_dashes_and_words(synthetic: ModuleType) -> None:
    def row(seeds: int) -> dict[str, str]:
        table = comparison_table(synthetic.study(ARMS[:2], seeds=seeds))
        return dict(zip([column.keys[0] for column in table.columns], table.texts()[1], strict=True))

    assert row(0)["difference"] == row(0)["std_ratio"] == "\N{EN DASH}"
    assert row(0)["tokens"] == "not reached"
    assert row(1)["difference"].endswith("(no interval)")


def test_tuning_shows_every_rate_and_failures(synthetic: ModuleType) -> None:
    assert "Tuning" not in [section.nav for section in build_report(synthetic.study()).sections]
    sections = {section.name: section for section in build_report(synthetic.study(tuned=True)).sections}
    table: Any = sections["tuning"].blocks[0]
    assert [column.title for column in table.columns] == ["arm", "chosen", "0.001", "0.003", "0.01"]
    assert table.texts()[0] == ("standard", "0.003", "2.4000", "2.3100", "failed")
