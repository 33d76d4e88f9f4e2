"""One parameter that becomes several: modules keep computing with the whole, optimisers see the pieces.

    weight = cat(weight_query, weight_key, weight_value)          made anew whenever `module.weight` is read

The module's class is exchanged for a subclass of it with a property in place of the parameter. `state_dict` and
`load_state_dict` know the whole alone, under its own name: files are as if nothing had been split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qkflow.circuits.param_slice import Circuit
from qkflow.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ParamPiece:
    """The rows of a split parameter that learn as one parameter."""

    attribute: str
    """Its name in the module."""
    circuit: Circuit
    """The circuit it was split off for."""
    spans: tuple[tuple[int, int], ...]
    """Where its rows lie in the whole, in order."""

    @property
    def rows(self) -> int:
        """How many they are."""
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True, kw_only=True)
class ParamSplit:
    """How a parameter was cut up along a dimension."""

    name: str
    """The parameter, in its module."""
    dim: int
    """The dimension."""
    pieces: tuple[ParamPiece, ...]
    """All of its rows, each once."""

    @property
    def rows(self) -> int:
        """Rows of the whole."""
        return sum(piece.rows for piece in self.pieces)

    def renamed(self, name: str) -> ParamSplit:
        """The same cuts in a parameter of another name."""
        pieces = (replace(piece, attribute=name + piece.attribute.removeprefix(self.name)) for piece in self.pieces)
        return replace(self, name=name, pieces=tuple(pieces))

    def cut(self, whole: Tensor) -> dict[str, Tensor]:
        """The pieces of a tensor, each with memory of its own."""
        return {
            piece.attribute: torch.cat(
                [whole.narrow(self.dim, start, stop - start) for start, stop in piece.spans], self.dim
            )
            for piece in self.pieces
        }


def splits_of(module: nn.Module) -> tuple[ParamSplit, ...]:
    """The parameters of the module itself that are split."""
    return type(module).splits if isinstance(module, _Joined) else ()


def all_splits(model: nn.Module) -> Iterator[tuple[str, ParamSplit]]:
    """Every split parameter of a model, with the prefix of the names in its module: each that a shared module has."""
    for name, module in model.named_modules(remove_duplicate=False):
        for split in splits_of(module):
            yield f"{name}." if name else "", split


def split_parameter(parameter: nn.Parameter, holders: Sequence[tuple[nn.Module, str]], cut: ParamSplit) -> None:
    """Put pieces in the place of a parameter, in every module that holds it, and under any name.

    The names in `cut` are those in the first of the modules.
    """
    if type(parameter) is not nn.Parameter:
        raise UsageError(
            f"{cut.name} is a {type(parameter).__name__}, of which no slice can learn by itself: split the model while "
            "its parameters are ordinary ones, before it is sharded or quantised, and after it is initialised"
        )
    gradients = {} if parameter.grad is None else cut.cut(parameter.grad)
    made: dict[str, nn.Parameter] = {}
    for attribute, values in cut.cut(parameter.detach()).items():
        made[attribute] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        for name, value in vars(parameter).items():  # what others keep on their parameters
            setattr(made[attribute], name, value)
        made[attribute].grad = gradients.get(attribute)
    for module, name in holders:
        own = cut.renamed(name)
        pieces = zip(own.pieces, cut.pieces, strict=True)
        _replace(module, own, {mine.attribute: made[piece.attribute] for mine, piece in pieces})


def _replace(module: nn.Module, split: ParamSplit, pieces: Mapping[str, nn.Parameter]) -> None:
    for attribute in pieces:
        if hasattr(module, attribute):
            raise UsageError(f"{split.name} cannot be split: its module has a {attribute!r} already; rename that")
    before = dict(module._parameters)
    module._parameters.clear()
    for name, parameter in before.items():  # in place: the order of parameters is that of optimisers' files
        module._parameters.update(pieces if name == split.name else {name: parameter})
    base = type(module).base if isinstance(module, _Joined) else type(module)
    object.__setattr__(module, "__class__", _joined(base, (*splits_of(module), split)))


class _Joined(nn.Module):
    """What split modules have besides their own class."""

    base: ClassVar[type[nn.Module]]
    splits: ClassVar[tuple[ParamSplit, ...]]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        own: dict[str, Any] = {}
        super()._save_to_state_dict(own, prefix, keep_vars)
        whole = {f"{prefix}{piece.attribute}": split.name for split in self.splits for piece in split.pieces}
        for key, value in own.items():
            if key not in whole:
                destination[key] = value
            elif (name := f"{prefix}{whole[key]}") not in destination:
                joined = getattr(self, whole[key])
                destination[name] = joined if keep_vars else joined.detach()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own, missing = dict(state_dict), []
        for split in self.splits:
            if (key := f"{prefix}{split.name}") not in own:
                if strict:
                    missing_keys.append(key)
                continue
            whole, here = own.pop(key), getattr(self, split.name)
            if isinstance(whole, Tensor) and whole.shape == here.shape:
                own |= {f"{prefix}{attribute}": piece for attribute, piece in split.cut(whole.detach()).items()}
            else:
                error_msgs.append(
                    f"size mismatch for {key}: copying a param with shape {getattr(whole, 'shape', whole)} from "
                    f"checkpoint, the shape in current model is {here.shape}."
                )
        super()._load_from_state_dict(own, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        pieces = {f"{prefix}{piece.attribute}" for split in self.splits for piece in split.pieces}
        missing_keys.extend(key for key in missing if key not in pieces)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:  # a class made at run time cannot be pickled by name
        _, _, *state = super().__reduce_ex__(protocol)
        return (_blank, (type(self).base, type(self).splits), *state)


@cache
def _joined(base: type[nn.Module], splits: tuple[ParamSplit, ...]) -> type[nn.Module]:
    """The subclass of a module's class in which parameters are split; named as its base, which others go by."""
    return type(
        base.__name__,
        (_Joined, base),
        {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "base": base,
            "splits": splits,
            **{split.name: _property(split) for split in splits},
        },
    )


def _blank(base: type[nn.Module], splits: tuple[ParamSplit, ...]) -> nn.Module:
    made = _joined(base, splits)
    return made.__new__(made)


def _property(split: ParamSplit) -> property:
    placed: list[tuple[int, str, int, int]] = []
    for piece in split.pieces:
        offset = 0
        for start, stop in piece.spans:
            placed.append((start, piece.attribute, offset, stop - start))
            offset += stop - start
    order, dim = tuple(placed[1:] for placed in sorted(placed)), split.dim

    def whole(module: nn.Module) -> Tensor:
        return torch.cat([getattr(module, name).narrow(dim, offset, length) for name, offset, length in order], dim)

    return property(whole)
