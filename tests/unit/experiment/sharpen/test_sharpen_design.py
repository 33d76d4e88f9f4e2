"""What may be asked for, what follows from it, and which folder it may go to."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qkflow.config import from_dict
from qkflow.data.tasks import Task, TaskConfig
from qkflow.errors import UsageError
from qkflow.experiment.sharpen.design import design, refuse_foreign, write_design
from qkflow.experiment.sharpen.request import RationaleRequest, arms

Ask = Callable[..., RationaleRequest]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ratios": (1.0, 0.0)}, "r must be a finite number above 0, got 1, 0"),
        ({"ratios": (1.0, -2.0)}, "r must be a finite number above 0, got 1, -2"),
        ({"ratios": (1.0, math.nan)}, "r must be a finite number above 0, got 1, nan"),
        ({"growths": (math.inf,)}, "r must be a finite number above 0, got 1, 20, inf"),
        ({"ratios": (1.0, 20.0, 20.0)}, "ratios has a number twice"),
        ({"ratios": (1.0, 20.0, 20.0000001)}, "ratios has a number twice"),
        ({"growths": (40.0, 40.0)}, "growths has a number twice"),
        ({"rates": (0.1, 0.1)}, "rates has a number twice"),
        ({"ratios": (1.0,)}, "at least two arms: give --ratios 1,20"),
        ({"ratios": (), "growths": (2.0, 3.0)}, "the first ratio is the baseline"),
        ({"rates": ()}, "learning rates must be finite numbers above 0"),
        ({"rates": (math.nan,)}, "learning rates must be finite numbers above 0"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch": -1}, "batch must be at least 1, got -1"),
        ({"jobs": 0}, "jobs must be at least 1, got 0"),
        ({"tau": math.nan}, "tau and part lie above 0 and are at most 1, got nan and 0.05"),
        ({"part": 1.5}, "got 0.5 and 1.5"),
        ({"form": "CACO"}, "forms are for the task synthetic, got 'CACO' for agreement"),
        ({"task": TaskConfig(name="synthetic"), "mechanism": "differential"}, "the one-layer model of the theory"),
        ({"growths": (1.0,)}, "from 1 to 1 does not grow: leave it out of --growth"),
        ({"mechanism": "standard:r=20"}, "'standard:r=20' has a ratio: give it as --ratios 1,20"),
    ],
)
def test_requests_that_cannot_be_are_refused_on_one_line(ask: Ask, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        ask(**changes)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_that_do_not_exist_are_refused_with_the_nearest_that_do() -> None:
    for name, wrong, near in (("form", "FAF0", "FAFO"), ("pooling", "averag", "average")):
        with pytest.raises(UsageError, match=f"did you mean '{near}'"):
            from_dict(RationaleRequest, {name: wrong})


def test_arms_differ_in_what_is_asked_for_and_the_published_one_in_embeddings_too(ask: Ask) -> None:
    request = ask(ratios=(1.0, 20.0), growths=(40.0,), published=True)
    found = arms(request, published=(100.0, 50.0))
    assert [(arm.name, arm.ratio, arm.growth, arm.embeddings) for arm in found] == [
        ("r = 1", 1, None, 1),
        ("r = 20", 20, None, 1),
        ("r = 1 to 40", 1, 40, 1),
        ("published", 100, None, 50),
    ]
    with pytest.raises(UsageError, match="leave out --published"):
        arms(request, published=None)


def test_runs_have_folders_of_their_own_and_all_arms_a_seed_before_the_next(ask: Ask, task: Task) -> None:
    request = ask(ratios=(1.0, 1e-6, 1e6), growths=(1e6,), published=True, rates=(0.1, 0.01))
    made = design(request, task)
    tuning, main = made.tuning_jobs(), made.main_jobs(dict.fromkeys((arm.name for arm in made.arms), 0.1))
    assert len({job.folder for job in (*tuning, *main)}) == len(tuning) + len(main) == 5 * 2 + 5 * 2
    assert [job.config.seed for job in main] == [0] * 5 + [1] * 5
    assert not {job.config.seed for job in tuning} & {job.config.seed for job in main}
    by_arm = {(job.config.qk_ratio, job.config.qk_growth, job.config.embedding_ratio) for job in main}
    assert len(by_arm) == 5


def test_arms_that_found_no_rate_have_no_runs_and_one_rate_is_not_tuned(ask: Ask, task: Task) -> None:
    made = design(ask(), task)
    assert made.tuning_jobs() == []
    assert {job.arm for job in made.main_jobs({"r = 20": 0.1})} == {"r = 20"}


def test_looks_are_from_the_first_step_to_the_last_and_examples_of_every_kind(ask: Ask, task: Task) -> None:
    made = design(ask(steps=100), task)
    assert (made.moments[0], made.moments[-1]) == (0, 100)
    assert list(made.moments) == sorted(set(made.moments))
    shown = [task.test[place] for place in made.examples]
    assert {one.kind for one in shown} == {"short", "long"}
    assert len(shown) == 6
    assert all(one.rationale for one in shown)
    assert design(ask(), replace(task, is_quotable=False)).examples == ()


def test_a_folder_of_the_same_design_is_gone_on_with_however_many_runs_at_a_time(
    ask: Ask, task: Task, tmp_path: Path
) -> None:
    made = design(ask(), task)
    refuse_foreign(tmp_path / "new", made)
    write_design(tmp_path / "study", made)
    before = (tmp_path / "study/design.json").read_bytes()
    refuse_foreign(tmp_path / "study", design(ask(jobs=7), task))
    write_design(tmp_path / "study", design(ask(jobs=7), task))
    assert (tmp_path / "study/design.json").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"seeds": 3}, "other seeds"), ({"tau": 0.6, "steps": 4}, "other steps, tau"), ({"ratios": (1.0, 5.0)}, "ratios")],
)
def test_a_folder_of_another_design_is_refused_with_what_differs(
    ask: Ask, task: Task, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    write_design(tmp_path, design(ask(), task))
    with pytest.raises(UsageError, match=rf"holds a study of another design \(.*{says}\): choose another folder"):
        refuse_foreign(tmp_path, design(ask(**changes), task))


def test_a_folder_of_another_task_is_refused(ask: Ask, task: Task, tmp_path: Path) -> None:
    write_design(tmp_path, design(ask(), task))
    with pytest.raises(UsageError, match=r"another design \(other digest\)"):
        refuse_foreign(tmp_path, design(ask(), replace(task, train=task.train[1:])))


def test_a_folder_of_something_else_is_refused(ask: Ask, task: Task, tmp_path: Path) -> None:
    made, folder = design(ask(), task), tmp_path / "folder"
    folder.mkdir()
    (folder / ".design.json.1.tmp").write_text("torn")
    (folder / "lock").write_text("1")
    refuse_foreign(folder, made)
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match=r"holds other things \(thesis.tex\) and no study"):
        refuse_foreign(folder, made)
    with pytest.raises(UsageError, match="is a file: choose a folder"):
        refuse_foreign(folder / "thesis.tex", made)
    for content in ("{", "[1]", json.dumps({"request": 5})):
        (folder / "design.json").write_text(content)
        with pytest.raises(UsageError, match="choose another folder"):
            refuse_foreign(folder, made)
