"""Tasks by name, and the short way to write one down: `name[:key=value,...]`, the numbers of a list joined by `+`.

mqar            mqar:pairs=4+8+16,length=64            s-niah-2:length=256,lengths=256+512,depths=0+50+100
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

from qkflow.data.recall.mqar import MQAR
from qkflow.data.recall.needle import Needle
from qkflow.errors import UsageError, unknown

RecallTask = MQAR | Needle
"""The config of a task, which makes its instances."""

_TASKS: dict[str, tuple[type[RecallTask], Callable[..., RecallTask]]] = {
    "mqar": (MQAR, MQAR),
    "s-niah-1": (Needle, partial(Needle, kind=1)),
    "s-niah-2": (Needle, partial(Needle, kind=2)),
    "s-niah-3": (Needle, partial(Needle, kind=3)),
}

TASKS = tuple(_TASKS)
"""The names of the recall tasks."""


def is_task(source: str) -> bool:
    """Whether a source names a recall task, with or without options.

    >>> is_task("mqar:pairs=4"), is_task("mqar.txt")
    (True, False)
    """
    return source.partition(":")[0] in _TASKS


def from_spec(spec: str) -> RecallTask:
    """The task that a spec names; unknown names and values that do not fit are a `UsageError`.

    >>> from_spec("mqar:pairs=2+4,length=32").pairs
    (2, 4)
    """
    name, _, options = spec.partition(":")
    if name not in _TASKS:
        raise unknown("task", name, _TASKS)
    config, make = _TASKS[name]
    types = {key: hint for key, hint in get_type_hints(config).items() if key != "kind"}
    values: dict[str, Any] = {}
    for item in filter(None, options.split(",")):
        key, equals, text = (part.strip() for part in item.partition("="))
        if not equals:
            lists = "; the numbers of a list are joined by +" if item.strip().isdecimal() else ""
            raise UsageError(f"{spec!r}: expected key=value after the colon, got {item!r}{lists}")
        if key not in types:
            raise unknown(f"option of {name}", key, types)
        if key in values:
            raise UsageError(f"{spec!r} gives {key} twice: give it once")
        values[key] = _value(name, key, text, types[key])
    return make(**values)


def to_spec(task: RecallTask) -> str:
    """The shortest spec of a task: its name, and the options that are not as usual.

    >>> to_spec(from_spec("mqar:length=64,pairs=2+4"))
    'mqar:pairs=2+4'
    """
    options = []
    for field in fields(task):
        value = getattr(task, field.name)
        if field.name == "kind" or (field.default is not MISSING and value == field.default) or value is None:
            continue
        text = "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
        options.append(f"{field.name}={text}")
    return ":".join(filter(None, [task.name, ",".join(options)]))


def _value(name: str, key: str, text: str, hint: Any) -> int | str | tuple[int, ...]:
    """The text of an option as what its annotation says: a whole number, several, or one of a few words."""
    kinds = (hint, *get_args(hint))  # with the parts of a union
    for kind in kinds:
        if get_origin(kind) is Literal:
            if text not in get_args(kind):
                raise unknown(f"{key} of {name}", text, get_args(kind))
            return text
    several = any(get_origin(kind) is tuple for kind in kinds)
    try:
        numbers = tuple(int(number) for number in text.split("+"))
    except ValueError:
        numbers = ()
    if not numbers or not (several or len(numbers) == 1):
        wanted = "whole numbers joined by +, as in 4+8+16" if several else "one whole number"
        raise UsageError(f"{name}: {key}={text} cannot be read: give {wanted}")
    return numbers if several else numbers[0]
