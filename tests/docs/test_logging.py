"""The callback for Weights & Biases in docs/howto/logging.md works with a stand-in for its package."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from qkflow import CorpusConfig
from qkflow.models import DecoderConfig
from qkflow.training import TrainConfig, train

PAGE = Path(__file__).parents[2] / "docs/howto/logging.md"


@pytest.mark.usefixtures("workdir")
def test_the_callback_for_weights_and_biases_logs_steps_and_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    block = next(block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "wandb" in block)
    namespace: dict[str, Any] = {}
    exec(block, namespace)
    stub: Any = ModuleType("wandb")
    options: dict[str, Any] = {}
    logged: list[tuple[int, str]] = []
    values_logged: list[Any] = []
    finished: list[bool] = []

    def log(values: dict[str, Any], step: int) -> None:
        logged.extend((step, key) for key in values if key.endswith("/loss"))
        values_logged.extend(values.values())

    def init(**given: Any) -> Any:
        options.update(given)
        return SimpleNamespace(log=log, finish=lambda: finished.append(True))

    stub.init = init
    monkeypatch.setitem(sys.modules, "wandb", stub)
    Path("text.txt").write_text("all work and no play makes a dull text. " * 200)
    model = DecoderConfig(width=8, layers=1, heads=2, hidden=8)
    config = TrainConfig(data=CorpusConfig(source="text.txt"), model=model, steps=2, context=8, batch=2)
    train(config, "runs/mine", callbacks=[namespace["WandbLogger"]()])
    assert options["id"] == "mine"
    assert options["config"]["model"]["width"] == 8
    assert logged == [(0, "eval/loss"), (1, "train/loss"), (2, "train/loss"), (2, "eval/loss")]
    assert all(isinstance(value, int | float) for value in values_logged)
    assert finished == [True]
