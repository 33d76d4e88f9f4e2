"""From what the user wrote to a source of text, or to the nearest name that exists."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from qkflow.data.recall.spec import TASKS
from qkflow.data.text import builtin, hub
from qkflow.data.text.config import CorpusConfig
from qkflow.data.text.sources import STDLIB, Source, from_path, standard_library
from qkflow.errors import UsageError, unknown

NAMES = (STDLIB, *builtin.NAMES, *TASKS)
"""Corpora that are known by name; recall tasks also take options, as in `mqar:pairs=4+8`."""


def find_source(config: CorpusConfig) -> Source:
    """The source of text that `config.source` names: a known name, `hf:NAME`, a file or a folder.

    >>> find_source(CorpusConfig(source="python-stdlib")).name
    'python-stdlib'
    """
    if config.source == STDLIB:
        return standard_library()
    if config.source in builtin.NAMES:
        return builtin.named(config)
    if config.source.startswith("hf:"):
        return hub.dataset(config.source.removeprefix("hf:"), config.field)
    path = Path(config.source).expanduser()
    if config.source and path.exists():
        return from_path(path, config.field)
    raise _missing(config.source, path)


def _missing(source: str, path: Path) -> UsageError:
    if not path.suffix and len(path.parts) <= 1:
        name, _, options = source.partition(":")
        wrong = unknown("corpus", name if "=" in options else source, NAMES)
        return UsageError(f"{wrong}, hf:NAME; and no file or folder here has that name")
    siblings = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, siblings, n=1)
    hint = f"did you mean {str(path.parent / near[0])!r}?" if near else f"give a path, or one of {', '.join(NAMES)}"
    return UsageError(f"no file or folder {source!r}: {hint}")
