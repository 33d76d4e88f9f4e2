"""Files of JSON and of lines of JSON, plain or compressed: what is not what it should be is one clear error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qkflow.data.text import reading
from qkflow.data.text.reading import Entry
from qkflow.errors import UsageError


def files(path: Path, end: str) -> list[Path]:
    """The files right under a folder whose names end so, whatever compression is around them, or the file itself."""
    if not path.is_dir():
        return [path]
    with reading.readable(str(path)):
        return sorted(one for one in path.iterdir() if one.is_file() and reading.ending(one.name) == end)


def document(path: Path, expected: str) -> dict[str, Any]:
    """The object that a file of JSON holds; `expected` says in an error what belongs there."""
    text = b"".join(reading.blocks(entry(path)))
    if not text.strip():
        raise UsageError(f"{path} is empty: expected {expected}")
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(str(path), error, expected) from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds a {type(found).__name__}, not an object: expected {expected}")
    return found


def rows(entry: Entry, expected: str) -> Iterator[dict[str, Any]]:
    """The objects of a file with one on each line; empty lines are passed over."""
    for number, line in enumerate(b"".join(reading.blocks(entry)).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _not_json(f"{entry.shown}, line {number},", error, expected) from None
        if not isinstance(found, dict):
            raise UsageError(f"{entry.shown}, line {number}, is not an object: expected {expected}")
        yield found


def entry(path: Path) -> Entry:
    """A file as something to read."""
    return Entry(label=reading.bare(path.name), shown=str(path), open=reading.opener(path))


def _not_json(shown: str, error: Exception, expected: str) -> UsageError:
    """Name the place, never the text: a post full of slurs must not end up in a message."""
    if isinstance(error, json.JSONDecodeError):
        what = f"{error.msg} at line {error.lineno}, column {error.colno}"
    else:
        what = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "nested too deeply"
    return UsageError(f"{shown} is not JSON ({what}): expected {expected}")
