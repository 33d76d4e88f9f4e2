from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from qkflow.circuits import RatioSchedule, circuit_groups
from qkflow.data.tasks import Task
from qkflow.errors import DivergenceError, Interrupted, UsageError
from qkflow.models import ClassifierConfig, Decoder, DecoderConfig
from qkflow.models.one_layer import OneLayerConfig
from qkflow.training.tasks import TaskRunConfig, build_model, learn, task_loss
from qkflow.training.tasks.batches import chosen
from qkflow.training.tasks.learner import build_task_optimizer

Make = Callable[..., TaskRunConfig]
PLAIN: list[dict[str, Any]] = [
    {"optimizer": "adamw", "weight_decay": 0.1, "clip": 0.5},
    {"optimizer": "sgd", "momentum": 0.9},
]


def started(config: TaskRunConfig) -> nn.Module:
    torch.manual_seed(config.seed)
    return build_model(config.model)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = parameters(one), parameters(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def moved(config: TaskRunConfig, task: Task) -> dict[str, Tensor]:
    """How far each parameter went."""
    before, after = parameters(started(config)), parameters(learn(config, task))
    return {name: after[name] - before[name] for name in before}


def names_of(model: nn.Module, circuit: str) -> set[str]:
    members = {id(p) for g in circuit_groups(model, 1.0) if g["circuit"] == circuit for p in g["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in members}


@pytest.mark.parametrize("changes", [{}, {"model": "decoder"}, {"model": "dropping"}], ids=str)
def test_the_same_config_gives_the_same_bits(
    signs: Task, copies: Task, run: Make, decoder: DecoderConfig, changes: dict[str, str]
) -> None:
    model = changes.get("model")
    task = copies if model == "decoder" else signs
    config = run(model=decoder) if model == "decoder" else run()
    if model == "dropping":
        config = replace(config, model=replace(config.model, dropout=0.3))
    first = learn(config, task)
    torch.rand(3)
    assert same(learn(config, task), first)
    assert not same(learn(replace(config, seed=1), task), first)
    assert not same(learn(replace(config, data_seed=1), task), first)


@pytest.mark.parametrize("changes", PLAIN, ids=["adamw", "sgd"])
def test_a_ratio_of_one_is_a_plain_loop_to_the_bit(signs: Task, run: Make, changes: dict[str, Any]) -> None:
    config = run(**changes)
    model = started(config)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    assert len(matrices) == len(list(model.parameters()))
    if config.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(matrices, lr=config.lr, weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD(matrices, lr=config.lr, momentum=0.9)
    for step in range(config.steps):
        optimizer.zero_grad()
        some = [signs.train[place] for place in chosen(24, seed=0, step=step, batch=config.batch)]
        task_loss(model, some).backward()
        if config.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
    assert same(learn(config, signs), model)


@pytest.mark.parametrize("r", [0.25, 20.0])
def test_the_first_step_of_descent_is_r_times_as_long_for_queries_and_keys_alone(
    signs: Task, run: Make, r: float
) -> None:
    config = run(optimizer="sgd", steps=1, lr=1.0)
    one, other = moved(config, signs), moved(replace(config, qk_ratio=r), signs)
    quick = names_of(started(config), "qk")
    assert len(quick) == 2
    assert all(bool(step.abs().sum() > 0) for step in one.values())
    for name, step in one.items():
        assert_close(other[name], step * (r if name in quick else 1), rtol=1e-4, atol=1e-6)


def test_a_ratio_that_grows_follows_the_line_from_step_to_step(
    signs: Task, run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, float]] = []
    step = torch.optim.SGD.step

    def keeping(self: torch.optim.SGD, *args: Any) -> Any:
        seen.append({group["circuit"]: group["lr"] for group in self.param_groups})
        return step(self, *args)

    monkeypatch.setattr(torch.optim.SGD, "step", keeping)
    learn(run(optimizer="sgd", qk_ratio=2.0, qk_growth=12.0), signs)
    line = RatioSchedule(start=2.0, end=12.0)
    assert [rates["qk"] for rates in seen] == pytest.approx([0.05 * line.at(s, 5) for s in range(5)])
    assert [rates["qk"] / 0.05 for rates in seen] == pytest.approx([2, 4, 6, 8, 10])
    assert {rates[other] for rates in seen for other in ("ov", "rest")} == {0.05}


@pytest.mark.parametrize("qk_ratio", [1.0, 5.0])
def test_the_embeddings_ratio_moves_embeddings_alone(signs: Task, run: Make, qk_ratio: float) -> None:
    config = run(optimizer="sgd", steps=1, lr=1.0, qk_ratio=qk_ratio)
    one, other = moved(config, signs), moved(replace(config, embedding_ratio=3.0), signs)
    for name, step in one.items():
        assert_close(other[name], step * (3 if name == "embedding.weight" else 1), rtol=1e-4, atol=1e-6)


def test_a_model_without_embeddings_has_none_to_speed_up(signs: Task, run: Make) -> None:
    config = run(model=OneLayerConfig(vocabulary=13), embedding_ratio=3.0)
    with pytest.raises(UsageError, match="no embeddings to speed up"):
        learn(config, signs)


@pytest.mark.usefixtures("kernels")
def test_a_mechanism_keeps_the_pace_that_it_asks_for(run: Make) -> None:
    shape = ClassifierConfig(width=8, layers=1, heads=2, vocabulary=13, classes=2, mechanism="kuramoto")
    config = run(model=shape, qk_ratio=4.0, embedding_ratio=3.0, weight_decay=0.1)
    model = started(config)
    groups = build_task_optimizer(model, config).param_groups
    rates = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    quick = names_of(model, "qk")
    for name, parameter in model.named_parameters():
        pace = model.param_options()[name]  # type: ignore[operator]
        r = 4.0 if name in quick else 3.0 if name == "embedding.weight" else 1.0
        lr, decay = rates[id(parameter)]
        assert lr == pytest.approx(0.05 * r * pace.rate)
        assert decay == (0.1 if pace.decay and parameter.ndim >= 2 else 0.0)
    assert len(rates) == len(list(model.parameters())) == sum(len(group["params"]) for group in groups)


def test_a_loss_that_is_not_finite_ends_the_run(signs: Task, run: Make) -> None:
    with pytest.raises(DivergenceError, match="the loss of step 2 is not finite: choose a lower learning rate or r"):
        learn(run(optimizer="sgd", lr=1e38), signs)


def test_a_model_that_the_last_step_broke_is_no_result(signs: Task, run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(self: torch.optim.SGD) -> None:
        self.param_groups[0]["params"][0].data.fill_(math.nan)

    monkeypatch.setattr(torch.optim.SGD, "step", breaking)
    with pytest.raises(DivergenceError, match="the model after the last step is not finite"):
        learn(run(optimizer="sgd", steps=1), signs)


def test_moments_are_seen_in_order_with_the_first_and_the_last(signs: Task, run: Make) -> None:
    seen: list[tuple[int, bool, dict[str, Tensor]]] = []
    config = run()
    model = learn(
        config,
        signs,
        watch=lambda step, made: seen.append((step, made.training, parameters(made))),
        moments=(5, 0, 3),
    )
    assert [(step, training) for step, training, _ in seen] == [(0, False), (3, False), (5, False)]
    assert all(torch.equal(seen[0][2][name], p) for name, p in started(config).named_parameters())
    assert all(torch.equal(seen[2][2][name], p) for name, p in model.named_parameters())
    assert same(learn(config, signs), model)
    assert not model.training


def test_the_generators_and_threads_of_others_are_left_alone(signs: Task, run: Make) -> None:
    before, count = torch.get_rng_state(), torch.get_num_threads()
    learn(run(threads=2, steps=1), signs)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == count


def test_a_request_to_stop_is_heard_before_the_next_step(signs: Task, run: Make) -> None:
    answers: Iterator[bool] = iter([False, False, True])
    with pytest.raises(Interrupted, match="stopped in step 3"):
        learn(run(), signs, should_stop=lambda: next(answers))


def test_the_loss_of_a_written_answer_is_that_of_its_tokens(copies: Task, decoder: DecoderConfig) -> None:
    torch.manual_seed(0)
    model = Decoder(decoder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    losses = []
    for one in copies.train[:5]:
        so_far = list(one.tokens)
        for token in one.answer:
            scores, _ = model(torch.tensor([so_far]))
            losses.append(F.cross_entropy(scores[:, -1], torch.tensor([token])))
            so_far.append(token)
    assert_close(task_loss(model, copies.train[:5]), torch.stack(losses).mean(), rtol=1e-5, atol=1e-6)


def test_models_that_cannot_answer_are_refused(signs: Task, copies: Task, run: Make, decoder: DecoderConfig) -> None:
    small = ClassifierConfig(width=8, layers=1, heads=2, vocabulary=12, classes=2)
    refused: list[tuple[TaskRunConfig, Task, str]] = [
        (run(model=decoder), signs, "signs is a task of classification: it needs a classifier, got DecoderConfig"),
        (run(), copies, "copies is a task of generation: it needs a decoder, got ClassifierConfig"),
        (run(model=small), signs, "signs has 13 words, the model a vocabulary of 12"),
        (run(), replace(signs, classes=("no", "yes", "why")), "signs has 3 classes, the model 2"),
    ]
    for config, task, says in refused:
        with pytest.raises(UsageError, match=says):
            learn(config, task)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.0),
        ("qk_ratio", -1.0),
        ("qk_growth", math.inf),
        ("clip", math.nan),
        ("embedding_ratio", 0.0),
        ("steps", 0),
        ("batch", 0),
        ("momentum", 1.0),
        ("weight_decay", -0.1),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_name(run: Make, name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"{name} must be"):
        run(**{name: value})
