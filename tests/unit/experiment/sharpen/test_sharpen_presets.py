"""What each task is studied with is fit for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qkflow.data.tasks import TaskConfig, open_task
from qkflow.experiment.sharpen.design import design
from qkflow.experiment.sharpen.request import RationaleRequest
from qkflow.training.tasks import build_model, learn, task_loss


def test_the_one_layer_model_leaves_its_start_early_in_a_run_of_the_synthetic_task() -> None:
    config = TaskConfig(name="synthetic", train=64, test=16)
    task = open_task(config)
    made = design(RationaleRequest(task=config), task)
    model = learn(replace(made.base, steps=made.base.steps // 8, batch=16), task)
    assert task_loss(model, task.test).item() < 2.0  # of 3.9 at the start


@pytest.mark.parametrize("mechanism", ["standard:window=8", "differential", "differential:window=8", "qdelta"])
def test_every_mechanism_fits_the_model_of_the_default_task(mechanism: str) -> None:
    config = TaskConfig(train=20, test=10)
    assert build_model(design(RationaleRequest(task=config, mechanism=mechanism), open_task(config)).base.model)
