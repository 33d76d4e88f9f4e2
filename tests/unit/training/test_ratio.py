"""Training with a separate learning rate for queries and keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qkflow.errors import UsageError
from qkflow.models import Decoder
from qkflow.training import open_objective, read_metrics, train
from qkflow.training.optim import build_optimizer
from qkflow.training.run_dir import read_config
from qkflow.training.step import Learner


def learner(config: Any, corpus: Any) -> Learner:
    perturbed = Learner(config, open_objective(config), torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in perturbed.model.parameters():  # branches are zero at initialization
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return perturbed


def after(config: Any, corpus: Any, steps: int) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    perturbed = learner(config, corpus)
    records = [perturbed.train_step(lambda: False) for _ in range(steps)]
    return records, perturbed.model.state_dict()


def test_only_queries_and_keys_move_r_times_as_far(configure: Any, corpus: Any) -> None:
    start = learner(configure(), corpus).model.state_dict()
    _, plain = after(configure(weight_decay=0.0), corpus, 1)
    records, quick = after(configure(weight_decay=0.0, qk_ratio=20.0), corpus, 1)
    assert records[0]["qk_ratio"] == 20.0
    for name, before in start.items():
        ratio = 20.0 if name.endswith(("query.weight", "key.weight")) else 1.0
        moved = plain[name] - before
        assert moved.abs().max() > 0
        torch.testing.assert_close(quick[name] - before, ratio * moved, rtol=1e-3, atol=1e-6)


def test_a_growing_ratio_starts_with_the_bits_of_a_plain_run(configure: Any, corpus: Any) -> None:
    plain_records, plain = after(configure(), corpus, 1)
    records, grown = after(configure(qk_growth=9.0), corpus, 1)
    assert {**plain_records[0], "seconds": 0} == {**records[0], "seconds": 0}
    assert all(torch.equal(plain[name], grown[name]) for name in plain)
    records, _ = after(configure(qk_ratio=1.0, qk_growth=9.0), corpus, 4)
    assert [record.get("qk_ratio") for record in records] == [None, 3.0, 5.0, 7.0]
    assert all(record["lr"] == configure().lr for record in records[:1])


def test_without_a_ratio_there_are_no_extra_groups(configure: Any) -> None:
    config = configure(qk_growth=1.0)
    groups = build_optimizer(Decoder(config.model), config).param_groups
    assert [(group["weight_decay"], group["circuit"]) for group in groups] == [(0.1, "rest"), (0.0, "rest")]


@pytest.mark.parametrize("spec", ["differential", "kuramoto"])
def test_a_ratio_multiplies_the_rates_of_a_mechanism(configure: Any, spec: str) -> None:
    config = configure(qk_ratio=3.0, model={"mechanism": spec})
    model = Decoder(config.model)
    groups = build_optimizer(model, config).param_groups
    listed = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(listed) == sorted(map(id, model.parameters()))
    declared = {id(m.get_parameter(name)) for m in model.mechanisms for name in m.circuits().qk}
    assert {id(p) for group in groups if group["circuit"] == "qk" for p in group["params"]} == declared
    param_options, names = model.param_options(), {id(p): name for name, p in model.named_parameters()}
    for group in groups:
        rates = {param_options[names[id(p)]].rate if names[id(p)] in param_options else 1.0 for p in group["params"]}
        assert rates == {group["rate"]}


def test_a_model_without_queries_and_keys_is_refused(configure: Any) -> None:
    with pytest.raises(UsageError, match="architecture of Linear is unknown"):
        build_optimizer(torch.nn.Linear(2, 2), configure(qk_ratio=2.0))


def test_a_run_with_a_growing_ratio_resumes_bit_for_bit(
    configure: Any, stopped_run: Callable[..., Path], tmp_path: Path
) -> None:
    config = configure(qk_ratio=2.0, qk_growth=6.0)
    whole = train(config, tmp_path / "whole")
    stopped_run(config, tmp_path / "cut", 2)
    train(None, tmp_path / "cut", resume=True)
    assert (tmp_path / "cut" / "weights.safetensors").read_bytes() == (
        whole.folder / "weights.safetensors"
    ).read_bytes()
    steps = [record for record in read_metrics(tmp_path / "cut" / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["qk_ratio"] for record in steps] == [2.0, 3.0, 4.0, 5.0]


def test_a_config_without_ratios_is_read(configure: Any, tmp_path: Path) -> None:
    train(configure(steps=1), tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    settings = json.loads(file.read_text())
    del settings["qk_ratio"], settings["qk_growth"]
    file.write_text(json.dumps(settings))
    assert read_config(tmp_path / "run") == configure(steps=1)


@pytest.mark.parametrize("name", ["qk_ratio", "qk_growth"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_an_invalid_ratio_is_refused(configure: Any, name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"{name} must be a finite number above 0, got"):
        configure(**{name: value})
