"""Configs as plain data and back: frozen dataclasses to JSON or TOML values, refusing unknown keys and wrong types."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from qkflow.errors import UsageError, unknown

Config = TypeVar("Config")


def to_dict(config: Any) -> dict[str, Any]:
    """The config as JSON-ready data, nested configs as nested tables, tuples as lists.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Point:
    ...     x: int = 1
    >>> to_dict(Point(x=2))
    {'x': 2}
    """
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def from_dict(cls: type[Config], data: Mapping[str, Any], *, where: str = "") -> Config:
    """Build `cls` from plain data: an unknown key, a missing one or a value of the wrong type is a `UsageError`."""
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls!r} is not a dataclass")
    hints = get_type_hints(cls)
    names = _names(cls)
    for key in data:
        if key not in names:
            raise unknown(f"config key{where}", key, names)
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in data:
            raise UsageError(f"config key {field.name!r}{where} is missing: give it a value")
    values = {key: _convert(value, hints[key], key) for key, value in data.items()}
    return cls(**values)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _convert(value: Any, kind: Any, key: str) -> Any:
    """`value` as the annotated type `kind`, or an error that names the key."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        configs = [option for option in args if dataclasses.is_dataclass(option)]
        if configs and isinstance(value, Mapping):  # the config with the most of these keys, the first of equals
            return _convert(value, max(configs, key=lambda option: len(_names(option) & value.keys())), key)
        for option in args:
            try:
                return _convert(value, option, key)
            except UsageError:
                continue
        raise _wrong(key, value, kind)
    if origin is Literal:
        if value in args:
            return value
        raise unknown(f"value for config key {key!r}", str(value), [str(option) for option in args])
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
        if len(kinds) == len(value):
            return tuple(_convert(item, item_kind, key) for item, item_kind in zip(value, kinds, strict=True))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if isinstance(value, kind):
            return value
        if isinstance(value, Mapping):
            return from_dict(kind, value, where=f" in {key!r}")
        raise _wrong(key, value, kind)
    if kind is type(None) and value is None:
        return None
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise _wrong(key, value, kind)


def _names(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def _wrong(key: str, value: Any, kind: Any) -> UsageError:
    name = kind.__name__ if isinstance(kind, type) else str(kind)
    return UsageError(f"config key {key!r} got {value!r}: expected {name}")
