"""One torch thread a worker, no randomness from outside, and the comparisons that several tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Every test begins at the same point of torch's global stream, and leaves it as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
