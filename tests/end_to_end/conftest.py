"""Fixtures of the end-to-end tests: a working directory, the command line, a trained run and tiny studies."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qkflow.cli import main
from qkflow.data import CorpusConfig
from qkflow.experiment.decisions import Decisions
from qkflow.experiment.design import Design
from qkflow.experiment.executors.local import LocalExecutor
from qkflow.experiment.planned_runs import PlannedRun, round_runs, tuning_runs
from qkflow.experiment.planner import make_design
from qkflow.experiment.runner import run_experiment
from qkflow.experiment.spec import ExperimentSpec
from qkflow.experiment.study_dir import read_design, write_design
from qkflow.models import DecoderConfig

TINY = {
    "steps": 6,
    "context": 16,
    "batch": 4,
    "evaluate_every": 3,
    "evaluate_tokens": 512,
    "final_tokens": 512,
    "model": {"width": 16, "layers": 2, "heads": 4, "hidden": 24},
}
TEXT = "".join(f"line {i}: the quick brown fox number {i * i}\n" for i in range(400))


@pytest.fixture
def workspace(tmp_path: Path, session_cache: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory of a command, with `text.txt` and `tiny.json`, in a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QKFLOW_CACHE", session_cache)
    monkeypatch.delenv("QKFLOW_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    Path("tiny.json").write_text(json.dumps(TINY))
    Path("text.txt").write_text(TEXT)
    return tmp_path


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory, session_cache: str) -> Path:
    """A finished run of `tiny.json` on `text.txt`; `output.txt` beside it holds what `qkflow train` printed.

    Do not write to it. `run_copy` gives a test its own copy.
    """
    root = tmp_path_factory.mktemp("trained")
    (root / "tiny.json").write_text(json.dumps(TINY))
    (root / "text.txt").write_text(TEXT)
    with (
        pytest.MonkeyPatch.context() as patch,
        open(root / "output.txt", "w") as output,
        contextlib.redirect_stdout(output),
    ):
        patch.chdir(root)
        patch.setenv("QKFLOW_CACHE", session_cache)
        patch.setenv("COLUMNS", "80")
        assert main(["train", "text.txt", "--config", "tiny.json", "--out", "run"]) == 0
    return root / "run"


@pytest.fixture
def run_copy(workspace: Path, trained_run: Path) -> str:
    """A copy of the trained run in the current directory: its name."""
    return shutil.copytree(trained_run, workspace / "run").name


@pytest.fixture
def qkflow(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`qkflow("train", ...)` runs a command in this process, checks its exit code and returns what it prints."""

    def run(*args: str, exit_code: int = 0) -> str:
        capsys.readouterr()
        assert main(list(args)) == exit_code
        return capsys.readouterr().out

    return run


@pytest.fixture
def usage_error(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`usage_error("train", ...)` runs a command that must fail with code 2 and one line on stderr: that line."""

    def run(*args: str) -> str:
        capsys.readouterr()
        assert main(list(args)) == 2
        error = capsys.readouterr().err.strip()
        assert error.startswith("qkflow: ")
        assert "\n" not in error
        return error

    return run


TIMES = ("seconds", "evaluation_seconds")


class Studies:
    """Tiny studies on a corpus of small documents."""

    def __init__(self, root: Path) -> None:
        self.root = root
        generator = random.Random(0)
        words = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 6))) for _ in range(50)]
        texts = [" ".join(generator.choices(words, k=generator.randint(20, 60))) for _ in range(80)]
        (root / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def design(self, *, steps: int, learning_rates: tuple[float, ...] = (1e-3,), checkpoint_every: int = 7) -> Design:
        """Two arms and two seeds, with dropout; checkpoints and evaluations at different steps."""
        spec = ExperimentSpec(
            data=CorpusConfig(source=str(self.root / "corpus.jsonl")),
            arms=("standard", "differential"),
            model=DecoderConfig(width=16, layers=1, heads=2, hidden=32, dropout=0.1),
            tokens=steps * 4 * 24,
            seeds=2,
            context=24,
            batch=4,
            learning_rates=learning_rates,
            passes=1e6,
            device="cpu",
            jobs=2,
            threads=1,
        )
        design = make_design(spec, LocalExecutor(), notice=lambda text: None)
        return replace(design, base=replace(design.base, checkpoint_every=checkpoint_every, log_every=1))

    def adaptive_design(self, *, steps: int, checkpoint_every: int = 7) -> Design:
        """Three arms in rounds of 2, 3 and 4 seeds: one is decided early, and one never is."""
        design = self.design(steps=steps, learning_rates=(1e-2,))
        arms = ("standard", "standard:r=0.0001,embeddings=0.0001", "differential")
        spec = replace(design.spec, arms=arms, seeds=4, margin=0.0001)
        design = make_design(spec, LocalExecutor(), notice=lambda text: None)
        return replace(design, base=replace(design.base, checkpoint_every=checkpoint_every, log_every=1))

    def runs(self, study: Path) -> list[PlannedRun]:
        """All runs that a study has decided on."""
        design, decisions = read_design(study), Decisions(study)
        rates = decisions.rates() or {arm.name: arm.rates[0] for arm in design.arms}
        main = [run for round_ in decisions.rounds() for run in round_runs(design, round_, rates)]
        return [*tuning_runs(design), *main]

    def undisturbed(self, design: Design) -> dict[str, Any]:
        """The results of the same study without interruptions."""
        study = self.root / f"undisturbed-{design.base.steps}-{len(design.arms)}"
        if not study.exists():
            write_design(study, design)
            run_experiment(None, study)
        return self.left_behind(study)

    def left_behind(self, study: Path) -> dict[str, Any]:
        """All results and decisions of a finished study except times; the metrics contain a checksum of each batch."""
        tuning = study / "tuning.json"
        results: dict[str, Any] = {"tuning": json.loads(tuning.read_text()) if tuning.exists() else None}
        results["decisions"] = [
            {key: value for key, value in record.items() if key != "elapsed"}
            for record in Decisions(study).records
            if record["kind"] != "run"  # in the order in which runs finish
        ]
        results["recorded"] = sorted(record["folder"] for record in Decisions(study).of_kind("run"))
        for run in self.runs(study):
            folder = study / run.folder
            records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            results[str(run.folder)] = {
                "metrics": [{key: value for key, value in record.items() if key not in TIMES} for record in records],
                "weights": (folder / "weights.safetensors").read_bytes(),
                "documents": (folder / "documents.npy").read_bytes(),
                "config": (folder / "config.json").read_bytes(),
                "names": sorted(path.name for path in folder.iterdir()),
            }
        return results


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory, session_cache: str) -> Iterator[Studies]:
    """Builds and runs tiny studies in a temporary directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QKFLOW_CACHE", session_cache)
        yield Studies(tmp_path_factory.mktemp("studies"))
