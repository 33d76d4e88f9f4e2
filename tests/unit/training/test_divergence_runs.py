"""Runs with non-finite losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qkflow.errors import DivergenceError
from qkflow.training import train


def poison(name: str) -> Callable[[nn.Module], None]:
    def spoil(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter(name).fill_(float("nan"))

    return spoil


@pytest.mark.parametrize("name", ["embedding", "blocks.0.mechanism.key", "blocks.1.feed_forward_norm", "norm"])
def test_a_non_finite_loss_reports_step_layer_and_checkpoint(
    configure: Any, tmp_path: Path, name: str, at: Any
) -> None:
    config = configure(steps=9, checkpoint_every=2, evaluate_every=9)
    folder = tmp_path / "run"
    with pytest.raises(DivergenceError) as caught:
        train(config, folder, callbacks=[at(5, poison(f"{name}.weight"))])
    text = str(caught.value)
    assert f"the loss of step 6 is not finite: the first non-finite output is that of {name}." in text
    assert f"The last good checkpoint is {folder / 'checkpoints' / 'step-00000004'}" in text
    assert f"`qkflow train --resume {folder}`" in text
    assert "(--lr, was 0.003)" in text
    assert "\n" not in text
    assert sorted(path.name[-1] for path in (folder / "checkpoints").iterdir()) == ["2", "4"]
    assert train(None, folder, resume=True).step == 9  # the checkpoint has no NaN


def test_a_non_finite_evaluation_raises_a_divergence_error(configure: Any, tmp_path: Path, at: Any) -> None:
    config = configure(steps=9, checkpoint_every=2, evaluate_every=3)
    fragment = r"after step 6, the held-out loss is not finite: .* is norm\. The last good .*step-00000004"
    with pytest.raises(DivergenceError, match=fragment):
        train(config, tmp_path / "run", callbacks=[at(6, poison("norm.weight"))])


def test_non_finite_gates_raise_a_divergence_error(configure: Any, tmp_path: Path, at: Any) -> None:
    config = configure(steps=9, checkpoint_every=2, evaluate_every=3)
    config = replace(config, model=replace(config.model, mechanism="qdelta"))
    for step, fragment in (
        (5, r"the loss of step 6 is not finite: .* that of embedding"),
        (6, r"after step 6, .* is embedding"),
    ):
        with pytest.raises(DivergenceError, match=fragment):
            train(config, tmp_path / f"run {step}", callbacks=[at(step, poison("embedding.weight"))])


def test_non_finite_weights_are_never_saved(configure: Any, tmp_path: Path, at: Any) -> None:
    config = configure(steps=9, checkpoint_every=2, evaluate_every=9)
    with pytest.raises(DivergenceError, match=r"the weights after step 6 are not finite: the first is norm\.weight"):
        train(config, tmp_path / "run", callbacks=[at(6, poison("norm.weight"))])
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004"]


def test_an_exploding_learning_rate_raises_before_the_next_update(configure: Any, tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match=r"of step [23] is not finite.*There is no checkpoint yet"):
        train(configure(lr=1e38, steps=9, warmup=0), tmp_path / "run")
