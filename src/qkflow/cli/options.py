"""Helpers for command-line flags: help texts, durations, lists of numbers, paths and run folders."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import tyro

from qkflow.cli.console import Console
from qkflow.data import CORPUS_NAMES, CorpusConfig, is_recall_task
from qkflow.errors import UsageError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def flag(metavar: str, default: str | None = None) -> Any:
    """The help of an optional flag; `default` describes what happens without it."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="" if default is None else f"(default: {default})")


def refuse_empty(args: Sequence[str], commands: Mapping[str, type]) -> None:
    """Raise `UsageError` for an empty argument: an empty path would be the current folder. Prompts may be empty."""
    types = get_type_hints(commands[args[0]]) if args and args[0] in commands else {}
    with_value = {as_flag(name) for name, kind in types.items() if kind is not bool}
    before, n_positional, after_dashes = "", 0, False
    for arg in args:
        name, equals, value = arg.partition("=")
        is_flag = name.startswith("--") and not after_dashes
        is_prompt = args[0] == "generate" and n_positional >= 2 and not before  # after the command and the run
        if (is_flag and equals and not value) or (not arg and not is_prompt):
            empty = name if is_flag else before or "an argument"
            raise UsageError(f"{empty} is empty: give a value, or leave it out")
        n_positional += not is_flag and not before
        after_dashes = after_dashes or arg == "--"
        before = name if is_flag and not equals and name.replace("_", "-") in with_value else ""


def refuse_extreme(command: object) -> None:
    """Raise `UsageError` for numbers that are not between -2^63 and 2^63."""
    for name, value in vars(command).items():
        if isinstance(value, int | float) and not abs(value) < 2**63:
            raise UsageError(f"{as_flag(name)} must be between -2^63 and 2^63, got {value}")


def as_flag(name: str) -> str:
    """The flag of a field, as typed.

    >>> as_flag("data_seed")
    '--data-seed'
    """
    return f"--{name.replace('_', '-')}"


def parse_duration(text: str) -> float:
    """Convert a duration to seconds.

    >>> parse_duration("90s"), parse_duration("1.5m"), parse_duration("2h"), parse_duration("3d")
    (90.0, 90.0, 7200.0, 259200.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"--budget must be a number and a unit, such as 90s, 2m, 1.5h or 3d: got {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


def parse_numbers(text: str, flag: str, example: str) -> tuple[float, ...]:
    """Parse numbers separated by commas; `flag` and `example` are for the error message.

    >>> parse_numbers("1e-3, 0.003", "--rates", "1e-3,3e-3")
    (0.001, 0.003)
    """
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise UsageError(f"{flag} must be numbers separated by commas, such as {example}: got {text!r}") from None


def new_folder(stem: str, parent: Path = Path("runs")) -> Path:
    """A path in `parent` that does not exist yet: the stem in safe characters, with a number if it is taken.

    >>> new_folder("compare-mqar:pairs=4+8", parent=Path("no such folder")).name
    'compare-mqar_pairs=4_8'
    """
    stem = re.sub(r"[^\w.=-]+", "_", stem)
    folder, number = parent / stem, 2
    while folder.exists():
        folder, number = parent / f"{stem}-{number}", number + 1
    return folder


def without_none(**values: Any) -> dict[str, Any]:
    """The values that are not None.

    >>> without_none(lr=0.1, steps=None)
    {'lr': 0.1}
    """
    return {name: value for name, value in values.items() if value is not None}


def flags_given(command: object, exclude: tuple[str, ...]) -> str:
    """The flags of a command that the user set, as typed, except those in `exclude`."""
    names = [
        name
        for name, value in vars(command).items()
        if value is not None and value is not False and name not in exclude
    ]
    return ", ".join("CORPUS" if name == "corpus" else as_flag(name) for name in names)


def with_absolute_paths(config: CorpusConfig) -> CorpusConfig:
    """Make existing paths absolute, so that the run can be resumed from any directory."""

    def absolute(path: str | None) -> str | None:
        is_name = path is None or path in CORPUS_NAMES or is_recall_task(path)
        return path if path is None or is_name or not Path(path).exists() else str(Path(path).absolute())

    return replace(
        config,
        source=absolute(config.source) or config.source,
        vocabulary_files=absolute(config.vocabulary_files),
        data_dir=absolute(config.data_dir),
    )


def print_notices(notices: Sequence[str]) -> None:
    """Print messages for the user to stderr."""
    for notice in notices:
        Console(stderr=True, soft_wrap=True).print(f"note: {notice}", markup=False, highlight=False)


def command_line() -> tuple[str, ...]:
    """The command as the user can type it again, without the path of the program."""
    return ("qkflow", *sys.argv[1:])
