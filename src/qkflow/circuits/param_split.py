"""Slices of parameters, and modules whose fused parameters are split into one parameter per matrix.

    weight = cat(weight_query, weight_key, weight_value)          recomputed whenever `module.weight` is read

`split_parameter` replaces the module's class by a subclass in which the fused parameter is a property. The optimizer
sees the pieces; `state_dict` and `load_state_dict` see only the whole parameter, so checkpoints are unaffected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from qkflow.errors import UsageError

Circuit = Literal["qk", "ov", "rest"]
"""Where to attend; what to pass on; all other parameters."""


@dataclass(frozen=True, kw_only=True)
class ParamSlice:
    """A parameter, or a slice of one, that belongs to a circuit.

    >>> ParamSlice(name="attn.c_attn.weight", dim=1, start=0, stop=64, matrix="query").is_whole
    False
    """

    name: str
    """Name of the parameter in `model.named_parameters()`."""
    dim: int | None = None
    """Dimension that is sliced; None means the whole parameter."""
    start: int = 0
    """First row of the slice."""
    stop: int = 0
    """End of the slice (exclusive)."""
    matrix: str = ""
    """Matrix of the fused parameter that the slice belongs to; slices of one matrix become one parameter."""

    @property
    def is_whole(self) -> bool:
        """Whether the slice is the whole parameter."""
        return self.dim is None

    def overlaps(self, other: ParamSlice) -> bool:
        """Whether the two share an element; slices along different dimensions always do.

        >>> ParamSlice(name="w", dim=0, start=0, stop=4).overlaps(ParamSlice(name="w", dim=0, start=4, stop=6))
        False
        """
        if self.name != other.name:
            return False
        if self.dim is None or self.dim != other.dim:
            return True
        return other.dim is None or (self.start < other.stop and other.start < self.stop)


@dataclass(frozen=True, kw_only=True)
class ParamPiece:
    """The rows of a split parameter that form one new parameter."""

    attribute: str
    """Name of the new parameter in its module."""
    circuit: Circuit
    spans: tuple[tuple[int, int], ...]
    """Row ranges [start, stop) in the whole parameter, in order."""


@dataclass(frozen=True, kw_only=True)
class ParamSplit:
    """How a parameter is split along one dimension."""

    name: str
    """Name of the parameter in its module."""
    dim: int
    pieces: tuple[ParamPiece, ...]
    """The pieces; together they cover every row once."""

    @property
    def n_rows(self) -> int:
        """Number of rows of the whole parameter."""
        return max(stop for piece in self.pieces for _, stop in piece.spans)

    def renamed(self, name: str) -> ParamSplit:
        """Return the same split of a parameter called `name`."""
        pieces = (replace(piece, attribute=name + piece.attribute.removeprefix(self.name)) for piece in self.pieces)
        return replace(self, name=name, pieces=tuple(pieces))

    def apply(self, whole: Tensor) -> dict[str, Tensor]:
        """Return a copy of each piece of a tensor, by attribute name."""
        return {
            piece.attribute: torch.cat(
                [whole.narrow(self.dim, start, stop - start) for start, stop in piece.spans], self.dim
            )
            for piece in self.pieces
        }


def module_splits(module: nn.Module) -> tuple[ParamSplit, ...]:
    """Return the split parameters of the module itself, without those of its children."""
    return type(module).splits if isinstance(module, _SplitModule) else ()


def all_splits(model: nn.Module) -> Iterator[tuple[str, ParamSplit]]:
    """Yield every split parameter of a model with its name prefix; a shared module appears under each of its names."""
    for name, module in model.named_modules(remove_duplicate=False):
        for split in module_splits(module):
            yield f"{name}." if name else "", split


def split_parameter(parameter: nn.Parameter, holders: Sequence[tuple[nn.Module, str]], split: ParamSplit) -> None:
    """Replace a parameter by its pieces in every module that holds it.

    Args:
        parameter: The parameter to split.
        holders: Modules that hold the parameter, with its name in each of them.
        split: The split, with the names that apply in the first of the modules.
    """
    if type(parameter) is not nn.Parameter:
        raise UsageError(
            f"{split.name} is a {type(parameter).__name__} and cannot be split: expected an ordinary nn.Parameter; "
            "split the model after initializing it and before sharding or quantizing it"
        )
    gradients = {} if parameter.grad is None else split.apply(parameter.grad)
    new_parameters: dict[str, nn.Parameter] = {}
    for attribute, values in split.apply(parameter.detach()).items():
        new_parameters[attribute] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        for name, value in vars(parameter).items():  # attributes that other libraries set on parameters
            setattr(new_parameters[attribute], name, value)
        new_parameters[attribute].grad = gradients.get(attribute)
    for module, name in holders:
        renamed = split.renamed(name)
        pairs = zip(renamed.pieces, split.pieces, strict=True)
        _replace_parameter(module, renamed, {new.attribute: new_parameters[old.attribute] for new, old in pairs})


def _replace_parameter(module: nn.Module, split: ParamSplit, pieces: Mapping[str, nn.Parameter]) -> None:
    for attribute in pieces:
        if hasattr(module, attribute):
            raise UsageError(
                f"{split.name} cannot be split: its module already has an attribute {attribute!r}; rename it"
            )
    before = dict(module._parameters)
    module._parameters.clear()
    for name, parameter in before.items():  # keep the order: optimizer checkpoints rely on it
        module._parameters.update(pieces if name == split.name else {name: parameter})
    base = type(module).base if isinstance(module, _SplitModule) else type(module)
    object.__setattr__(module, "__class__", _split_class(base, (*module_splits(module), split)))


class _SplitModule(nn.Module):
    """Mixin of modules with split parameters."""

    base: ClassVar[type[nn.Module]]
    splits: ClassVar[tuple[ParamSplit, ...]]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        own: dict[str, Any] = {}
        super()._save_to_state_dict(own, prefix, keep_vars)
        whole_names = {f"{prefix}{piece.attribute}": split.name for split in self.splits for piece in split.pieces}
        for key, value in own.items():
            if key not in whole_names:
                destination[key] = value
            elif (name := f"{prefix}{whole_names[key]}") not in destination:
                whole = getattr(self, whole_names[key])
                destination[name] = whole if keep_vars else whole.detach()

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
            whole, current = own.pop(key), getattr(self, split.name)
            if isinstance(whole, Tensor) and whole.shape == current.shape:
                own |= {f"{prefix}{attribute}": piece for attribute, piece in split.apply(whole.detach()).items()}
            else:
                error_msgs.append(
                    f"size mismatch for {key}: copying a param with shape {getattr(whole, 'shape', whole)} from "
                    f"checkpoint, the shape in current model is {current.shape}."
                )
        super()._load_from_state_dict(own, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        pieces = {f"{prefix}{piece.attribute}" for split in self.splits for piece in split.pieces}
        missing_keys.extend(key for key in missing if key not in pieces)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:  # a class created at run time has no importable name
        _, _, *state = super().__reduce_ex__(protocol)
        return (_new_instance, (type(self).base, type(self).splits), *state)


@cache
def _split_class(base: type[nn.Module], splits: tuple[ParamSplit, ...]) -> type[nn.Module]:
    """Return the subclass of `base` with split parameters; it keeps the name of `base`, which libraries check."""
    return type(
        base.__name__,
        (_SplitModule, base),
        {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "base": base,
            "splits": splits,
            **{split.name: _whole_property(split) for split in splits},
        },
    )


def _new_instance(base: type[nn.Module], splits: tuple[ParamSplit, ...]) -> nn.Module:
    cls = _split_class(base, splits)
    return cls.__new__(cls)


def _whole_property(split: ParamSplit) -> property:
    spans: list[tuple[int, str, int, int]] = []  # row in the whole, piece, row in the piece, length
    for piece in split.pieces:
        offset = 0
        for start, stop in piece.spans:
            spans.append((start, piece.attribute, offset, stop - start))
            offset += stop - start
    ordered, dim = tuple(span[1:] for span in sorted(spans)), split.dim

    def whole(module: nn.Module) -> Tensor:
        return torch.cat([getattr(module, name).narrow(dim, offset, length) for name, offset, length in ordered], dim)

    return property(whole)
