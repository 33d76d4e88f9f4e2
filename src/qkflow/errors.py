"""The exceptions that qkflow raises. Each message says what happened, what was expected, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches


class UsageError(ValueError):
    """Invalid input from the user. The command line prints it on one line and exits with code 2."""


class CheckpointError(UsageError):
    """A checkpoint is truncated, modified, of another format, or not a checkpoint."""


class BusyError(UsageError):
    """Another process holds the lock of a run folder."""


class DiskError(OSError):
    """A file could not be written. The previous content of the file is unchanged."""


class NotFiniteError(UsageError, ArithmeticError):
    """A value that must be finite is not: invalid input, or a model that diverged."""


class DivergenceError(ArithmeticError):
    """The loss or a gradient became non-finite during training."""


class Interrupted(Exception):
    """Training received Ctrl-C or SIGTERM, saved a checkpoint and stopped."""

    signal: int = 2
    """Number of the received signal."""


def unknown(kind: str, got: object, known: Iterable[str], *, where: str = "") -> UsageError:
    """Return an error for an unknown name, with the most similar known name.

    >>> str(unknown("mechanism", "standart", ["standard", "differential"]))
    "unknown mechanism 'standart': did you mean 'standard'? Known: differential, standard"
    """
    names = sorted(known)
    similar = get_close_matches(str(got), names, n=1, cutoff=0.5)
    hint = f"did you mean {similar[0]!r}? " if similar else ""
    return UsageError(f"unknown {kind} {got!r}{where}: {hint}Known: {', '.join(names)}")


def short_repr(value: object, length: int = 60) -> str:
    """`repr(value)`, cut to `length` characters.

    >>> short_repr(10**9, length=4)
    '1000...'
    """
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}..."


def out_of_memory(error: BaseException) -> str | None:
    """The bytes that could not be allocated, in parentheses if they are known; None for any other error.

    >>> out_of_memory(RuntimeError("can't allocate memory: you tried to allocate 4000000000000 bytes"))
    ' (tried to allocate 4,000,000,000,000 bytes)'
    >>> out_of_memory(RuntimeError("shapes do not match"))
    """
    text = str(error)
    if size := re.search(r"allocate (\d+) bytes", text):
        return f" (tried to allocate {int(size[1]):,} bytes)"
    is_memory = isinstance(error, MemoryError) or re.search("out of memory|allocate memory|size calculation over", text)
    return "" if is_memory else None
