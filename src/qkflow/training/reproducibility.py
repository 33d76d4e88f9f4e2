"""What a run sets in the process it runs in, and puts back: threads, random generators, deterministic kernels."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Torch's CPU threads set to `count` inside the block; None leaves them.

    >>> with threads(1):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    if count is not None and count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


@contextlib.contextmanager
def flushed_denormals() -> Iterator[None]:
    """CPU numbers below the smallest normal one count as zero inside the block.

    Sharp attention is full of them, and a processor takes many times as long for each.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """The global generators are put back after the block, and on a GPU the kernels are deterministic inside it."""
    cuda = [device] if device.type == "cuda" else []
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if cuda:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        if cuda:
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """A seed for one step of one run on one of its processes, as good as independent of its neighbours'.

    >>> step_seed(0, 1) != step_seed(1, 0) != step_seed(1, 0, rank=1)
    True
    """
    entropy = (seed, step, rank) if rank else (seed, step)
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
