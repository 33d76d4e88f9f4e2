"""The optimizer, its learning rates, and its state as named tensors.

The learning rate of a step is `lr` times a multiplier:

    warm-up    (s + 1) / w                                        s < w
    cosine     f + (1 - f) (1 + cos(pi p)) / 2,                   p = (s - w) / (n - w)
    stable     1 while n - s > d n,  then 1 - (1 - f) p,          p = 1 - (n - s) / (d n)
    constant   1

| symbol | variable | meaning                                         |
|--------|----------|-------------------------------------------------|
| s      | `step`   | steps completed, from 0                         |
| n      | `steps`  | steps of the run                                |
| w      | `warmup` | warm-up steps                                   |
| d      | `decay`  | fraction of the run that decays (`stable`)      |
| f      | `floor`  | multiplier at the end                           |
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qkflow.circuits import Circuit, find_circuits
from qkflow.data import CorpusConfig
from qkflow.errors import CheckpointError, UsageError
from qkflow.mechanisms.base import ParamOptions
from qkflow.models import Stack
from qkflow.training.config import TrainConfig
from qkflow.training.muon import Muon, hidden_matrices
from qkflow.training.parallel import is_sharded, shard_like

_FUSED_DEVICES = ("cpu", "cuda", "mps")
_VECTORS = ("bias", "amplitude")
"""Parameters that are vectors even if there is one per head."""


def warmup_cosine(step: int, *, steps: int, warmup: int, floor: float) -> float:
    """Linear warm-up, then a cosine from 1 to `floor`.

    >>> [round(warmup_cosine(s, steps=6, warmup=2, floor=0.0), 3) for s in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2


def warmup_stable_decay(step: int, *, steps: int, warmup: int, decay: float, floor: float) -> float:
    """Linear warm-up, a plateau at 1, then a linear decay to `floor` over the last `decay` of the steps.

    >>> [warmup_stable_decay(s, steps=8, warmup=2, decay=0.5, floor=0.0) for s in range(9)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    decay_steps = decay * steps
    remaining = max(0, steps - step)
    return 1.0 if remaining >= decay_steps else floor + (1 - floor) * remaining / decay_steps


def lr_multiplier(config: TrainConfig, step: int) -> float:
    """The multiplier of `config.lr` for the step after `step` steps."""
    warmup = min(100, config.steps // 10) if config.warmup is None else config.warmup
    if config.schedule == "cosine":
        return warmup_cosine(step, steps=config.steps, warmup=warmup, floor=config.floor)
    decay, floor = (config.decay, config.floor) if config.schedule == "stable" else (0.0, 1.0)
    return warmup_stable_decay(step, steps=config.steps, warmup=warmup, decay=decay, floor=floor)


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer over every trainable parameter (tied ones once); norms, gains and biases are not decayed.

    A model may give parameters options of their own: `rate` is a factor on the learning rate. If the config has a ratio
    for queries and keys, they have groups of their own, with `circuit` "qk".

    >>> from qkflow.models import size
    >>> config = TrainConfig(data=CorpusConfig(), model=size("1m"), steps=10)
    >>> [group["weight_decay"] for group in build_optimizer(nn.LayerNorm(4), config).param_groups]
    [0.0]
    """
    circuits: dict[str, Circuit] = {} if config.ratio.is_identity else dict.fromkeys(_qk_parameters(model), "qk")
    muon = _muon_parameters(model) if config.optimizer == "muon" else set()
    groups = param_groups(model, param_options(model, config), circuits, weight_decay=config.weight_decay, muon=muon)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return (Muon if config.optimizer == "muon" else torch.optim.AdamW)(
        groups,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        # Rounds differently: runs on tasks, whose models are small, use the plain form.
        fused=isinstance(config.data, CorpusConfig)
        and all(parameter.device.type in _FUSED_DEVICES and parameter.is_floating_point() for parameter in parameters),
    )


def param_groups(
    model: nn.Module,
    options: Mapping[str, ParamOptions],
    circuits: Mapping[str, Circuit],
    *,
    weight_decay: float,
    muon: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Groups of parameters with the same rate, weight decay and circuit ("rest" unless given).

    `muon` names the matrices that Muon orthogonalizes.

    >>> groups = param_groups(nn.Linear(2, 2), {"bias": ParamOptions(rate=3.0)}, {"weight": "qk"}, weight_decay=0.1)
    >>> [(group["rate"], group["weight_decay"], group["circuit"]) for group in groups]
    [(1.0, 0.1, 'qk'), (3.0, 0.0, 'rest')]
    """
    groups: dict[tuple[float, float, Circuit, bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            own = options.get(name, ParamOptions())
            is_decayed = own.decay and parameter.ndim >= 2 and not name.endswith(_VECTORS)
            circuit = circuits.get(name, "rest")
            # An optimizer step takes whole or sharded parameters, not both.
            key = (own.rate, weight_decay if is_decayed else 0.0, circuit, name in muon, is_sharded(parameter))
            groups.setdefault(key, []).append(parameter)
    return [
        {"params": parameters, "rate": rate, "weight_decay": decay, "circuit": circuit, "muon": is_muon}
        for (rate, decay, circuit, is_muon, _), parameters in groups.items()
    ]


def param_options(model: nn.Module, config: TrainConfig) -> dict[str, ParamOptions]:
    """The options that a model and the config's `embedding_ratio` give to parameters, by name."""
    options = model.param_options() if isinstance(model, Stack) else {}
    if config.embedding_ratio == 1:
        return options
    embeddings = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    if not embeddings:
        raise UsageError(f"{type(model).__name__} has no embeddings: leave embedding_ratio at 1")
    for name in embeddings:
        own = options.get(name, ParamOptions())
        options[name] = replace(own, rate=own.rate * config.embedding_ratio)
    return options


def set_rates(groups: Iterable[dict[str, Any]], lr: float, ratio: float) -> None:
    """Set the learning rates of `param_groups`; queries and keys learn `ratio` times as fast."""
    for group in groups:
        group["lr"] = lr * group["rate"] * (ratio if group["circuit"] == "qk" else 1.0)


def _qk_parameters(model: nn.Module) -> set[str]:
    """The parameters of queries and keys; raises if a model has none, or only slices of shared ones."""
    slices = find_circuits(model).qk
    if not slices or not all(part.is_whole for part in slices):
        raise UsageError(
            f"{type(model).__name__} has no separate parameters for queries and keys: leave qk_ratio at 1 and omit "
            "qk_growth"
        )
    return {part.name for part in slices}


def _muon_parameters(model: nn.Module) -> set[str]:
    """The matrices that Muon orthogonalizes; raises if there are none, or they are sharded."""
    if not isinstance(model, Stack):
        raise UsageError(f"{type(model).__name__} has no blocks, whose matrices Muon needs: use adamw")
    matrices = hidden_matrices(model.blocks)
    if any(map(is_sharded, matrices)):
        raise UsageError("Muon needs whole matrices, but fsdp shards them: use --parallel ddp, or --optimizer adamw")
    return {name for name, parameter in model.named_parameters() if parameter in matrices}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer state by name, such as `exp_avg.blocks.0.norm.weight`; empty before the first step."""
    keys = _state_keys(optimizer)
    return {
        f"{key}.{name}": optimizer.state[parameter][key]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for key in keys[parameter]
    }


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restore the result of `optimizer_tensors`; names or shapes that do not match raise `CheckpointError`."""
    keys = _state_keys(optimizer)
    expected = {
        f"{key}.{name}": (parameter, key)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        for key in keys[parameter]
    }
    if tensors and set(tensors) != set(expected):
        stray = sorted(set(tensors) ^ set(expected))[0]
        raise CheckpointError(f"the optimizer state does not match the model: {stray!r} is in only one of them")
    optimizer.state.clear()
    for name in tensors:
        (parameter, key), tensor = expected[name], tensors[name]
        if key == "step":
            optimizer.state[parameter][key] = tensor.to(parameter.device, copy=True)
            continue
        if tensor.shape != parameter.shape:
            raise CheckpointError(
                f"the optimizer state does not match the model: {name!r} has shape {list(tensor.shape)}, "
                f"expected {list(parameter.shape)}"
            )
        optimizer.state[parameter][key] = shard_like(tensor, parameter)


def _state_keys(optimizer: torch.optim.Optimizer) -> dict[Tensor, tuple[str, ...]]:
    """The names of each parameter's state tensors; `step` is a scalar, the others have the parameter's shape."""
    keys: dict[Tensor, tuple[str, ...]] = {}
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD):
            names = ("momentum_buffer",) if group["momentum"] else ()
        else:
            names = ("momentum_buffer",) if group["muon"] else ("step", "exp_avg", "exp_avg_sq")
        keys |= dict.fromkeys(group["params"], names)
    return keys
