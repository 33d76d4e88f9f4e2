"""Fused matrices split into the matrices they are made of, so that each can have a rate of its own.

Scaling the slices of a fused gradient would do it for plain gradient descent alone: Adam divides a gradient by its own
size, and weight decay does not pass through it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from qkflow.circuits.find import ParamSlice, find_circuits
from qkflow.circuits.param_slice import Circuit
from qkflow.circuits.split import ParamPiece, ParamSplit, split_parameter
from qkflow.errors import UsageError


def split_fused(model: nn.Module, *, qk: Sequence[str] = (), ov: Sequence[str] = ()) -> None:
    """Make one parameter of each matrix in the model's fused ones, in place; outputs stay the same to the bit.

    Names in `state_dict()` stay as they are, so that files load both ways; `named_parameters()` has the pieces. Frozen
    parameters are left alone, and so are those that one circuit has to itself. Make the optimiser afterwards: one that
    exists knows only the parameters of before. What is written into the whole, as in `layer.weight.data.zero_()`, is
    lost: write into the pieces, or load a state dict.

    >>> layer = nn.MultiheadAttention(4, 2, bias=False)
    >>> split_fused(layer)
    >>> [name for name, _ in layer.named_parameters()]
    ['in_proj_weight_query', 'in_proj_weight_key', 'in_proj_weight_value', 'out_proj.weight']
    >>> list(layer.state_dict()), layer.in_proj_weight.shape
    (['in_proj_weight', 'out_proj.weight'], torch.Size([12, 4]))
    """
    found = find_circuits(model, qk=qk, ov=ov)
    claims: list[tuple[ParamSlice, Circuit]] = [
        *((part, "qk") for part in found.qk),
        *((part, "ov") for part in found.ov),
    ]
    slices: dict[str, list[tuple[ParamSlice, Circuit]]] = {}
    for part, circuit in claims:
        if not part.whole:
            slices.setdefault(part.name, []).append((part, circuit))
    parameters = dict(model.named_parameters())
    holders = _holders(model)
    for name, cuts in slices.items():
        parameter = parameters[name]
        if not parameter.requires_grad:
            continue
        places = holders[id(parameter)]
        cut = _cut(places[0][1], parameter, cuts)
        if len({piece.circuit for piece in cut.pieces}) > 1:
            split_parameter(parameter, places, cut)


def _holders(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """The modules that hold each parameter, and what they call it."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((module, name))
    return found


def _cut(name: str, parameter: nn.Parameter, cuts: Sequence[tuple[ParamSlice, Circuit]]) -> ParamSplit:
    """The cuts of a parameter: its slices by matrix, and as one more piece what they leave."""
    dim = cuts[0][0].dim
    if dim is None or any(part.dim != dim for part, _ in cuts):
        raise UsageError(f"{name} is sliced along two dimensions: name its slices along one of them")
    spans: dict[tuple[str, Circuit], list[tuple[int, int]]] = {}
    end = 0
    for part, circuit in sorted(cuts, key=lambda cut: cut[0].start):
        if end < part.start:
            spans.setdefault(("rest", "rest"), []).append((end, part.start))
        spans.setdefault((part.matrix or circuit, circuit), []).append((part.start, part.stop))
        end = part.stop
    if end < parameter.shape[dim]:
        spans.setdefault(("rest", "rest"), []).append((end, parameter.shape[dim]))
    pieces = (
        ParamPiece(attribute=f"{name}_{matrix}", circuit=circuit, spans=tuple(places))
        for (matrix, circuit), places in spans.items()
    )
    return ParamSplit(name=name, dim=dim, pieces=tuple(pieces))
