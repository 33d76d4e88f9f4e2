"""Parse the command line with tyro. Its errors, which are boxes of many lines, become one line."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tyro

from qkflow.errors import UsageError, unknown

_RULE = re.compile(r"^[─\-╰╯ ]+$")
_SIMILAR = re.compile(r"^ {5,6}(--\S+)")
_NO_MATCH = re.compile(r"Error parsing (--\S+): no type matching (?:\{None\}\|)?(\S+) could be .* from \[(.*?)\]\.")
_WORDS = (
    (_NO_MATCH, r"\1: expected \2, got \3"),
    (re.compile(r"Error parsing (--\S+): "), r"\1: "),
    (re.compile(r"'None', |, 'None'"), ""),
    (re.compile(r"Expected 1 values\."), "Expected 1 value."),
    (re.compile(r" \(required\)"), ""),
)
"""What a user would not say: the class of no value, and its name among the choices."""


def parse_command(args: Sequence[str], commands: Mapping[str, type]) -> Any:
    """The command with its flags. `--help` prints the help and exits with code 0.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Train:
    ...     lr: float | None = None
    >>> parse_command(["train", "--lr", "0.1"], {"train": Train})
    Train(lr=0.1)
    >>> parse_command(["train", "--lr", "fast"], {"train": Train})
    Traceback (most recent call last):
    qkflow.errors.UsageError: --lr: expected FLOAT, got 'fast' (qkflow train --help)
    """
    if args and not args[0].startswith("-") and args[0] not in commands:
        raise unknown("command", args[0], commands)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.extras.subcommand_cli_from_dict(
                dict(commands), prog="qkflow", description="Attention whose queries and keys move.", args=args
            )
    except SystemExit as stopped:
        if not stopped.code:
            raise
        command = f" {args[0]}" if args and args[0] in commands else ""
        raise UsageError(f"{_message(errors.getvalue())} (qkflow{command} --help)") from None


def _message(box: str) -> str:
    """The message of a box in one line: its first part, and the names of similar flags.

    >>> _message("╭─ Missing ─╮\\n│ No value  │\\n│ for --lr. │\\n│ ───────── │\\n│ More      │\\n╰───────────╯")
    'No value for --lr.'
    """
    lines = [line.strip("│").rstrip() for line in box.splitlines()][1:]  # without the title
    body = lines[1:] if lines and _RULE.match(lines[0]) else lines  # where the terminal has ASCII only
    end = next((number for number, line in enumerate(body) if _RULE.match(line)), len(body))
    text = " ".join(line.strip() for line in body[:end] if line)
    for pattern, replacement in _WORDS:
        text = pattern.sub(replacement, text)
    similar = dict.fromkeys(match[1] for line in body[end:] if (match := _SIMILAR.match(line)))
    if similar and "Perhaps you meant" in box:
        text = f"{text}; did you mean {' or '.join(similar)}?"
    return text.partition(" Got errors:")[0]
