"""`qkflow compare`, `report` and `reproduce` from the command line."""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from qkflow.cli import main
from qkflow.data import CorpusConfig
from qkflow.experiment.executors.base import CallResult, Resources, describe_error
from qkflow.experiment.executors.local import LocalExecutor
from qkflow.experiment.spec import ExperimentSpec
from qkflow.recipes import Recipe

TINY = ("--size", "100k", "--train-tokens", "4k", "--context", "16", "--batch", "4")


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, session_cache: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QKFLOW_CACHE", session_cache)
    monkeypatch.delenv("QKFLOW_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    Path("text.txt").write_text("".join(f"line {i}: the quick brown fox number {i * i}\n" for i in range(2000)))
    return tmp_path


def qkflow(*args: str) -> int:
    return main(list(args))


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return the error message of a command that must fail."""
    capsys.readouterr()
    assert qkflow(*args) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("qkflow: ")
    return error


def test_a_study_writes_verdicts_a_report_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert qkflow("compare", "text.txt", "--arms", "standard,differential", "--seeds", "2", *TINY, "--out", "s") == 0
    output = capsys.readouterr().out
    results = json.loads(Path("s/results.json").read_text())
    assert [verdict["arm"] for verdict in results["verdicts"]] == ["differential"]
    assert results["verdicts"][0]["kind"] in output
    assert str(Path("s/report.html").absolute()) in output
    assert max(map(len, output.splitlines())) <= 80 or str(Path.cwd()) in max(output.splitlines(), key=len)
    page = Path("s/report.html").read_text()
    assert results["verdicts"][0]["sentence"].split(":")[0] in page
    with open("s/results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["arm"], row["seed"]) for row in rows} == {
        (a, s) for a in ("standard", "differential") for s in ("0", "1")
    }
    design = json.loads(Path("s/design.json").read_text())
    assert design["spec"]["arms"] == ["standard", "differential"]

    before = Path("s/design.json").read_bytes()
    assert qkflow("compare", "--resume", "s") == 0
    assert Path("s/design.json").read_bytes() == before
    Path("s/report.html").unlink()
    assert qkflow("report", "s") == 0
    assert Path("s/report.html").read_text() == page

    error = refused(
        capsys, "compare", "text.txt", "--arms", "standard,differential", "--seeds", "3", *TINY, "--out", "s"
    )
    assert "seeds" in error
    assert "2" in error
    assert "3" in error

    assert "give --budget" in refused(capsys, "compare", "--extend", "s")
    assert "leave out --seeds" in refused(capsys, "compare", "--extend", "s", "--seeds", "3", "--budget", "1m")
    assert "more time would change nothing" in refused(capsys, "compare", "--extend", "s", "--budget", "1m")


def test_a_recall_study_reports_accuracies_and_one_seed_has_no_interval(
    capsys: pytest.CaptureFixture[str],
) -> None:
    task = "mqar:pairs=1+2,length=16,keys=4,values=4,train=400,validation=20,each=5"
    assert qkflow("compare", task, "--arms", "standard,differential", "--seeds", "1", *TINY, "--out", "s") == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80 or str(Path.cwd()) in max(output.splitlines(), key=len)
    assert "Accuracy on the test instances" in output
    assert "one seed" in " ".join(output.split()).lower()
    results = json.loads(Path("s/results.json").read_text())
    assert results["verdicts"][0]["kind"] == "undecided"
    assert results["unit"] == "answer token"
    assert [cell["pairs"] for cell in results["recall"]["cells"]] == [1, 2]
    with open("s/results-recall.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["arm"], row["pairs"]) for row in rows} == {
        (a, p) for a in ("standard", "differential") for p in ("1", "2")
    }
    cell = json.loads(Path("s/runs/standard/seed-0/recall.json").read_text())["cells"][0]
    assert {**cell, "squares": None, "depth": ""} == {
        "squares": None,
        **{name: int(value) if value else "" for name, value in rows[0].items() if name not in ("arm", "seed")},
    }
    assert 'id="recall"' in Path("s/report.html").read_text()


def test_an_unknown_arm_suggests_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "compare", "text.txt", "--arms", "standard,diferential")
    assert "differential" in error
    assert not list(Path("runs").glob("*"))


@pytest.mark.parametrize(
    ("flags", "output"),
    [
        (("--arms", "standard"), "two arms"),
        (("--arms", "standard,standard"), "twice"),
        (("--seeds", "0"), "seeds"),
        (("--size", "3m"), "5m"),
        (("--rates", "fast"), "1e-3"),
        (("--train-tokens", "many"), "2M"),
        (("--budget", "soon"), "90s"),
        (("--extend", "nowhere", "--budget", "3m"), "nowhere"),
        (("--resume", "nowhere"), "nowhere"),
    ],
)
def test_invalid_options_are_refused(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], output: str) -> None:
    corpus = () if flags[0] in ("--extend", "--resume") else ("text.txt",)
    assert output in refused(capsys, "compare", *corpus, *flags)


def test_resume_refuses_other_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert "leave out --seeds" in refused(capsys, "compare", "--resume", "s", "--seeds", "3")


def test_a_missing_corpus_and_an_empty_one_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.txt").write_text("")
    assert "missing.txt" in refused(capsys, "compare", "missing.txt")
    assert "empty.txt" in refused(capsys, "compare", "empty.txt")


def test_a_missing_ray_explains_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert "qkflow[ray]" in refused(
        capsys, "compare", "text.txt", "--arms", "standard,differential", "--executor", "ray", "--seeds", "2", *TINY
    )


def test_report_refuses_other_folders(capsys: pytest.CaptureFixture[str]) -> None:
    Path("other").mkdir()
    assert "design.json" in refused(capsys, "report", "other")
    assert "nowhere" in refused(capsys, "report", "nowhere")


def test_reproduce_prints_published_and_measured_results(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tiny(_: Recipe, __: str, corpus: CorpusConfig) -> ExperimentSpec:
        return ExperimentSpec(
            data=corpus, arms=("standard", "differential"), size="100k", tokens=4000, seeds=2, context=16, batch=4
        )

    monkeypatch.setattr(Recipe, "spec", tiny)
    assert qkflow("reproduce", "differential", "text.txt", "--out", "s") == 0
    output = capsys.readouterr().out
    assert "published" in output
    assert "-1.08%" in output
    assert any(word in output for word in ("same direction", "other direction", "undecided"))
    assert "arxiv.org" in output


def test_reproduce_lists_its_recipes_and_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert qkflow("reproduce") == 0
    assert "differential" in capsys.readouterr().out
    assert "differential" in refused(capsys, "reproduce", "diferential")


class WithoutMemory(LocalExecutor):
    """An executor whose processes can allocate nothing."""

    def run(
        self, function: Callable[[Any], Any], arguments: Sequence[Any], *, workers: int, resources: Resources
    ) -> Iterator[CallResult | None]:
        text = "[enforce fail at alloc_cpu.cpp:127]\nDefaultCPUAllocator: can't allocate memory:\n" + "x" * 300
        error = RuntimeError(f"{text} you tried to allocate 9000000000 bytes. Error code 12")
        for index, _ in enumerate(arguments):
            yield CallResult(index=index, crash=describe_error(error))


@pytest.mark.parametrize(
    "command",
    [
        ["compare", "text.txt", "--arms", "standard,differential", "--seeds", "2", *TINY],
        ["sharpen", "--ratios", "1,5", "--rates", "1e-3", "--seeds", "2", "--steps", "2", "--train", "50"],
    ],
    ids=["compare", "sharpen"],
)
def test_a_study_without_enough_memory_says_what_to_reduce_and_fails(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"qkflow.cli.{command[0]}.make_executor", lambda *_, **__: WithoutMemory())
    assert qkflow(*command, "--out", "study") == 1
    failures = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed: ")]
    reason = "out of memory (tried to allocate 9,000,000,000 bytes): reduce --batch, --context, --size or --jobs"
    assert len(failures) == 4
    assert all(line.endswith(f": {reason}") for line in failures)
