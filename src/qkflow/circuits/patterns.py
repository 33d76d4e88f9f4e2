"""Parameters named by hand: patterns, slices, and what to say to someone who has to write them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from qkflow.circuits.param_slice import ParamSlice
from qkflow.circuits.split import all_splits
from qkflow.errors import UsageError

_SLICE = re.compile(r"(.+)\[(\d+):(\d+):(\d+)\]")
_MOST = 24
"""Names that a message shows, at most."""


def by_hand(model: nn.Module, patterns: Sequence[str]) -> list[ParamSlice]:
    """What patterns on parameter names stand for; `name[dim:start:stop]` is a slice of a parameter.

    Names are those in files: a parameter that is split already goes by the name it had before.

    >>> [(param.name, param.dim, param.stop) for param in by_hand(nn.Linear(4, 6), ["weight[0:0:2]", "b*"])]
    [('weight', 0, 2), ('bias', None, 0)]
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    for prefix, split in all_splits(model):
        for piece in split.pieces:
            shapes.pop(f"{prefix}{piece.attribute}")
    found: list[ParamSlice] = []
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        sliced = _SLICE.fullmatch(pattern)
        stem, span = (pattern, None) if sliced is None else (sliced[1], tuple(map(int, sliced.groups()[1:])))
        named = [_part(name, shape, span) for name, shape in shapes.items() if fnmatchcase(name, stem)]
        pieces = _pieces(model, stem, span)
        if not named and not pieces:
            raise UsageError(
                f"{pattern!r} names no parameter: expected a name, with * for any characters, and a slice of a "
                f"parameter as in name[0:0:64] (dimension:start:stop). There are {folded(shapes)}"
            )
        found += [*named, *pieces]
    return found


def _part(name: str, shape: torch.Size, span: tuple[int, ...] | None) -> ParamSlice:
    if span is None:
        return ParamSlice(name=name)
    dim, start, stop = span
    if dim >= len(shape) or not 0 <= start < stop <= shape[dim]:
        raise UsageError(
            f"{name}[{dim}:{start}:{stop}] is no slice of a parameter of shape {list(shape)}: expected "
            "name[dimension:start:stop] with start below stop, and stop at most the size of the dimension"
        )
    if stop - start == shape[dim]:
        return ParamSlice(name=name)
    return ParamSlice(name=name, dim=dim, start=start, stop=stop, matrix=f"{start}_{stop}")


def _pieces(model: nn.Module, stem: str, span: tuple[int, ...] | None) -> list[ParamSlice]:
    """The pieces of parameters that are split already, named as they were before."""
    found = []
    for prefix, split in all_splits(model):
        if not fnmatchcase(name := f"{prefix}{split.name}", stem):
            continue
        dim, start, stop = (split.dim, 0, split.rows) if span is None else span
        for piece in split.pieces:
            inside = [start <= first and last <= stop for first, last in piece.spans]
            beside = [last <= start or stop <= first for first, last in piece.spans]
            if dim == split.dim and all(inside):
                found.append(ParamSlice(name=f"{prefix}{piece.attribute}"))
            elif dim != split.dim or not all(beside):
                raise UsageError(
                    f"{name} is split along dimension {split.dim} at other rows than [{dim}:{start}:{stop}] asks for: "
                    "name the same slices as before, or begin with a new model"
                )
    return found


def folded(shapes: Mapping[str, torch.Size]) -> str:
    """Parameter names with their shapes on one line; those of repeated layers once.

    >>> folded({f"h.{i}.attn.weight": torch.Size([2, 3]) for i in range(12)})
    'h.{0..11}.attn.weight [2, 3]'
    """
    numbers: dict[tuple[str, ...], list[set[int]]] = {}
    sizes: dict[tuple[str, ...], torch.Size] = {}
    for name, shape in shapes.items():
        steps = name.split(".")
        key = tuple("#" if step.isdigit() else step for step in steps)
        counted = [int(step) for step in steps if step.isdigit()]
        for seen, number in zip(numbers.setdefault(key, [set() for _ in counted]), counted, strict=True):
            seen.add(number)
        sizes.setdefault(key, shape)
    lines = []
    for key, counted in numbers.items():
        ranges = iter(map(_range, counted))
        lines.append(f"{'.'.join(next(ranges) if step == '#' else step for step in key)} {list(sizes[key])}")
    more = f" and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
    return ", ".join(lines[:_MOST]) + more


def _range(numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return str(ordered[0])
    if ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{{{ordered[0]}..{ordered[-1]}}}"
    return f"{{{','.join(map(str, ordered))}}}"
