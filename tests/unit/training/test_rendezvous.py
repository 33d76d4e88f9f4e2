"""Processes that find each other, whatever those before them have left in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from qkflow.errors import UsageError
from qkflow.training.distributed import private_store

PATIENCE = timedelta(seconds=20)


def together(store: dist.Store, size: int) -> list[dist.Store]:
    """What each of so many processes gets, where threads stand for them."""
    with ThreadPoolExecutor(size) as threads:
        met = [threads.submit(private_store, store, rank, size, PATIENCE) for rank in range(size)]
        return [one.result() for one in met]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_processes_get_the_same_store(size: int) -> None:
    places = together(dist.HashStore(), size)
    places[0].set("address", "mine")
    assert all(place.check(["address"]) for place in places)


def test_a_store_of_an_earlier_start_is_never_reused() -> None:
    """What a start leaves behind, whole or broken off anywhere, is not seen by the next."""
    store = dist.HashStore()
    for place in together(store, 3):
        place.set("address", "of the dead")
    store.set("hello/1", "asked and never answered")
    for _ in range(2):
        places = together(store, 3)
        assert not any(place.check(["address"]) for place in places)
        places[0].set("address", "mine")
        assert all(place.get("address") == b"mine" for place in places)


def test_a_missing_process_raises_a_timeout_error() -> None:
    with pytest.raises(UsageError, match="2 of 3 processes did not join"):
        private_store(dist.HashStore(), 0, 3, timedelta(seconds=0))
