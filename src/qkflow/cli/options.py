"""What the commands share: flags that can be left out, durations as people write them, paths, where a new run goes."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

from qkflow.data import NAMES, CorpusConfig, is_task
from qkflow.errors import UsageError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def flag(metavar: str, default: str | None = None) -> Any:
    """How an optional flag shows in the help: `default` is what leaving it out comes to."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="" if default is None else f"(default: {default})")


def seconds(text: str) -> float:
    """A duration in seconds.

    >>> seconds("90s"), seconds("1.5m"), seconds("2h"), seconds("3d")
    (90.0, 90.0, 7200.0, 259200.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if found is None or float(found[1]) == 0:
        raise UsageError(f"a budget is a number and a unit, such as 90s, 2m, 1.5h or 3d: got {text!r}")
    return float(found[1]) * _UNITS[found[2]]


RATES = ("learning rates are", "1e-3,3e-3")
"""How `numbers` speaks of learning rates."""


def numbers(text: str, told: tuple[str, str]) -> tuple[float, ...]:
    """Numbers from a list with commas; `told` begins the message about what is none, and has an example for it.

    >>> numbers("1e-3, 0.003", RATES)
    (0.001, 0.003)
    """
    what, such_as = told
    try:
        return tuple(float(piece) for piece in text.split(","))
    except ValueError:
        raise UsageError(f"{what} numbers with commas between them, such as {such_as}: got {text!r}") from None


def new_folder(stem: str, parent: Path = Path("runs")) -> Path:
    """A folder in `parent` that does not exist yet: the stem, or the stem and the first free number."""
    folder, number = parent / stem, 2
    while folder.exists():
        folder, number = parent / f"{stem}-{number}", number + 1
    return folder


def given(**values: Any) -> dict[str, Any]:
    """The values that are not None.

    >>> given(lr=0.1, steps=None)
    {'lr': 0.1}
    """
    return {name: value for name, value in values.items() if value is not None}


def flags_given(command: object, but: tuple[str, ...]) -> str:
    """The flags of a command that the user gave, as the user wrote them, without those in `but`."""
    found = [
        name for name, value in vars(command).items() if value is not None and value is not False and name not in but
    ]
    return ", ".join("CORPUS" if name == "corpus" else f"--{name.replace('_', '-')}" for name in found)


def findable(config: CorpusConfig) -> CorpusConfig:
    """Paths that exist made absolute, so that the run can be resumed from any folder; names as they are."""

    def absolute(path: str | None) -> str | None:
        named = path is None or path in NAMES or is_task(path)
        return path if path is None or named or not Path(path).exists() else str(Path(path).absolute())

    return replace(
        config,
        source=absolute(config.source) or config.source,
        vocabulary_files=absolute(config.vocabulary_files),
        data_dir=absolute(config.data_dir),
    )


def command_line() -> tuple[str, ...]:
    """The command as it can be typed again anywhere: without the place where the program lies."""
    return ("qkflow", *sys.argv[1:])
