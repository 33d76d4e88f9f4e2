"""Recall tasks by name, and their specs: `name[:key=value,...]`, with the numbers of a list joined by `+`.

mqar            mqar:pairs=4+8+16,length=64            s-niah-2:length=256,lengths=256+512,depths=0+50+100
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from qkflow.data.recall.mqar import MQAR
from qkflow.data.recall.needle import Needle
from qkflow.errors import UsageError, unknown

RecallTask = MQAR | Needle
"""The configuration of a recall task, which generates its instances."""

_TASKS: dict[str, tuple[type[RecallTask], dict[str, Any]]] = {
    "mqar": (MQAR, {}),
    **{f"s-niah-{kind}": (Needle, {"kind": kind}) for kind in (1, 2, 3)},
}

RECALL_TASKS = tuple(_TASKS)
"""Names of the recall tasks."""


def is_recall_task(source: str) -> bool:
    """Return whether a corpus source is a recall task, with or without options.

    >>> is_recall_task("mqar:pairs=4"), is_recall_task("mqar.txt")
    (True, False)
    """
    return source.partition(":")[0] in _TASKS


def parse_recall_spec(spec: str) -> RecallTask:
    """Parse a spec; unknown names and invalid values raise a `UsageError`.

    >>> parse_recall_spec("mqar:pairs=2+4,length=32").pairs
    (2, 4)
    """
    name, _, options = spec.partition(":")
    if name not in _TASKS:
        raise unknown("task", name, _TASKS)
    config, fixed = _TASKS[name]
    hints = get_type_hints(config)
    types = {field.name: hints[field.name] for field in fields(config) if field.name != "kind"}
    values: dict[str, Any] = {}
    for item in filter(None, options.split(",")):
        key, equals, text = (word.strip() for word in item.partition("="))
        if not equals:
            hint = "; join the numbers of a list with +" if item.strip().isdecimal() else ""
            raise UsageError(f"{spec!r}: expected key=value after the colon, got {item!r}{hint}")
        if key not in types:
            raise unknown(f"option of {name}", key, types)
        if key in values:
            raise UsageError(f"{spec!r} sets {key} twice: set it once")
        values[key] = _parse_value(name, key, text, types[key])
    return config(**values, **fixed)


def format_recall_spec(task: RecallTask) -> str:
    """Return the shortest spec of a task: its name and the options that differ from the defaults.

    >>> format_recall_spec(parse_recall_spec("mqar:length=64,pairs=2+4"))
    'mqar:pairs=2+4'
    """
    options = []
    for field in fields(task):
        value = getattr(task, field.name)
        if field.name != "kind" and value != field.default:
            text = "+".join(map(str, value)) if isinstance(value, tuple) else value
            options.append(f"{field.name}={text}")
    return ":".join(filter(None, [task.name, ",".join(options)]))


def _parse_value(name: str, key: str, text: str, hint: Any) -> int | str | tuple[int, ...]:
    """Convert the text of an option to its annotated type: an integer, a list of integers, or a literal."""
    alternatives = (hint, *get_args(hint))  # the members of a union
    for alternative in alternatives:
        if get_origin(alternative) is Literal:
            if text not in get_args(alternative):
                raise unknown(f"{key} of {name}", text, get_args(alternative))
            return text
    is_list = any(get_origin(alternative) is tuple for alternative in alternatives)
    try:
        numbers = tuple(int(number) for number in text.split("+"))
    except ValueError:
        numbers = ()
    if not numbers or not (is_list or len(numbers) == 1):
        expected = "integers joined by +, as in 4+8+16" if is_list else "one integer"
        raise UsageError(f"{name}: {key}={text} is invalid: expected {expected}")
    return numbers if is_list else numbers[0]
