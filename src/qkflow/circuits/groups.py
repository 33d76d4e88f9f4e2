"""Optimizer parameter groups in which the QK circuit has its own learning rate.

Fused matrices are first split into separate parameters (`split_fused`). Scaling slices of a fused gradient instead
would work only for plain SGD: Adam normalizes the gradient, and weight decay is not part of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

from torch import nn

from qkflow.circuits.find import ModelCircuits, find_circuits
from qkflow.circuits.param_split import Circuit, ParamPiece, ParamSlice, ParamSplit, split_parameter
from qkflow.errors import UsageError


def circuit_groups(
    model: nn.Module,
    lr: float,
    *,
    r: float = 1.0,
    weight_decay: float | None = None,
    qk: Sequence[str] = (),
    ov: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return parameter groups for any torch optimizer: learning rate `lr * r` for the QK circuit, `lr` for the rest.

    Every trainable parameter is in exactly one group. Fused matrices are split first (`split_fused`).

    Args:
        model: The model; its fused attention matrices are split in place.
        lr: Learning rate of the OV circuit and of all other parameters.
        r: Ratio of the QK learning rate to `lr`.
        weight_decay: If given, each group is divided into matrices, which decay, and vectors, which do not. Optimizers
            that multiply the decay by the learning rate (AdamW, SGD) also decay queries and keys `r` times as fast.
        qk: Name patterns of the QK parameters, for unknown architectures (see `find_circuits`).
        ov: Name patterns of the OV parameters.

    >>> import torch
    >>> layer = nn.MultiheadAttention(4, 2)
    >>> optimizer = torch.optim.AdamW(circuit_groups(layer, 1e-3, r=20.0, weight_decay=0.1))
    >>> [(g["circuit"], round(g["lr"], 6), g["weight_decay"], len(g["params"])) for g in optimizer.param_groups]
    [('qk', 0.02, 0.1, 2), ('qk', 0.02, 0.0, 2), ('ov', 0.001, 0.1, 2), ('ov', 0.001, 0.0, 2)]
    """
    if not 0 < r < math.inf:
        raise UsageError(f"r must be a finite number above 0, got {r}")
    split_fused(model, qk=qk, ov=ov)
    circuit_of = circuits_by_name(find_circuits(model, qk=qk, ov=ov))
    parameters: dict[Circuit, list[nn.Parameter]] = {circuit: [] for circuit in get_args(Circuit)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameters[circuit_of[name]].append(parameter)
    if r != 1 and not parameters["qk"]:
        raise UsageError(
            f"r = {r:g} has no effect: no QK parameter of {type(model).__name__} is trainable; "
            "unfreeze the queries and keys, or leave r at 1"
        )
    groups: list[dict[str, Any]] = []
    for circuit, params in parameters.items():
        ratio = r if circuit == "qk" else 1.0
        options = {"lr": lr * ratio, "circuit": circuit, "r": ratio}
        if weight_decay is None:
            groups.append({"params": params, **options})
            continue
        matrices = [parameter for parameter in params if parameter.ndim >= 2]
        vectors = [parameter for parameter in params if parameter.ndim < 2]
        groups.append({"params": matrices, **options, "weight_decay": weight_decay})
        groups.append({"params": vectors, **options, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def circuits_by_name(circuits: ModelCircuits) -> dict[str, Circuit]:
    """Return the circuit of each parameter; a parameter with slices in both circuits counts as QK.

    >>> circuits_by_name(find_circuits(nn.MultiheadAttention(4, 2, kdim=3, bias=False)))["k_proj_weight"]
    'qk'
    """
    circuit_of: dict[str, Circuit] = dict.fromkeys(circuits.rest, "rest")
    for param in circuits.ov:
        circuit_of[param.name] = "ov"
    for param in circuits.qk:
        circuit_of[param.name] = "qk"
    return circuit_of


def split_fused(model: nn.Module, *, qk: Sequence[str] = (), ov: Sequence[str] = ()) -> None:
    """Split the fused attention matrices of a model, in place; outputs stay bit-identical.

    `state_dict()` keeps its names, so checkpoints load before and after the split; `named_parameters()` returns the
    pieces. Frozen parameters and parameters of a single circuit are not split. Create the optimizer after the split:
    an existing one holds the old parameters. Writing into the whole parameter (`layer.weight.data.zero_()`) has no
    effect after the split; write into the pieces or load a state dict.

    >>> layer = nn.MultiheadAttention(4, 2, bias=False)
    >>> split_fused(layer)
    >>> [name for name, _ in layer.named_parameters()]
    ['in_proj_weight_query', 'in_proj_weight_key', 'in_proj_weight_value', 'out_proj.weight']
    >>> list(layer.state_dict()), layer.in_proj_weight.shape
    (['in_proj_weight', 'out_proj.weight'], torch.Size([12, 4]))
    """
    circuits = find_circuits(model, qk=qk, ov=ov)
    slices: dict[str, list[tuple[ParamSlice, Circuit]]] = {}
    params_of: dict[Circuit, tuple[ParamSlice, ...]] = {"qk": circuits.qk, "ov": circuits.ov}
    for circuit, params in params_of.items():
        for param in params:
            if not param.is_whole:
                slices.setdefault(param.name, []).append((param, circuit))
    parameters = dict(model.named_parameters())
    holders: dict[int, list[tuple[nn.Module, str]]] = {}  # the modules that hold a parameter, with its name in each
    for module in model.modules():
        for name, held in module._parameters.items():
            holders.setdefault(id(held), []).append((module, name))
    for name, param_slices in slices.items():
        parameter = parameters[name]
        if not parameter.requires_grad:
            continue
        modules = holders[id(parameter)]
        split = _split_by_matrix(modules[0][1], parameter, param_slices)
        if len({piece.circuit for piece in split.pieces}) > 1:
            split_parameter(parameter, modules, split)


def _split_by_matrix(name: str, parameter: nn.Parameter, slices: Sequence[tuple[ParamSlice, Circuit]]) -> ParamSplit:
    """Return a split with one piece per matrix, and one more for the rows that belong to no slice."""
    dim = slices[0][0].dim
    if dim is None or any(param.dim != dim for param, _ in slices):
        raise UsageError(f"{name} is sliced along two dimensions: use slices along one dimension")
    spans: dict[tuple[str, Circuit], list[tuple[int, int]]] = {}
    end = 0
    for param, circuit in sorted(slices, key=lambda item: item[0].start):
        if end < param.start:
            spans.setdefault(("rest", "rest"), []).append((end, param.start))
        spans.setdefault((param.matrix or circuit, circuit), []).append((param.start, param.stop))
        end = param.stop
    if end < parameter.shape[dim]:
        spans.setdefault(("rest", "rest"), []).append((end, parameter.shape[dim]))
    pieces = (
        ParamPiece(attribute=f"{name}_{matrix}", circuit=circuit, spans=tuple(ranges))
        for (matrix, circuit), ranges in spans.items()
    )
    return ParamSplit(name=name, dim=dim, pieces=tuple(pieces))
