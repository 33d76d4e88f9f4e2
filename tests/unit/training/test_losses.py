"""Objectives: batches, losses, and runs on tasks with rationales."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from qkflow.circuits import circuit_groups
from qkflow.data.tasks import Task, TaskConfig, open_task
from qkflow.errors import DivergenceError, Interrupted, UsageError
from qkflow.models import ClassifierConfig, Decoder, DecoderConfig
from qkflow.models.one_layer import OneLayerConfig
from qkflow.training import TrainConfig, load_run, read_metrics, train
from qkflow.training.logits import TargetLogits
from qkflow.training.losses import TaskObjective, collate_answers, collate_classes, instance_indices, open_objective
from qkflow.training.optim import build_optimizer
from qkflow.training.run_dir import read_documents
from qkflow.training.step import Learner, build_model
from qkflow.training.tensors import load_tensors

Make = Callable[..., TrainConfig]
NEVER = {"evaluate_every": 10**6, "checkpoint_every": None}


@given(count=st.integers(1, 30), batch=st.integers(1, 40), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=25)
def test_every_epoch_contains_every_instance_once(count: int, batch: int, seed: int) -> None:
    steps = -(-3 * count // batch)
    indices = [index for step in range(steps) for index in instance_indices(count, seed=seed, step=step, batch=batch)]
    for epoch in range(3):
        assert sorted(indices[epoch * count : (epoch + 1) * count]) == list(range(count))
    counts = Counter(indices)
    assert max(counts.values()) - min(counts.values()) <= 1 if len(counts) == count else True


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = [tuple(instance_indices(20, seed=seed, step=step, batch=20)) for seed in (0, 1) for step in (0, 1)]
    assert len(set(orders)) == 4


def test_a_batch_depends_on_seed_and_step_only() -> None:
    before = torch.get_rng_state()
    sixth = instance_indices(9, seed=3, step=5, batch=4)
    for step in range(5):
        instance_indices(9, seed=3, step=step, batch=4)
    assert instance_indices(9, seed=3, step=5, batch=4) == sixth
    assert torch.equal(torch.get_rng_state(), before)
    assert instance_indices(1, seed=0, step=4, batch=5) == [0] * 5


def test_texts_are_padded_on_the_right(sign_task: Task) -> None:
    examples = collate_classes(sign_task.train)
    assert examples.layout is not None
    for row, instance in enumerate(sign_task.train):
        assert examples.inputs[row].tolist()[: len(instance.tokens)] == list(instance.tokens)
        assert examples.layout.valid[row].sum() == len(instance.tokens)
    assert collate_classes(sign_task.train[:1]).layout is None
    assert examples.targets.flatten().tolist() == [instance.label for instance in sign_task.train]


def test_only_the_answer_is_scored_and_never_read_before_it_is_predicted(copy_task: Task) -> None:
    examples = collate_answers(copy_task.train)
    assert examples.scored is not None
    for row, instance in enumerate(copy_task.train):
        positions = examples.scored[row].nonzero().flatten().tolist()
        first = len(instance.tokens) - 1
        assert positions == list(range(first, first + len(instance.answer)))
        assert examples.targets[row][examples.scored[row]].tolist() == list(instance.answer)
        for position in positions:
            read = tuple(examples.inputs[row, : position + 1].tolist())
            assert read == instance.tokens + instance.answer[: position + 1 - len(instance.tokens)]


def test_the_loss_of_an_answer_is_the_mean_over_its_tokens(
    copy_task: Task, answer_decoder: DecoderConfig, task_config: Make
) -> None:
    torch.manual_seed(0)
    model = Decoder(answer_decoder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    losses = []
    for instance in copy_task.train[:5]:
        read = list(instance.tokens)
        for token in instance.answer:
            logits, _ = model(torch.tensor([read]))
            losses.append(F.cross_entropy(logits[:, -1], torch.tensor([token])))
            read.append(token)
    objective = TaskObjective(task_config(model=answer_decoder), copy_task)
    loss = objective.loss(TargetLogits(model), collate_answers(copy_task.train[:5]))
    assert_close(loss, torch.stack(losses).mean(), rtol=1e-5, atol=1e-6)


def test_models_that_do_not_fit_the_task_are_refused(
    sign_task: Task, copy_task: Task, task_config: Make, answer_decoder: DecoderConfig
) -> None:
    small = ClassifierConfig(width=8, layers=1, heads=2, vocabulary=12, classes=2)
    cases: list[tuple[TrainConfig, Task, str]] = [
        (task_config(model=answer_decoder), sign_task, "classification task: expected a classifier, got DecoderConfig"),
        (task_config(), copy_task, "generation task: expected a decoder, got ClassifierConfig"),
        (task_config(model=small), sign_task, "signs has 13 words, but the model has a vocabulary of 12"),
        (task_config(), replace(sign_task, classes=("no", "yes", "why")), "signs has 3 classes, but the model has 2"),
    ]
    for config, task, fragment in cases:
        with pytest.raises(UsageError, match=fragment):
            TaskObjective(config, task)


def test_a_classifier_cannot_be_trained_on_a_corpus(configure: Any, task_config: Make) -> None:
    with pytest.raises(UsageError, match="a corpus needs a decoder, got ClassifierConfig"):
        open_objective(replace(configure(), model=task_config().model))


# Training on tasks


def initial_model(config: TrainConfig) -> nn.Module:
    torch.manual_seed(config.seed)
    return build_model(config.model)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def trained(config: TrainConfig, task: Task) -> dict[str, Tensor]:
    learner = Learner(config, TaskObjective(config, task), torch.device("cpu"))
    for _ in range(config.steps):
        learner.train_step(lambda: False)
    return parameters(learner.model)


def movement(config: TrainConfig, task: Task) -> dict[str, Tensor]:
    """The change of each parameter."""
    before, after = parameters(initial_model(config)), trained(config, task)
    return {name: after[name] - before[name] for name in before}


def qk_names(model: nn.Module) -> set[str]:
    members = {id(p) for group in circuit_groups(model, 1.0) if group["circuit"] == "qk" for p in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in members}


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adamw", "weight_decay": 0.1, "clip": 0.5},
        {"optimizer": "sgd", "momentum": 0.9},
        {"model": "decoder", "clip": 1.0},
    ],
    ids=["adamw", "sgd", "decoder"],
)
def test_training_on_a_task_equals_a_plain_loop_bit_for_bit(
    sign_task: Task, copy_task: Task, answer_decoder: DecoderConfig, task_config: Make, changes: dict[str, Any]
) -> None:
    task = copy_task if "model" in changes else sign_task
    config = task_config(**{**changes, "model": answer_decoder} if "model" in changes else changes)
    model = initial_model(config)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    if config.optimizer == "adamw":
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=config.lr)
    else:
        optimizer = torch.optim.SGD(matrices, lr=config.lr, momentum=0.9)
    for step in range(config.steps):
        optimizer.zero_grad()
        instances = [task.train[index] for index in instance_indices(24, seed=0, step=step, batch=config.batch)]
        if isinstance(model, Decoder):
            examples = collate_answers(instances)
            stream, _ = model.read(examples.inputs, layout=examples.layout)
            loss = F.cross_entropy(model.logits(stream[examples.scored]), examples.targets[examples.scored])
        else:
            examples = collate_classes(instances)
            loss = F.cross_entropy(model(examples.inputs, examples.layout), examples.targets.flatten())
        loss.backward()
        if config.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
    weights = trained(config, task)
    assert all(torch.equal(weights[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("r", [0.25, 20.0])
def test_the_first_step_is_r_times_as_long_for_queries_and_keys(sign_task: Task, task_config: Make, r: float) -> None:
    config = task_config(optimizer="sgd", steps=1, lr=1.0)
    plain, changed = movement(config, sign_task), movement(replace(config, qk_ratio=r), sign_task)
    qk = qk_names(initial_model(config))
    assert len(qk) == 2
    for name, change in plain.items():
        assert change.abs().sum() > 0
        assert_close(changed[name], change * (r if name in qk else 1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("qk_ratio", [1.0, 5.0])
def test_the_embedding_ratio_changes_embeddings_only(sign_task: Task, task_config: Make, qk_ratio: float) -> None:
    config = task_config(optimizer="sgd", steps=1, lr=1.0, qk_ratio=qk_ratio)
    plain, changed = movement(config, sign_task), movement(replace(config, embedding_ratio=3.0), sign_task)
    for name, change in plain.items():
        assert_close(changed[name], change * (3 if name == "embedding.weight" else 1), rtol=1e-4, atol=1e-6)
    one_layer = task_config(model=OneLayerConfig(vocabulary=13), embedding_ratio=3.0)
    with pytest.raises(UsageError, match="no embeddings"):
        build_optimizer(initial_model(one_layer), one_layer)


def test_ratios_multiply_the_options_of_a_mechanism(task_config: Make) -> None:
    shape = ClassifierConfig(width=8, layers=1, heads=2, vocabulary=13, classes=2, mechanism="kuramoto")
    config = task_config(model=shape, qk_ratio=4.0, embedding_ratio=3.0, weight_decay=0.1)
    model = initial_model(config)
    options, qk = model.param_options(), qk_names(model)  # type: ignore[operator]
    groups = build_optimizer(model, config).param_groups
    learning_rates = {
        id(p): (group["rate"], group["circuit"], group["weight_decay"]) for group in groups for p in group["params"]
    }
    for name, parameter in model.named_parameters():
        expected = options[name]
        rate, circuit, decay = learning_rates[id(parameter)]
        assert rate == pytest.approx(expected.rate * (3.0 if name == "embedding.weight" else 1.0))
        assert (circuit == "qk") == (name in qk)
        assert decay == (0.1 if expected.decay and parameter.ndim >= 2 else 0.0)
    assert len(learning_rates) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("classes", {"optimizer": "adamw", "model_dropout": 0.3}),
        ("classes", {"optimizer": "sgd", "momentum": 0.9, "qk_growth": 5.0}),
        ("answers", {"clip": 1.0}),
        ("one layer", {"optimizer": "sgd"}),
    ],
    ids=str,
)
def test_a_stopped_task_run_resumes_bit_for_bit(
    sign_task: Task,
    copy_task: Task,
    answer_decoder: DecoderConfig,
    task_config: Make,
    stop_at: Any,
    tmp_path: Path,
    kind: str,
    changes: dict[str, Any],
) -> None:
    changes = dict(changes)
    dropout = changes.pop("model_dropout", 0.0)
    config = task_config(**changes, evaluate_every=2)
    if kind == "answers":
        config = replace(config, model=answer_decoder)
    elif kind == "one layer":
        config = replace(config, model=OneLayerConfig(vocabulary=13, form="CACO"))
    elif dropout:
        config = replace(config, model=replace(config.model, dropout=dropout))
    objective = TaskObjective(config, copy_task if kind == "answers" else sign_task)
    whole = train(config, tmp_path / "whole", objective=objective)
    with pytest.raises(Interrupted, match="after step 3 of 5"):
        train(config, tmp_path / "run", objective=objective, callbacks=[stop_at(3)])
    result = train(None, tmp_path / "run", objective=objective, resume=True)
    for name in ("weights.safetensors", "documents.npy"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert without_times(tmp_path / "run") == without_times(tmp_path / "whole")
    assert {key: value for key, value in result.metrics.items() if "seconds" not in key} == {
        key: value for key, value in whole.metrics.items() if "seconds" not in key
    }


def without_times(folder: Path) -> list[dict[str, Any]]:
    records = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in record.items() if "seconds" not in name} for record in records]


def test_a_task_run_folder_has_one_document_per_validation_instance(
    sign_task: Task, task_config: Make, tmp_path: Path
) -> None:
    config = task_config(steps=60)
    result = train(config, tmp_path / "run", objective=TaskObjective(config, sign_task))
    documents = read_documents(tmp_path / "run" / "documents.npy")
    assert documents is not None
    assert documents["tokens"].tolist() == documents["bytes"].tolist() == [1] * len(sign_task.validation)
    first, last = (r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "eval")
    assert last["loss"] < first["loss"]
    assert last["accuracy"] > 0.7
    assert result.metrics == last
    model = initial_model(config)
    model.load_state_dict(load_tensors(tmp_path / "run" / "weights.safetensors"))
    examples = collate_classes(sign_task.validation)
    with torch.no_grad():
        logits = model.eval()(examples.inputs, examples.layout)
    losses = F.cross_entropy(logits, examples.targets.flatten(), reduction="none")
    assert_close(torch.from_numpy(documents["nats"].copy()).float(), losses, rtol=1e-4, atol=1e-6)
    assert last["accuracy"] == float((logits.argmax(-1) == examples.targets.flatten()).double().mean())
    with pytest.raises(UsageError, match="is a run on the task 'agreement'"):
        load_run(tmp_path / "run")


def test_an_answer_is_correct_only_if_all_its_tokens_are(
    copy_task: Task, answer_decoder: DecoderConfig, task_config: Make
) -> None:
    config = task_config(model=answer_decoder, steps=25, lr=0.02, batch=24)
    objective = TaskObjective(config, replace(copy_task, validation=copy_task.train))
    learner = Learner(config, objective, torch.device("cpu"))
    for _ in range(config.steps):
        learner.train_step(lambda: False)
    evaluation = learner.evaluate(objective.validation(None), lambda: False)
    assert evaluation.correct is not None
    examples = collate_answers(copy_task.train)
    assert examples.scored is not None
    with torch.no_grad():
        best = learner.model.eval()(examples.inputs, layout=examples.layout)[0].argmax(-1)
    correct = ((best == examples.targets) | ~examples.scored).all(1)
    assert 0 < int(correct.sum()) < len(correct)
    assert evaluation.correct.tolist() == correct.tolist()
    limited = learner.evaluate(objective.validation(60), lambda: False)
    assert 0 < len(limited.documents) < len(copy_task.train)


def test_a_diverging_task_run_raises(sign_task: Task, task_config: Make, tmp_path: Path) -> None:
    config = task_config(optimizer="sgd", lr=1e38, **NEVER)
    with pytest.raises(DivergenceError, match=r"of step 2 is not finite.*lower learning rate"):
        train(config, tmp_path / "run", objective=TaskObjective(config, sign_task))
    broken = task_config(optimizer="sgd", steps=1, **NEVER)

    class Broken(TaskObjective):
        def validation(self, limit: int | None) -> Any:
            return super().validation(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", lambda self: self.param_groups[0]["params"][0].data.fill_(math.nan))
        with pytest.raises(DivergenceError, match="not finite"):
            train(broken, tmp_path / "broken", objective=Broken(broken, sign_task))
    assert not (tmp_path / "broken" / "weights.safetensors").exists()


class Norms:
    """A measurement that uses the random generator and the gradients, which training must restore."""

    def __init__(self, steps: tuple[int, ...], value: Callable[[float], Any] = float) -> None:
        self.measured_steps, self.value, self.modes = steps, value, set[bool]()

    def steps(self, config: TrainConfig) -> tuple[int, ...]:
        return self.measured_steps

    def measure(self, model: nn.Module, step: int) -> Mapping[str, Any]:
        self.modes.add(model.training)
        torch.rand(3)
        norm = model.get_parameter("embedding.weight").norm()
        norm.backward()  # gradients are allowed
        return {"norm": self.value(norm.item())}

    def finish(self, model: nn.Module, folder: Path) -> None:
        assert not (folder / "weights.safetensors").exists()
        (folder / "norm.txt").write_text(f"{model.get_parameter('embedding.weight').norm().item()}")


def test_a_measurement_is_recorded_and_changes_no_bit(
    sign_task: Task, task_config: Make, stop_at: Any, tmp_path: Path
) -> None:
    config = task_config(model=replace(task_config().model, dropout=0.2), evaluate_every=2)
    objective = TaskObjective(config, sign_task)
    train(config, tmp_path / "plain", objective=objective)
    measurement = Norms((0, 3, 5))
    train(config, tmp_path / "measured", objective=objective, measurement=measurement)
    assert measurement.modes == {False}
    weights = [(tmp_path / name / "weights.safetensors").read_bytes() for name in ("plain", "measured")]
    assert weights[0] == weights[1]
    records = [r for r in read_metrics(tmp_path / "measured" / "metrics.jsonl") if r["kind"] == "measure"]
    assert [record["step"] for record in records] == [0, 3, 5]
    assert float((tmp_path / "measured" / "norm.txt").read_text()) == pytest.approx(records[-1]["norm"])
    for step in (3, 4):  # stopped after the measurement of step 3, and between two
        folder = tmp_path / f"stopped {step}"
        with pytest.raises(Interrupted):
            train(config, folder, objective=objective, measurement=Norms((0, 3, 5)), callbacks=[stop_at(step)])
        train(None, folder, objective=objective, measurement=Norms((0, 3, 5)), resume=True)
        assert without_times(folder) == without_times(tmp_path / "measured")
        assert (folder / "weights.safetensors").read_bytes() == weights[0]


def test_a_measurement_that_is_not_finite_is_a_divergence(sign_task: Task, task_config: Make, tmp_path: Path) -> None:
    config = task_config()
    with pytest.raises(DivergenceError, match="the measurement after step 3 is not finite"):
        train(
            config,
            tmp_path / "run",
            objective=TaskObjective(config, sign_task),
            measurement=Norms((3,), value=lambda norm: math.nan),
        )


def test_opening_a_task_config_gives_the_same_run_as_an_open_objective(task_config: Make, tmp_path: Path) -> None:
    data = TaskConfig(train=40, test=10)
    task = open_task(data)
    model = ClassifierConfig(width=8, layers=1, heads=1, vocabulary=len(task.words), classes=len(task.classes))
    config = task_config(data=data, model=model, steps=2)
    train(config, tmp_path / "opened")
    train(config, tmp_path / "given", objective=TaskObjective(config, task))
    weights = [(tmp_path / name / "weights.safetensors").read_bytes() for name in ("opened", "given")]
    assert weights[0] == weights[1]
