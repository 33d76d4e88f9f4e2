"""The terminal: control characters are escaped, and characters that its encoding lacks are replaced."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console as RichConsole
from rich.segment import Segment

from qkflow.formatting import escape_unprintable


class Console(RichConsole):
    """A rich console that escapes control characters, which file names and configs may contain, and has no emoji codes.

    rich replaces text such as `:warning:` otherwise, also in JSON.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"emoji": False, **options})

    def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
        """Render as rich does, with the text escaped."""
        for segment in super().render(*args, **options):
            if segment.control or segment.text == "\n" or segment.text.isprintable():
                yield segment
            else:
                lines = map(escape_unprintable, segment.text.split("\n"))
                yield Segment("\n".join(lines), segment.style)


def replace_unencodable() -> None:
    """Let the standard streams print `?` for characters that their encoding lacks, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
