"""Studies resume bit-for-bit after SIGKILL."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qkflow.experiment.design import Design
from qkflow.experiment.run_status import read_status
from qkflow.experiment.runner import run_experiment
from qkflow.experiment.study_dir import write_design
from qkflow.io import locked

PROCESS = Path(__file__).with_name("study_process.py")
KILLS = 2
ADAPTIVE_KILLS = int(os.environ.get("QKFLOW_TEST_KILLS", "2"))


@pytest.fixture(scope="module")
def design(studies: Any) -> Design:
    return studies.design(steps=40, learning_rates=(1e-3, 1e-2))


class Process:
    """A process that resumes a study, in a new process group."""

    def __init__(self, study: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROCESS), str(study)], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.first_line = self.next_line()

    def next_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def is_alive_after(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return True
        return False

    def close(self) -> int:
        assert self.process.stdout is not None
        code = self.process.wait()
        self.process.stdout.close()
        return code


def wait_for_locks(study: Path) -> None:
    """Wait until no process holds a lock of the study or of its runs."""
    for lock in study.rglob("lock"):
        with locked(lock, wait=True):
            pass


def kill_and_resume(
    studies: Any, parent: Path, design: Design, *, kills: int, longest: float, group: bool
) -> list[Path]:
    """Run studies of a design in `parent`, and kill their processes so many times, after at most `longest` seconds.

    Every study must end as if it had not been killed. Returns their folders.
    """
    uninterrupted, generator = studies.undisturbed(design), random.Random(kills)
    folders, killed = [parent / "0"], 0
    write_design(folders[0], design)
    while killed < kills:
        process = Process(folders[-1])
        if process.first_line == "running" and process.is_alive_after(generator.uniform(0, longest)):
            killed += 1
            (os.killpg if group else os.kill)(process.process.pid, signal.SIGKILL)
        code = process.close()
        wait_for_locks(folders[-1])
        if code == 0:  # it finished before the next kill
            assert studies.left_behind(folders[-1]) == uninterrupted
            folders.append(parent / str(len(folders)))
            write_design(folders[-1], design)
    run_experiment(None, folders[-1])
    assert studies.left_behind(folders[-1]) == uninterrupted
    return folders


@pytest.mark.parametrize("group", [False, True], ids=["process", "process group"])
def test_a_study_killed_at_random_times_resumes_bit_for_bit(
    studies: Any, tmp_path: Path, design: Design, group: bool
) -> None:
    studies_run = kill_and_resume(studies, tmp_path, design, kills=KILLS, longest=0.7, group=group)
    folders = [study / run.folder for study in studies_run for run in studies.runs(study)]
    assert sum(read_status(folder).attempts for folder in folders) > len(folders)


def test_an_adaptive_study_killed_at_random_times_makes_the_same_decisions(studies: Any, tmp_path: Path) -> None:
    design = studies.adaptive_design(steps=40)
    decisions = studies.undisturbed(design)["decisions"]
    assert len([record for record in decisions if record["kind"] == "round"]) == 3
    kinds = {verdict["arm"]: verdict["kind"] for verdict in decisions[-2]["verdicts"]}
    assert set(kinds.values()) == {"worse", "undecided"}
    assert sum(len(record.get("arms", [])) for record in decisions) < 9  # the decided arm left early
    kill_and_resume(studies, tmp_path, design, kills=ADAPTIVE_KILLS, longest=2.0, group=True)


def test_a_run_whose_process_is_killed_is_resumed(studies: Any, tmp_path: Path) -> None:
    study, design = tmp_path / "study", studies.design(steps=400, checkpoint_every=50)
    write_design(study, design)
    process = Process(study)
    assert process.first_line == "running"
    killed_run = studies.runs(study)[0]
    os.kill(int((study / killed_run.folder / "lock").read_text()), signal.SIGKILL)
    assert f"{killed_run.name} crashed (its process was killed by SIGKILL" in process.next_line()
    assert process.next_line() == "finished"
    assert process.close() == 0
    assert read_status(study / killed_run.folder).attempts == 2
    assert studies.left_behind(study) == studies.undisturbed(design)


@pytest.fixture
def endless(tmp_path: Path, design: Design) -> Path:
    """A study whose runs would take hours and write no checkpoints unless they are stopped."""
    arms = tuple(replace(arm, tuning_steps=10**6) for arm in design.arms)
    write_design(tmp_path / "endless", replace(design, arms=arms, base=replace(design.base, checkpoint_every=None)))
    return tmp_path / "endless"


def test_no_run_outlives_its_study(endless: Path) -> None:
    process = Process(endless)
    assert process.first_line == "running"
    runs = [os.pidfd_open(int(lock.read_text())) for lock in endless.rglob("lr-*/lock")]
    assert len(runs) == 2
    process.process.kill()
    process.close()
    for run in runs:
        ended, _, _ = select.select([run], [], [], 30)  # readable: the process has ended
        if not ended:
            signal.pidfd_send_signal(run, signal.SIGKILL)
        os.close(run)
        assert ended


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_study_writes_checkpoints(endless: Path, kind: signal.Signals) -> None:
    process = Process(endless)
    assert process.first_line == "running"
    os.killpg(process.process.pid, kind)  # as a terminal does on Ctrl-C
    assert process.close() == 128 + kind
    assert len(list(endless.rglob("step-*/manifest.json"))) == 2
