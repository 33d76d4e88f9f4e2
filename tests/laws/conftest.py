"""Shape checks take most of the time of a law, so only some laws run with them."""

from __future__ import annotations

from collections.abc import Iterator

import jaxtyping
import pytest

SHAPE_CHECKED = {"splitting", "packing", "states", "attention_map"}
"""Between them, these laws call every method of a mechanism with every rank."""


@pytest.fixture(autouse=True)
def shape_checks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Disable jaxtyping's checks, if they are on, unless the test is about one of the laws above."""
    callspec = getattr(request.node, "callspec", None)
    before = jaxtyping.config.jaxtyping_disable
    if callspec is None or callspec.params.get("law") not in SHAPE_CHECKED:
        jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
