"""docs/dependencies.md lists every dependency in pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_dependency_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    names = {re.split(r"[><=; \[]", requirement)[0] for requirement in requirements}
    page = (ROOT / "docs/dependencies.md").read_text()
    missing = {name for name in names if f"`{name}`" not in page}
    assert not missing, f"not in docs/dependencies.md: {sorted(missing)}"
