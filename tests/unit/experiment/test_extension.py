"""Extending a study with more seeds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qkflow.errors import DivergenceError, UsageError
from qkflow.experiment import runner as worker
from qkflow.experiment.design import planned_runs, read_design
from qkflow.experiment.extension import extend
from qkflow.experiment.run_status import read_status
from qkflow.experiment.runner import run_experiment
from qkflow.experiment.spec import ExperimentSpec
from qkflow.io import checksum

Ask = Callable[..., ExperimentSpec]


@pytest.fixture
def old(finish_study: Callable[..., Path], tmp_path: Path) -> Path:
    """A finished study of one seed."""
    return finish_study(tmp_path / "old", seeds=1)


def weights(study: Path) -> dict[str, bytes]:
    return {
        str(job.folder): (study / job.folder / "weights.safetensors").read_bytes()
        for job in planned_runs(read_design(study))
    }


def test_an_extension_keeps_the_old_runs_and_trains_only_new_seeds(
    ask: Ask, inline: Any, tmp_path: Path, old: Path
) -> None:
    executor = inline()
    run_experiment(extend(old, seeds=2), tmp_path / "new", executor=executor, command=("more",))
    design = read_design(tmp_path / "new")
    assert [Path(order.folder).name for order in executor.calls] == ["seed-1", "seed-1"]
    before = read_design(old)
    assert design.extends is not None
    assert (design.extends.folder, design.extends.digest) == (str(old), checksum(old / "design.json"))
    assert (design.look, design.error_rate) == (2, pytest.approx(0.008))
    same = {"spec": before.spec, "command": before.command, "date": before.date, "seeds": 1, "look": 1}
    assert replace(design, **same, error_rate=before.error_rate, extends=None) == before
    shutil.rmtree(old)  # the new one is complete in itself
    again = inline()
    run_experiment(None, tmp_path / "new", executor=again)
    assert not again.calls
    run_experiment(ask(seeds=2), tmp_path / "round_steps", executor=inline())
    assert weights(tmp_path / "new") == weights(tmp_path / "round_steps")


def test_an_extension_can_be_extended(inline: Any, tmp_path: Path, old: Path) -> None:
    run_experiment(extend(old, seeds=2), tmp_path / "new", executor=inline())
    run_experiment(extend(tmp_path / "new", seeds=3), tmp_path / "newer", executor=inline())
    third = read_design(tmp_path / "newer")
    assert (third.look, third.error_rate) == (3, pytest.approx(0.0016))


@pytest.mark.parametrize("seeds", [0, 1])
def test_an_extension_needs_more_seeds(inline: Any, tmp_path: Path, old: Path, seeds: int) -> None:
    with pytest.raises(UsageError, match="seeds"):
        run_experiment(extend(old, seeds=seeds), tmp_path / "new", executor=inline())
    assert not (tmp_path / "new").exists()


def test_an_extension_with_another_spec_is_refused(inline: Any, tmp_path: Path, old: Path) -> None:
    with pytest.raises(UsageError, match="changes only the number of seeds"):
        run_experiment(replace(extend(old, seeds=2), margin=0.01), tmp_path / "new", executor=inline())


def test_an_unfinished_study_cannot_be_extended(inline: Any, tmp_path: Path, old: Path) -> None:
    (old / "runs" / "differential" / "seed-0" / "weights.safetensors").unlink()
    with pytest.raises(UsageError, match=r"\(differential seed 0 is missing\): run `qkflow compare --resume"):
        run_experiment(extend(old, seeds=2), tmp_path / "new", executor=inline())


def test_a_run_that_failed_for_good_stays_so_in_the_extension(
    ask: Ask, inline: Any, watcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = worker.train

    def train(config: Any, out: Path, **options: Any) -> Any:
        if "differential/seed-0" in str(out):
            raise DivergenceError("too fast")
        return real(config, out, **options)

    with monkeypatch.context() as patch:
        patch.setattr(worker, "train", train)
        run_experiment(ask(seeds=1), tmp_path / "old", executor=inline())
    executor = inline()
    run_experiment(extend(tmp_path / "old", seeds=2), tmp_path / "new", executor=executor, observer=watcher)
    assert len(executor.calls) == 2
    assert read_status(tmp_path / "new" / "runs" / "differential" / "seed-0").failed_for_good
    assert watcher.failures == [("differential seed 0", "too fast")]


def test_runs_of_a_missing_parent_are_trained_again_to_the_same_bits(
    inline: Any, watcher: Any, tmp_path: Path, old: Path
) -> None:
    run_experiment(extend(old, seeds=2), tmp_path / "new", executor=inline())
    round_steps = weights(tmp_path / "new")
    shutil.rmtree(tmp_path / "new" / "runs" / "standard" / "seed-0")
    shutil.rmtree(old)
    executor = inline()
    run_experiment(None, tmp_path / "new", executor=executor, observer=watcher)
    assert len(executor.calls) == 1
    assert any("no longer the study that this one extends" in note for note in watcher.notices)
    assert weights(tmp_path / "new") == round_steps
