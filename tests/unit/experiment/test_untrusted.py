"""The files of a study are not trusted: changes are named on one line, and nothing is written outside of it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkflow.cli import main
from qkflow.experiment.decisions import Decisions
from qkflow.experiment.runner import run_experiment
from qkflow.experiment.spec import ExperimentSpec
from qkflow.experiment.summary import read_result

Ask = Callable[..., ExperimentSpec]
RUN = "runs/standard/seed-1"


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """A folder with a file that must not change; the study is in it."""
    (tmp_path / "parent" / "other").mkdir(parents=True)
    (tmp_path / "parent" / "other" / "file.txt").write_text("mine")
    (tmp_path / "parent" / "other" / ".file.txt.1.tmp").write_text("mine, too")
    return tmp_path / "parent"


@pytest.fixture
def study(parent: Path, finish_study: Any) -> Path:
    """A finished study of two arms and two seeds."""
    return finish_study(parent / "study")


def outside(parent: Path) -> dict[str, tuple[bytes, int]]:
    """Everything beside the study."""
    files = [path for path in parent.rglob("*") if "study" not in path.relative_to(parent).parts[:1]]
    return {str(path): (path.read_bytes() if path.is_file() else b"", path.lstat().st_mtime_ns) for path in files}


def run_command(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(list(args))
    captured = capsys.readouterr()
    return code, captured.out, captured.err.strip()


def assert_refused(capsys: pytest.CaptureFixture[str], study: Path, name: str) -> None:
    """Both commands name the file on one line, exit with 2, and write nothing at all."""
    before = outside(study.parent)
    inside = {path: path.lstat().st_mtime_ns for path in study.rglob("*")}
    for command in (("compare", "--resume", str(study)), ("report", str(study))):
        code, _, error = run_command(capsys, *command)
        assert code == 2
        assert error.startswith("qkflow: ")
        assert "\n" not in error
        assert name in error
    assert outside(study.parent) == before
    after = {path: path.lstat().st_mtime_ns for path in study.rglob("*")}
    assert {path: after[path] for path in inside if path not in (study, study / "lock")} == {
        path: inside[path] for path in inside if path not in (study, study / "lock")
    }


def set_value(data: Any, path: tuple[str | int, ...], value: object) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


DESIGNS: list[tuple[tuple[str | int, ...], object]] = [
    (("arms", 1, "folder"), "../../x"),
    (("arms", 1, "folder"), "/tmp/x"),
    (("arms", 1, "folder"), ".."),
    (("arms", 1, "folder"), "standard"),
    (("arms", 1, "folder"), "a\nb"),
    (("arms",), []),
    (("arms", 0, "steps"), -1),
    (("arms", 0, "parameters"), 0),
    (("arms", 0, "rates"), []),
    (("arms", 0, "rates"), [float("nan")]),
    (("arms", 0, "seconds_per_step"), 0.0),
    (("arms", 0, "name"), "differential"),
    (("spec", "arms"), []),
    (("spec", "seeds"), 10**9),
    (("spec", "first_seed"), -1),
    (("spec", "error_rate"), float("nan")),
    (("spec", "margin"), float("inf")),
    (("spec", "margin"), 0.1),
    (("spec", "budget"), float("nan")),
    (("rule", "seeds_by_round"), [10**9]),
    (("rule", "seeds_by_round"), [2000]),
    (("rule", "seeds_by_round"), []),
    (("rule", "error_rate"), float("nan")),
    (("rule", "error_rate"), 0.5),
    (("rule", "margin"), float("inf")),
    (("rule", "spending"), [2.0]),
    (("first_seed",), -1),
    (("first_seed",), 10**9),
    (("jobs",), 0),
    (("jobs",), 10**9),
    (("jobs",), "two"),
    (("jobs",), None),
    (("budget",), -1.0),
    (("budget",), 10**400),
    (("expected_seconds",), float("inf")),
    (("format",), 99),
    (("format",), None),
    (("surprise",), 1),
    (("spec", "surprise"), 1),
    (("base", "lr"), float("nan")),
    (("base", "steps"), "many"),
    (("base", "batch"), 0),
    (("base", "model", "width"), -16),
    (("base",), []),
    (("command",), [1]),
]


@pytest.mark.parametrize(("path", "value"), DESIGNS, ids=lambda x: str(x)[:40])
@pytest.mark.parametrize("is_new", [False, True], ids=["finished", "new"])
def test_an_invalid_design_is_refused(
    study: Path,
    edit_decisions: Any,
    capsys: pytest.CaptureFixture[str],
    path: tuple[str | int, ...],
    value: object,
    is_new: bool,
) -> None:
    """With a journal that fits the changed design, and without any."""
    data = json.loads((study / "design.json").read_text())
    set_value(data, path, value)
    (study / "design.json").write_text(json.dumps(data))
    if is_new:
        for folder in ("runs", "tuning"):
            shutil.rmtree(study / folder, ignore_errors=True)
        (study / "decisions.jsonl").unlink()
    else:
        edit_decisions(study)
    assert_refused(capsys, study, str(study / "design.json"))


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"format": 3}', "[" * 10**5, '{"format": 3, "jobs": NaN}'])
def test_a_design_that_is_no_design_is_refused(study: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    (study / "design.json").write_text(content)
    assert_refused(capsys, study, str(study / "design.json"))


def test_a_valid_but_changed_design_is_refused(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads((study / "design.json").read_text())
    data["spec"]["margin"] = data["rule"]["margin"] = 0.5
    (study / "design.json").write_text(json.dumps(data))
    assert_refused(capsys, study, f"{study / 'design.json'} was changed")


@pytest.mark.parametrize("where", ["runs", "runs/standard", RUN, f"{RUN}/lock", "lock", "decisions.jsonl", "tuning"])
def test_a_link_out_of_the_study_is_refused(
    study: Path, parent: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    path, target = study / where, parent / "other" / Path(where).name
    if path.exists():
        shutil.move(path, target)
    else:
        target.mkdir()
    path.symlink_to(target)
    assert_refused(capsys, study, f"{path} leads out of")


def test_a_link_that_leads_nowhere_is_refused(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (study / "runs" / "loop").symlink_to("loop")
    (study / "results.json").symlink_to("../other/new.json")
    assert_refused(capsys, study, f"{study / 'results.json'} leads out of")


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("round", {"arms": ["standard", "differential"], "seeds": [5, 6]}),
        ("round", {"arms": ["differential"]}),
        ("round", {"arms": ["standard", "../../x"]}),
        ("round", {"seeds": ["../../x", "y"]}),
        ("round", {"round": 7}),
        ("verdicts", {"round": 3}),
        ("verdicts", {"verdicts": [{"arm": "../x", "kind": "better", "sentence": "best"}]}),
        ("verdicts", {"verdicts": [{"arm": "differential", "kind": "best", "sentence": "best"}]}),
        ("verdicts", {"verdicts": [{"kind": "better"}]}),
    ],
)
def test_decisions_that_do_not_follow_the_design_are_refused_even_with_valid_checksums(
    study: Path, edit_decisions: Any, capsys: pytest.CaptureFixture[str], kind: str, values: dict[str, object]
) -> None:
    edit_decisions(study, lambda old: [{**record, **values} if record["kind"] == kind else record for record in old])
    assert_refused(capsys, study, str(study / "decisions.jsonl"))


def test_a_learning_rate_that_is_not_in_the_design_is_refused(
    study: Path, edit_decisions: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    original = (study / "decisions.jsonl").read_bytes()
    for rate in (1e9, "0.001", None, []):
        (study / "decisions.jsonl").write_bytes(original)
        rates = {"kind": "rates", "rates": {"standard": rate}}
        edit_decisions(study, lambda old, rates=rates: [old[0], rates, *(r for r in old[1:] if r["kind"] != "rates")])
        assert_refused(capsys, study, str(study / "decisions.jsonl"))


def test_a_changed_or_missing_journal_is_named(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = study / "decisions.jsonl"
    content = path.read_text()
    changed = re.sub(r'"kind": "(undecided|better|worse|equivalent)"', '"kind": "unsure"', content, count=1)
    assert changed != content
    path.write_text(changed)
    assert_refused(capsys, study, f"{path}, line")
    path.unlink()
    assert_refused(capsys, study, f"{path} is missing")


def change_metrics(path: Path) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [{**r, "bits_per_byte": 0.1} if "bits_per_byte" in r else r for r in records]
    path.write_text("".join(json.dumps(record) + "\n" for record in changed))


def change_documents(path: Path) -> None:
    documents = np.load(path)
    documents["nats"] *= 0.5
    np.save(path, documents)


def change_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def change_config(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "lr": 1.0}))


def garble(path: Path) -> None:
    path.write_bytes(b'{"kind": "eval", "step": 1}\n\xff\x00 [')


CHANGES = [
    ("metrics.jsonl", change_metrics),
    ("metrics.jsonl", garble),
    ("documents.npy", change_documents),
    ("documents.npy", garble),
    ("weights.safetensors", change_byte),
    ("weights.safetensors", os.unlink),
    ("config.json", change_config),
    ("config.json", garble),
    ("config.json", os.unlink),
]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_a_changed_run_is_named_left_out_of_the_report_and_trained_again(
    study: Path, parent: Path, capsys: pytest.CaptureFixture[str], name: str, change: Callable[[Path], None]
) -> None:
    path, before = study / RUN / name, outside(parent)
    weights, documents = ((study / RUN / file).read_bytes() for file in ("weights.safetensors", "documents.npy"))
    verdicts = Decisions(study).verdicts()
    run_command(capsys, "report", str(study))
    losses = json.loads((study / "results.json").read_text())["arms"][0]["losses"]
    change(path)

    assert run_command(capsys, "report", str(study))[0] == 0
    results = json.loads((study / "results.json").read_text())
    assert f"{path} was changed after the run had finished: the run is left out" in results["remarks"]
    assert f"{RUN}/{name} was changed" in (study / "report.html").read_text()
    assert results["arms"][0]["losses"] == losses[:1]
    assert len(results["arms"][0]["curves"]) == 1

    code, output, error = run_command(capsys, "compare", "--resume", str(study))
    assert (code, error) == (0, "")
    assert f"{path} was changed after it was written: training the run again" in output
    assert (study / RUN / "weights.safetensors").read_bytes() == weights
    assert (study / RUN / "documents.npy").read_bytes() == documents
    assert json.loads((study / "results.json").read_text())["arms"][0]["losses"] == losses
    assert json.loads((study / "results.json").read_text())["remarks"] == []
    assert Decisions(study).verdicts() == verdicts

    code, output, error = run_command(capsys, "compare", "--resume", str(study))
    assert (code, error) == (0, "")
    assert "was changed" not in output
    assert outside(parent) == before


def test_a_changed_tuning_run_is_named_and_does_not_change_the_rates(
    ask: Ask, inline: Any, fake_training: Any, parent: Path, watcher: Any
) -> None:
    study = parent / "study"
    before = run_experiment(ask(learning_rates=(1e-3, 3e-3)), study, executor=inline())
    path = study / "tuning/standard/lr-0.003/metrics.jsonl"
    change_metrics(path)
    result = read_result(study)
    assert any(f"{path} was changed" in remark for remark in result.remarks)
    assert result.arms[0].learning_rate == before.arms[0].learning_rate == 1e-3
    assert dict(result.arms[0].tuning)[3e-3] is None
    n_started = len(fake_training.started)
    again = run_experiment(None, study, executor=inline(), observer=watcher)
    assert watcher.notices == [f"{path} was changed after it was written: training the run again"]
    assert fake_training.started[n_started:] == ["standard lr-0.003"]
    assert again.arms[0].tuning == before.arms[0].tuning
    assert again.arms[0].learning_rate == 1e-3


def test_other_damaged_files_end_in_one_line(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = study / "corpus.json"
    for content in ("{", '{"notes": 5}', '{"notes": [1]}', '{"notes": [{"name": 1}]}'):
        path.write_text(content)
        code, _, error = run_command(capsys, "report", str(study))
        assert (code, error.count("\n")) == (2, 0)
        assert str(path) in error
