"""AdamW with decay on matrices only, and its state as named tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qkflow.circuits import Circuit, find_circuits
from qkflow.errors import CheckpointError, UsageError
from qkflow.mechanisms.base import Pace
from qkflow.models import Stack
from qkflow.training.config import TrainConfig

_FUSED = ("cpu", "cuda", "mps")
_VECTORS = ("bias", "amplitude")
"""What is a vector even where there is one for each head."""
_PARTS = ("step", "exp_avg", "exp_avg_sq")


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over every trainable parameter once (tied ones too); norms, gains and biases are not decayed.

    A model may give parameters a pace of their own; a group's `rate` is a factor on the schedule's learning rate. Where
    the config gives queries and keys a ratio, they have groups of their own, whose `circuit` is "qk".

    >>> from qkflow.data import CorpusConfig
    >>> from qkflow.models import size
    >>> config = TrainConfig(corpus=CorpusConfig(), model=size("1m"), steps=10)
    >>> [group["weight_decay"] for group in build_optimizer(nn.LayerNorm(4), config).param_groups]
    [0.0]
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    paces = model.paces() if isinstance(model, Stack) else {}
    quick = set() if config.ratio.plain else _queries_and_keys(model)
    groups: dict[tuple[float, float, Circuit], list[nn.Parameter]] = {}
    for name, parameter in named.items():
        pace = paces.get(name, Pace())
        decayed = pace.decay and parameter.ndim >= 2 and not name.endswith(_VECTORS)
        circuit = "qk" if name in quick else "rest"
        groups.setdefault((pace.rate, config.weight_decay if decayed else 0.0, circuit), []).append(parameter)
    parameters = list(named.values())
    return torch.optim.AdamW(
        [
            {"params": some, "rate": rate, "weight_decay": decay, "circuit": circuit}
            for (rate, decay, circuit), some in groups.items()
        ],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=all(parameter.device.type in _FUSED and parameter.is_floating_point() for parameter in parameters),
    )


def _queries_and_keys(model: nn.Module) -> set[str]:
    """The parameters that a ratio is for; a model that has none, or only parts of some, is refused."""
    parts = find_circuits(model).qk
    if not parts or not all(part.whole for part in parts):
        raise UsageError(
            f"a ratio is for queries and keys with parameters of their own, and {type(model).__name__} has none: "
            "leave qk_ratio at 1, and qk_growth out"
        )
    return {part.name for part in parts}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's memory by name, `exp_avg.blocks.0.norm.weight` and so on; empty before the first step."""
    return {
        f"{part}.{name}": optimizer.state[parameter][part]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for part in _PARTS
    }


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave; names or shapes that do not fit the model raise `CheckpointError`."""
    wanted = {
        f"{part}.{name}": (parameter, part)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        for part in _PARTS
    }
    if tensors and set(tensors) != set(wanted):
        stray = sorted(set(tensors) ^ set(wanted))[0]
        raise CheckpointError(f"the optimiser state does not belong to this model: {stray!r} is in only one of them")
    optimizer.state.clear()
    for name, tensor in tensors.items():
        parameter, part = wanted[name]
        if part != "step" and tensor.shape != parameter.shape:
            raise CheckpointError(
                f"the optimiser state does not belong to this model: {name!r} has shape {list(tensor.shape)}, "
                f"the model's has {list(parameter.shape)}"
            )
        optimizer.state[parameter][part] = tensor.to(parameter.device, copy=True)
