"""AdamW with decay on matrices only, and its state as named tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qkflow.circuits import Circuit, find_circuits
from qkflow.errors import CheckpointError, UsageError
from qkflow.mechanisms.base import ParamOptions
from qkflow.models import Stack
from qkflow.training.config import TrainConfig
from qkflow.training.dtensor import is_sharded, like

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
    >>> config = TrainConfig(data=CorpusConfig(), model=size("1m"), steps=10)
    >>> [group["weight_decay"] for group in build_optimizer(nn.LayerNorm(4), config).param_groups]
    [0.0]
    """
    circuits: dict[str, Circuit] = {} if config.ratio.is_identity else dict.fromkeys(_queries_and_keys(model), "qk")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        paced_groups(model, paces_of(model), circuits, weight_decay=config.weight_decay),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=all(parameter.device.type in _FUSED and parameter.is_floating_point() for parameter in parameters),
    )


def paced_groups(
    model: nn.Module, param_options: Mapping[str, ParamOptions], circuits: Mapping[str, Circuit], *, weight_decay: float
) -> list[dict[str, Any]]:
    """Every trainable parameter once, with those that have its rate, its decay and its circuit ("rest" unless named).

    >>> groups = paced_groups(nn.Linear(2, 2), {"bias": ParamOptions(rate=3.0)}, {"weight": "qk"}, weight_decay=0.1)
    >>> [(group["rate"], group["weight_decay"], group["circuit"]) for group in groups]
    [(1.0, 0.1, 'qk'), (3.0, 0.0, 'rest')]
    """
    groups: dict[tuple[float, float, Circuit, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            pace = param_options.get(name, ParamOptions())
            decayed = pace.decay and parameter.ndim >= 2 and not name.endswith(_VECTORS)
            circuit = circuits.get(name, "rest")
            # An optimiser takes whole parameters or sharded ones at once, not both.
            kind = (pace.rate, weight_decay if decayed else 0.0, circuit, is_sharded(parameter))
            groups.setdefault(kind, []).append(parameter)
    return [
        {"params": some, "rate": rate, "weight_decay": decay, "circuit": circuit}
        for (rate, decay, circuit, _), some in groups.items()
    ]


def paces_of(model: nn.Module) -> dict[str, ParamOptions]:
    """How parameters learn that a model gives a pace of their own, by name."""
    return model.param_options() if isinstance(model, Stack) else {}


def set_rates(groups: Iterable[dict[str, Any]], lr: float, ratio: float) -> None:
    """Give groups of `paced_groups` their learning rates, where queries and keys are `ratio` times as fast."""
    for group in groups:
        group["lr"] = lr * group["rate"] * (ratio if group["circuit"] == "qk" else 1.0)


def _queries_and_keys(model: nn.Module) -> set[str]:
    """The parameters that a ratio is for; a model that has none, or only parts of some, is refused."""
    parts = find_circuits(model).qk
    if not parts or not all(part.is_whole for part in parts):
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
    for name in tensors:
        (parameter, part), tensor = wanted[name], tensors[name]
        if part != "step" and tensor.shape != parameter.shape:
            raise CheckpointError(
                f"the optimiser state does not belong to this model: {name!r} has shape {list(tensor.shape)}, "
                f"the model's has {list(parameter.shape)}"
            )
        optimizer.state[parameter][part] = _placed(part, tensor, parameter)


def _placed(part: str, tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """A tensor of the optimiser's memory where the parameter is, and in the pieces that it is in."""
    return tensor.to(parameter.device, copy=True) if part == "step" else like(tensor, parameter)
