"""Convert configs (frozen dataclasses) to plain data and back.

Plain data are what JSON and TOML hold: nested dictionaries, lists, numbers, strings, booleans and None. Unknown keys,
missing keys and values of the wrong type raise a `UsageError` that names the key with its path.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from qkflow.errors import UsageError, short_repr, unknown

Config = TypeVar("Config")


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a config to plain data: nested configs become dictionaries, tuples become lists.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Point:
    ...     x: int = 1
    >>> to_dict(Point(x=2))
    {'x': 2}
    """
    return {field.name: _to_plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def from_dict(cls: type[Config], data: Mapping[str, Any], *, where: str = "") -> Config:
    """Build a config from plain data.

    Args:
        cls: The dataclass to build.
        data: Its fields; nested dataclasses are nested dictionaries.
        where: Where the data come from, for error messages, such as `" of config.json"`.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Point:
    ...     x: int = 1
    >>> from_dict(Point, {"y": 1})
    Traceback (most recent call last):
    qkflow.errors.UsageError: unknown config key 'y': Known: x
    """
    return _build(cls, data, "", where)


def _build(cls: type[Config], data: Mapping[str, Any], path: str, where: str) -> Config:
    """Build a dataclass whose own key path is `path` (empty at the top level)."""
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls!r} is not a dataclass")
    location = f" in {path!r}{where}" if path else where
    types_by_name = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            raise unknown("config key", key, fields, where=location)
    for name, field in fields.items():
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if not has_default and name not in data:
            raise UsageError(f"config key {name!r}{location} is missing: set it")
    prefix = f"{path}." if path else ""
    return cls(**{key: _convert(value, types_by_name[key], f"{prefix}{key}", where) for key, value in data.items()})


def _convert(value: Any, expected: Any, path: str, where: str) -> Any:
    """Convert `value` to the annotated type `expected`."""
    if (isinstance(value, int) and abs(value) >= 2**63) or (isinstance(value, str) and "\0" in value):
        limit = "an integer between -2^63 and 2^63" if isinstance(value, int) else "text without NUL characters"
        raise UsageError(f"config key {path!r}{where} got {short_repr(value)}: expected {limit}")
    origin, args = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        configs = [alternative for alternative in args if dataclasses.is_dataclass(alternative)]
        if configs and isinstance(value, Mapping):  # the config with most of these keys, the first of equals
            best = max(configs, key=lambda config: sum(field.name in value for field in dataclasses.fields(config)))
            return _convert(value, best, path, where)
        for alternative in args:
            try:
                return _convert(value, alternative, path, where)
            except UsageError:
                continue
        raise _type_error(value, expected, path, where)
    if origin is Literal:
        if value in args:
            return value
        raise unknown(f"value for config key {path!r}", str(value), [str(option) for option in args], where=where)
    if origin is tuple and isinstance(value, list | tuple):
        item_types = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
        if len(item_types) == len(value):
            return tuple(_convert(item, kind, path, where) for item, kind in zip(value, item_types, strict=True))
    if dataclasses.is_dataclass(expected) and isinstance(expected, type):
        if isinstance(value, expected):
            return value
        if isinstance(value, Mapping):
            return _build(expected, value, path, where)
    elif expected is type(None) and value is None:
        return None
    elif expected is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif (
        isinstance(expected, type) and isinstance(value, expected) and (expected is bool or not isinstance(value, bool))
    ):
        return value  # bool is a subclass of int, but not a valid int
    raise _type_error(value, expected, path, where)


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, tuple | list):
        return [_to_plain(item) for item in value]
    return value


def _type_error(value: Any, expected: Any, path: str, where: str) -> UsageError:
    return UsageError(f"config key {path!r}{where} got {short_repr(value)}: expected {_type_name(expected)}")


def _type_name(expected: Any) -> str:
    """Return a type as it is written in an annotation."""
    if get_origin(expected) in (Union, types.UnionType):
        return " | ".join(map(_type_name, get_args(expected)))
    if get_origin(expected) is Literal:
        return " | ".join(map(repr, get_args(expected)))
    if expected is type(None):
        return "None"
    return expected.__name__ if isinstance(expected, type) and not get_args(expected) else str(expected)
