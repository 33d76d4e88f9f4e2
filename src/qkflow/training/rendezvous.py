"""Where processes that torchrun has started find each other: under a name that no earlier start has used.

torchrun keeps one store over all its restarts, and in it the addresses of processes that are gone. Whoever reads one of
those waits for nobody (https://github.com/pytorch/pytorch/issues/135712). The number of restarts does not tell them
apart, since every machine counts its own. So the first process makes up a name, and the others ask for it:

    r -> hello/r            a number n that r has just made up
    0 -> welcome/r/n        the name: whoever can answer to n is not of an earlier start
    r -> here/name/r        r knows the name: neither is r
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

from qkflow.errors import UsageError

_PAUSE = 0.02


def meet(store: Store, rank: int, size: int, patience: timedelta) -> Store:
    """A part of the store that only these `size` processes know; it returns when all of them do.

    >>> from torch.distributed import HashStore
    >>> store = HashStore()
    >>> meet(store, 0, 1, timedelta(seconds=1)).set("a", "b")
    >>> store.check(["a"])
    False
    """
    name = _ask(store, rank, patience) if rank else _answer(store, size, patience)
    return PrefixStore(name, store)


def _ask(store: Store, rank: int, patience: timedelta) -> str:
    number = uuid.uuid4().hex
    store.set(f"hello/{rank}", number)
    store.wait([f"welcome/{rank}/{number}"], patience)
    name = store.get(f"welcome/{rank}/{number}").decode()
    store.set(f"here/{name}/{rank}", "")
    return name


def _answer(store: Store, size: int, patience: timedelta) -> str:
    name, until = uuid.uuid4().hex, time.monotonic() + patience.total_seconds()
    missing, answered = set(range(1, size)), set[str]()
    while missing:
        for rank in sorted(missing):
            if store.check([f"here/{name}/{rank}"]):
                missing.remove(rank)
            elif store.check([f"hello/{rank}"]):
                number = store.get(f"hello/{rank}").decode()
                if number not in answered:
                    store.set(f"welcome/{rank}/{number}", name)
                    answered.add(number)
        if missing and time.monotonic() > until:
            raise UsageError(
                f"waited {patience} for {len(missing)} of {size} processes that did not come (the first is "
                f"{min(missing)}): see what they said, and that all machines run the same command"
            )
        time.sleep(_PAUSE if missing else 0)
    return name
