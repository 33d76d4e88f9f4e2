"""A Ray cluster: one task a call, scheduled, queued and retried by Ray. Folders must be where every node sees them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from qkflow.errors import UsageError
from qkflow.experiment.executors.base import CallResult, Resources, surroundings
from qkflow.experiment.worker import described

_TICK = 0.5
_RETRIES = 3


class RayExecutor:
    """Runs calls on a Ray cluster: the one at `address` or in RAY_ADDRESS, or else one of its own on this machine."""

    patience = 60.0

    def __init__(self, address: str | None = None) -> None:
        self._address = address or os.environ.get("RAY_ADDRESS") or "local"
        self._ours = self._stopped = False
        self._running: dict[Any, int] = {}

    def __enter__(self) -> RayExecutor:
        """Connect, or start a cluster."""
        if self._address == "local":  # read when ray is imported: a cluster of our own listens on loopback only
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        try:
            import ray
            import ray.exceptions
        except ImportError as error:
            raise UsageError("the engine ray needs Ray, which is not installed: pip install 'qkflow[ray]'") from error
        self._ray = ray
        if ray.is_initialized():
            return self
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # on what later versions of Ray will do
                ray.init(address=self._address, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UsageError(f"no Ray cluster answers at {self._address!r} ({described(error)})") from error
        self._ours = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what still runs, and disconnect, or end the cluster, if it was us who connected."""
        for reference in self._running:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.cancel(reference, force=True)
        self._running.clear()
        if self._ours:
            self._ours = False
            self._ray.shutdown()

    def cores(self) -> tuple[int, ...]:
        """CPUs of each node."""
        return tuple(int(node["Resources"].get("CPU", 0)) for node in self._nodes())

    def work(
        self, function: Callable[[Any], Any], arguments: Sequence[Any], *, at_once: int, need: Resources
    ) -> Iterator[CallResult | None]:
        """See `Executor.work`. A task whose worker or node dies is begun again by Ray."""
        ray = self._ray
        self._refuse_unmet(need)
        # A process serves one call only: what memory a run takes is told by its process.
        task = ray.remote(num_cpus=need.threads, num_gpus=need.gpus, max_retries=_RETRIES, max_calls=1)(_call)
        waiting = list(enumerate(arguments))
        while waiting or self._running:
            while waiting and len(self._running) < at_once and not self._stopped:
                index, argument = waiting.pop(0)
                self._running[task.remote(surroundings(), function, argument)] = index
            if not self._running:
                return
            ready, _ = ray.wait(list(self._running), timeout=_TICK)
            if not ready:
                yield None
            for reference in ready:
                yield self._collect(reference)

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _refuse_unmet(self, need: Resources) -> None:
        """Refuse what no node could ever run: Ray would wait for such a node to come."""
        wanted = {"CPU": need.threads, "GPU": need.gpus}
        resources = [node["Resources"] for node in self._nodes()]
        if not any(all(there.get(name, 0) >= number for name, number in wanted.items()) for there in resources):
            raise UsageError(
                f"no node of the Ray cluster has the {need.threads} CPUs and {need.gpus} GPUs that a run needs: "
                "give fewer --threads, another --device, or a larger node"
            )

    def stop(self) -> None:
        """Interrupt every task, once."""
        if not self._stopped:
            self._stopped = True
            for reference in self._running:
                self._ray.cancel(reference, force=False)

    def _collect(self, reference: Any) -> CallResult:
        index = self._running.pop(reference)
        try:
            return CallResult(index=index, value=self._ray.get(reference))
        except self._ray.exceptions.RayTaskError as error:
            return CallResult(index=index, crash=described(error.cause))
        except self._ray.exceptions.RayError as error:
            return CallResult(index=index, crash=described(error))


def _call(environment: Mapping[str, str], function: Callable[[Any], Any], argument: Any) -> Any:
    """What a task does."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job; Ray asks to stop by it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    return function(argument)
