"""Processes agree on a port, whatever previous starts left in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from qkflow.errors import UsageError
from qkflow.training.distributed import private_store

PATIENCE = timedelta(seconds=20)


def together(store: dist.Store, size: int) -> list[dist.Store]:
    """Return what each of several processes gets; threads stand for processes."""
    with ThreadPoolExecutor(size) as threads:
        met = [threads.submit(private_store, store, rank, size, PATIENCE) for rank in range(size)]
        return [future.result() for future in met]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_processes_get_the_same_store(size: int) -> None:
    stores = together(dist.HashStore(), size)
    stores[0].set("address", "mine")
    assert all(rank_store.check(["address"]) for rank_store in stores)


def test_a_store_of_an_earlier_start_is_never_reused() -> None:
    """The remains of a complete or interrupted start do not affect the next."""
    store = dist.HashStore()
    for rank_store in together(store, 3):
        rank_store.set("address", "of the dead")
    store.set("hello/1", "asked and never answered")
    for _ in range(2):
        stores = together(store, 3)
        assert not any(rank_store.check(["address"]) for rank_store in stores)
        stores[0].set("address", "mine")
        assert all(rank_store.get("address") == b"mine" for rank_store in stores)


def test_a_missing_process_raises_a_timeout_error() -> None:
    with pytest.raises(UsageError, match="2 of 3 processes did not join"):
        private_store(dist.HashStore(), 0, 3, timedelta(seconds=0))
