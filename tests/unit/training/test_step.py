"""Training steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkflow.errors import DivergenceError
from qkflow.training import open_objective
from qkflow.training.logits import Examples
from qkflow.training.step import Learner


def make_learner(config: Any) -> Learner:
    return Learner(config, open_objective(config), torch.device("cpu"))


def test_accumulated_micro_batches_equal_the_whole_batch(configure: Any, corpus: Any) -> None:
    models = []
    for accumulate in (1, 2, 4):
        learner = make_learner(configure(accumulate=accumulate, steps=3))
        records = [learner.train_step(lambda: False) for _ in range(3)]
        models.append((records, learner.model))
    for records, model in models[1:]:
        for expected, actual in zip(models[0][0], records, strict=True):
            assert expected["batch"] == actual["batch"]
            assert expected["loss"] == pytest.approx(actual["loss"], rel=1e-5)
            assert expected["grad_norm"] == pytest.approx(actual["grad_norm"], rel=1e-4)
        for expected, actual in zip(models[0][1].parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(expected, actual, rtol=1e-3, atol=1e-4)


def test_without_crossing_a_document_does_not_see_the_previous_one(configure: Any, corpus: Any) -> None:
    def second_loss(crossing: bool, first: int) -> float:
        learner = make_learner(configure(crossing=crossing))
        window = torch.tensor([[first, first, corpus.tokenizer.end, 97, 98, 97, 98]])
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in learner.model.parameters():
                parameter.normal_(std=0.3)  # blocks are nearly zero at initialization
            losses = []
            for tokens in (window, window[:, :3]):
                starts = None if crossing else tokens[:, :-1] == corpus.tokenizer.end
                examples = Examples(inputs=tokens[:, :-1], targets=tokens[:, 1:], starts=starts)
                losses.append(learner.objective.loss(learner.module, examples))
            return float(losses[0] * 6 - losses[1] * 2)

    assert second_loss(False, 97) == pytest.approx(second_loss(False, 120), abs=1e-5)
    assert second_loss(True, 97) != pytest.approx(second_loss(True, 120), abs=1e-5)


def test_gradients_are_clipped_to_the_maximum_norm(configure: Any, corpus: Any) -> None:
    learner = make_learner(configure(clip=1e-3))
    record = learner.train_step(lambda: False)
    assert record["grad_norm"] > 1e-3
    norm = torch.nn.utils.get_total_norm([p.grad for p in learner.model.parameters() if p.grad is not None])
    assert float(norm) == pytest.approx(1e-3, rel=1e-2)


def test_a_non_finite_gradient_changes_no_weight(configure: Any, corpus: Any) -> None:
    learner = make_learner(configure())
    learner.model.get_parameter("blocks.1.mechanism.value.weight").register_hook(lambda grad: grad / 0)
    before = [parameter.detach().clone() for parameter in learner.model.parameters()]
    with pytest.raises(
        DivergenceError,
        match=r"the gradient of step 1 .*the first non-finite gradient is that of blocks\.1\.mechanism\.value\.weight",
    ):
        learner.train_step(lambda: False)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))
    assert learner.step == 0
