"""A study on a local Ray cluster of two nodes: the results survive killed workers and removed nodes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from qkflow.errors import Interrupted
from qkflow.experiment.executors.ray import RayExecutor
from qkflow.experiment.progress import Observer, Progress
from qkflow.experiment.run_status import read_status
from qkflow.experiment.runner import run_experiment
from qkflow.experiment.study_dir import write_design

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # read when ray is imported: nothing listens beyond loopback
cluster_utils = pytest.importorskip("ray.cluster_utils", reason="ray is not installed")


NODE = {"num_cpus": 1, "node_ip_address": "127.0.0.1"}
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3}
"""Detect a removed node within seconds instead of the default timeout."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        head = {**NODE, "include_dashboard": False, "_system_config": QUICK}
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        yield cluster
        cluster.shutdown()


def parent(process: int) -> int | None:
    """Return the parent of a process; None if the process has exited."""
    ppid = subprocess.run(["ps", "-o", "ppid=", "-p", str(process)], capture_output=True, text=True, check=False).stdout
    return int(ppid) if ppid.strip() else None


class Saboteur(Observer):
    """Kill a busy worker of the first node, then remove the second node while one of its workers is busy."""

    def __init__(self, runs: Mapping[str, Path], cluster: Any, node: Any) -> None:
        self.runs, self.cluster, self.node = runs, cluster, node
        self.raylet = node.all_processes["raylet"][0].process.pid
        self.killed: Path | None = None
        self.notices: list[str] = []

    def on_progress(self, progress: Progress) -> None:
        for run in progress.running:
            folder = self.runs[run.arm] / f"seed-{run.seed}"
            lock = (folder / "lock").read_text() if run.step >= 10 else ""
            if not lock or (raylet := parent(worker := int(lock))) is None:  # empty while a new worker takes it
                continue
            if self.killed is None and raylet != self.raylet:
                self.killed = folder
                os.kill(worker, signal.SIGKILL)
            elif self.killed is not None and self.node is not None and raylet == self.raylet:
                node, self.node = self.node, None
                self.cluster.remove_node(node, allow_graceful=False)

    def on_notice(self, text: str) -> None:
        self.notices.append(text)


def test_a_killed_worker_and_a_removed_node_change_no_decision_and_no_result(
    studies: Any, tmp_path: Path, cluster: Any
) -> None:
    """The rounds are those of an undisturbed study on local processes."""
    design = studies.adaptive_design(steps=250, checkpoint_every=50)
    study = tmp_path / "study"
    write_design(study, design)
    folders = {arm.name: study / "runs" / arm.folder for arm in design.arms}
    saboteur = Saboteur(folders, cluster, cluster.add_node(**NODE))
    with RayExecutor(cluster.address) as executor:
        assert executor.cores() == (1, 1)
        run_experiment(None, study, executor=executor, observer=saboteur)
    assert saboteur.node is None  # its node was removed
    attempts = {job.folder: read_status(study / job.folder).attempts for job in studies.runs(study)}
    assert saboteur.killed is not None
    assert attempts[saboteur.killed.relative_to(study)] > 1
    assert sum(attempts.values()) >= len(attempts) + 2
    assert studies.left_behind(study) == studies.undisturbed(design)


def test_a_stopped_study_writes_checkpoints(studies: Any, tmp_path: Path, cluster: Any) -> None:
    study = tmp_path / "study"
    write_design(study, studies.design(steps=10**6, checkpoint_every=10**6))

    class Impatient(Observer):
        asked = False

        def on_progress(self, progress: Progress) -> None:
            if not self.asked and any(run.step > 0 for run in progress.running):
                self.asked = True
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted), RayExecutor(cluster.address) as executor:
        run_experiment(None, study, executor=executor, observer=Impatient())
    assert list(study.rglob("step-*/manifest.json"))
