"""Optimiser groups by circuit: queries and keys at r times the rate of the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

from torch import nn

from qkflow.circuits.find import ModelCircuits, find_circuits
from qkflow.circuits.fused import split_fused
from qkflow.circuits.param_slice import Circuit
from qkflow.errors import UsageError

__all__ = ["Circuit", "circuit_groups", "circuits_by_name"]


def circuit_groups(
    model: nn.Module,
    lr: float,
    *,
    r: float = 1.0,
    weight_decay: float | None = None,
    qk: Sequence[str] = (),
    ov: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Groups for any torch optimiser: the QK circuit learns at `lr * r`, the OV circuit and the rest at `lr`.

    Every trainable parameter is in one of them, once; fused matrices are split first (`split_fused`). With a
    `weight_decay`, each group comes in two: what is a matrix decays, what is a vector does not. Decay that an optimiser
    multiplies by the rate (AdamW's, SGD's) is r times as fast for queries and keys, too. `qk` and `ov` are for models
    whose layers are not known: see `find_circuits`.

    >>> import torch
    >>> layer = nn.MultiheadAttention(4, 2)
    >>> optimizer = torch.optim.AdamW(circuit_groups(layer, 1e-3, r=20.0, weight_decay=0.1))
    >>> [(g["circuit"], round(g["lr"], 6), g["weight_decay"], len(g["params"])) for g in optimizer.param_groups]
    [('qk', 0.02, 0.1, 2), ('qk', 0.02, 0.0, 2), ('ov', 0.001, 0.1, 2), ('ov', 0.001, 0.0, 2)]
    """
    if not 0 < r < math.inf:
        raise UsageError(f"r must be a finite number above 0, got {r}")
    split_fused(model, qk=qk, ov=ov)
    circuits = circuits_by_name(find_circuits(model, qk=qk, ov=ov))
    members: dict[Circuit, list[nn.Parameter]] = {circuit: [] for circuit in get_args(Circuit)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            members[circuits[name]].append(parameter)
    if r != 1 and not members["qk"]:
        raise UsageError(
            f"r = {r:g} has nothing to speed up: no parameter of the QK circuit of {type(model).__name__} is trained; "
            "unfreeze it, or leave r at 1"
        )
    groups: list[dict[str, Any]] = []
    for circuit, parameters in members.items():
        ratio = r if circuit == "qk" else 1.0
        shared = {"lr": lr * ratio, "circuit": circuit, "r": ratio}
        if weight_decay is None:
            groups.append({"params": parameters, **shared})
            continue
        for matrices, decay in ((True, weight_decay), (False, 0.0)):
            some = [parameter for parameter in parameters if (parameter.ndim >= 2) == matrices]
            groups.append({"params": some, **shared, "weight_decay": decay})
    return [group for group in groups if group["params"]]


def circuits_by_name(found: ModelCircuits) -> dict[str, Circuit]:
    """The circuit of each parameter that is of one circuit alone, or of the first of its slices.

    >>> circuits_by_name(find_circuits(nn.MultiheadAttention(4, 2, kdim=3, bias=False)))["k_proj_weight"]
    'qk'
    """
    circuits: dict[str, Circuit] = dict.fromkeys(found.rest, "rest")
    for part in found.ov:
        circuits[part.name] = "ov"
    for part in found.qk:
        circuits[part.name] = "qk"
    return circuits
