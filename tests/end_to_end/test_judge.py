"""`qkflow judge`: its table, its JSON, its page, and one line with exit code 2 for bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from qkflow.cli import main

TABLE = """arm,seed,loss
standard,0,2.50
standard,1,2.52
standard,2,2.49
standard,3,2.51
good,0,2.41
good,1,2.435
good,2,2.40
good,3,2.418
same,0,2.501
same,1,2.519
same,2,2.4905
same,3,2.5102
elsewhere,a,2.7
elsewhere,b,2.75
an arm with a <b>very</b> long name: window=64,0,2.2
an arm with a <b>very</b> long name: window=64,1,2.6
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "results.csv"
    path.write_text(TABLE)
    return path


def test_the_table_has_one_line_per_arm_within_80_columns(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", str(table)]) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) == 8  # two lines about the baseline, an empty one, the header, and an arm each
    assert lines[0] == "baseline standard: mean 2.5050, 4 seeds; lower is better"
    assert lines[4].split()[:2] == ["good", "better"]
    assert "-0.0892 (-0.0940 to -0.0845)" in lines[4]
    assert lines[5].split()[:2] == ["same", "equivalent"]
    assert "note: the baseline is standard" in output.err
    assert "elsewhere and standard share fewer than 2 seeds" in output.err


def test_json_is_the_only_standard_output(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", str(table), "--json", "--look", "1", "--baseline", "same"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert set(record) == {"baseline", "error_rate", "verdicts"}
    assert (record["baseline"], record["error_rate"]) == ("same", 0.025)
    assert [verdict["arm"] for verdict in record["verdicts"]][:2] == ["standard", "good"]


def test_names_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.csv"
    path.write_text(TABLE.replace("good", "a:warning:b").replace("elsewhere", "c:smile:d"))
    assert main(["judge", str(path), "--json"]) == 0
    output = capsys.readouterr()
    assert [verdict["arm"] for verdict in json.loads(output.out)["verdicts"]][::2] == ["a:warning:b", "c:smile:d"]
    assert "c:smile:d" in output.err


@pytest.mark.parametrize("unit", ["e-7", "e9", ""])
def test_numbers_of_any_size_keep_their_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str], unit: str) -> None:
    path = tmp_path / "results.csv"
    losses = {"a": ("2.50", "2.52", "2.49"), "b": ("2.81", "2.82", "2.80")}
    rows = [f"{arm},{seed},{loss}{unit}\n" for arm, values in losses.items() for seed, loss in enumerate(values)]
    path.write_text("".join(["arm,seed,loss\n", *rows]))
    assert main(["judge", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    difference, low, high = (float(text) for text in re.findall(r"[+-]\d\S*[\d]", lines[4]))
    scale = float(f"1{unit}")
    assert difference == pytest.approx(0.3067 * scale, rel=0.01)
    assert 0.2 * scale < low < difference < high < 0.4 * scale
    margin = float(re.findall(r"margin .(\S+);", lines[1])[0])
    assert margin == pytest.approx(0.005 * 2.5033 * scale, rel=0.05)


def test_the_margin_is_never_rounded_to_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.csv"
    path.write_text("arm,seed,loss\na,0,1\na,1,9\nb,0,7\nb,1,3\n")
    assert main(["judge", str(path)]) == 0
    assert "margin \N{PLUS-MINUS SIGN}0.025;" in capsys.readouterr().out


def test_the_page_holds_the_verdicts_and_escapes_names(table: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["judge", str(table), "--out", str(page)]) == 0
    text = page.read_text()
    assert "Against standard: 1 better, 0 worse, 1 equivalent, 2 undecided." in text
    assert "<b>very</b>" not in text
    assert "Welch" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arm,loss\na,1\n", "no column 'seed'"),
        ("", "is empty"),
        ("arm;seed;loss\na;0;1\n", "separated by ';'"),
        ("arm,seed,loss\na,0,1\nb,0,2\n", "one seed"),
        ("arm,seed,loss\na,0,nan\n", "the loss is nan"),
        ("arm,seed,loss\na,0,1\na,0,2\n", "already"),
        ("arm,seed,block,loss\na,0,x,1\na,0,x,2\n", "block x stands in"),
        ("arm,seed,block,loss\na,0,x,1\na,0,y,1\nb,0,x,2\n", "has no block y"),
        ("arm,seed,block,loss,weight\na,0,x,1,-2\n", "negative"),
        ("arm,seed,loss\na,0,1\na,1,2\n", "a single arm"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    assert main(["judge", str(path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err
    assert len(output.err.splitlines()) == 1


def test_a_missing_baseline_is_one_line_and_exit_code_2(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", str(table), "--baseline", "standrad"]) == 2
    assert "unknown baseline 'standrad': did you mean 'standard'?" in capsys.readouterr().err
