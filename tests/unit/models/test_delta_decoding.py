"""Decoders with delta-rule memories: decoding equals training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from qkflow.data import CorpusConfig
from qkflow.models import Decoder, DecoderConfig, generate
from qkflow.models.generation import Sampling
from qkflow.ops.delta_rule import use_backend
from qkflow.training.config import TrainConfig
from qkflow.training.optim import build_optimizer

MECHANISMS: list[Any] = [
    *("deltanet", "gated-deltanet", "qdelta", "qdelta:erase=own", "kda", "eda", "comba"),
    ("qdelta+hamiltonian", "standard:window=3"),
]


def config(mechanism: Any) -> DecoderConfig:
    return DecoderConfig(width=32, layers=2, heads=2, hidden=32, vocabulary=20, mechanism=mechanism)


def tokens(b: int, t: int, seed: int = 0) -> Tensor:
    return torch.randint(20, (b, t), generator=torch.Generator().manual_seed(seed))


def trained(mechanism: Any) -> Decoder:
    """A decoder after a few training steps: blocks are zero at initialization."""
    torch.manual_seed(0)
    model = Decoder(config(mechanism))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with use_backend("chunked"):
        for step in range(3):
            x = tokens(4, 17, seed=step)
            logits, _ = model(x[:, :-1])
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_decoding_equals_training(mechanism: Any, tmp_path: Path) -> None:
    model, x = trained(mechanism), tokens(2, 12)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    loaded = Decoder(config(mechanism))
    loaded.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    with torch.no_grad():
        whole, _ = model(x)
        with use_backend("chunked"):
            assert_close(model(x)[0], whole, rtol=0, atol=1e-5)
        assert float(whole.std()) > 0.1
        for cut in (0, 3):
            state, parts = None, []
            for part in ([x[:, :cut]] if cut else []) + [*x[:, cut:].split(1, 1)]:
                logits, state = loaded(part, state)
                parts.append(logits)
            assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_batched_prompts_of_different_lengths_equal_single_prompts(mechanism: Any) -> None:
    model = trained(mechanism)
    prompts = [tokens(1, t, seed=t)[0].tolist() for t in (1, 2, 7, 4)]
    greedy = Sampling(temperature=0.0)
    together = generate(model, prompts, tokens=6, sampling=greedy)
    assert together == [generate(model, [prompt], tokens=6, sampling=greedy)[0] for prompt in prompts]


def test_weight_decay_excludes_the_decay_parameters() -> None:
    model = Decoder(config("qdelta"))
    setup = TrainConfig(data=CorpusConfig(), model=config("qdelta"), steps=1)
    decayed, undecayed = (
        {
            name.rpartition("mechanism.")[2]
            for name, parameter in model.named_parameters()
            if any(parameter is p for p in g["params"])
        }
        for g in build_optimizer(model, setup).param_groups
    )
    assert {"decay.A_log", "decay.dt_bias", "head_norm"} <= undecayed
    assert {"query_conv", "value_conv", "decay.rate.weight", "lam.weight", "beta.weight", "query.weight"} <= decayed
    assert not decayed & undecayed


def test_layers_share_one_coupling_network() -> None:
    model = Decoder(config("qdelta+hamiltonian:sharing=layers"))
    first, second = (block.mechanism.coupling for block in model.blocks)  # type: ignore[union-attr]
    assert second.force is first.force
    assert second.dt is not first.dt
