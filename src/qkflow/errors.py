"""The exceptions a user can meet. Each message says what was got, what was expected, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UsageError(ValueError):
    """Something the user gave cannot be used: the command line prints it on one line and leaves with code 2."""


class CheckpointError(UsageError):
    """A checkpoint is torn, altered, of another format, or not a checkpoint at all."""


class BusyError(UsageError):
    """Another process holds the lock of this run folder."""


class DiskError(OSError):
    """A file could not be written; whatever was there before is still there."""


class NotFiniteError(UsageError, ArithmeticError):
    """Something that has to be finite is not: a user's mistake, or, in a model's own pass, a sign that it diverged."""


class DivergenceError(ArithmeticError):
    """Training met a loss or gradient that is not finite."""


class Interrupted(Exception):
    """Training was asked to stop (Ctrl-C or SIGTERM), wrote a checkpoint and left."""

    signal: int = 2
    """The signal that asked."""


def unknown(kind: str, got: object, known: Iterable[str]) -> UsageError:
    """An error for a name that does not exist, with the nearest one that does.

    >>> str(unknown("mechanism", "standart", ["standard", "differential"]))
    "unknown mechanism 'standart': did you mean 'standard'? Known: differential, standard"
    """
    names = sorted(known)
    near = get_close_matches(str(got), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(f"unknown {kind} {got!r}: {hint}Known: {', '.join(names)}")
