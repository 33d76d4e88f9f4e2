"""A Ray cluster: one task per call, scheduled and retried by Ray. Study folders must be on shared storage."""

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
from qkflow.experiment.executors.base import CallResult, Resources, describe_error, forwarded_environment

_TICK = 0.5
_RETRIES = 3


class RayExecutor:
    """Runs calls on the Ray cluster at `address` or RAY_ADDRESS, or else on a new one on this machine."""

    lock_timeout = 60.0

    def __init__(self, address: str | None = None) -> None:
        self._address = address or os.environ.get("RAY_ADDRESS") or "local"
        self._owns_cluster = self._stopped = False
        self._running: dict[Any, int] = {}

    def __enter__(self) -> RayExecutor:
        """Connect, or start a cluster."""
        if self._address == "local":  # read on import: a local cluster listens on loopback only
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        try:
            import ray
            import ray.exceptions
        except ImportError as error:
            raise UsageError("--executor ray needs Ray, which is not installed: pip install 'qkflow[ray]'") from error
        self._ray = ray
        if ray.is_initialized():
            return self
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about future versions of Ray
                ray.init(address=self._address, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UsageError(
                f"cannot connect to a Ray cluster at {self._address!r} ({describe_error(error)})"
            ) from error
        self._owns_cluster = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the running tasks and, if this executor connected, disconnect."""
        for reference in self._running:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.cancel(reference, force=True)
        self._running.clear()
        if self._owns_cluster:
            self._owns_cluster = False
            self._ray.shutdown()

    def cores(self) -> tuple[int, ...]:
        """CPUs of each node."""
        return tuple(int(node["Resources"].get("CPU", 0)) for node in self._nodes())

    def run(
        self, function: Callable[[Any], Any], arguments: Sequence[Any], *, workers: int, resources: Resources
    ) -> Iterator[CallResult | None]:
        """See `Executor.run`. Ray restarts a task whose worker or node dies."""
        ray = self._ray
        self._refuse_unavailable(resources)
        # One call per process, so that its peak memory is that of one run.
        task = ray.remote(num_cpus=resources.threads, num_gpus=resources.gpus, max_retries=_RETRIES, max_calls=1)(_call)
        waiting = list(enumerate(arguments))
        while waiting or self._running:
            while waiting and len(self._running) < workers and not self._stopped:
                index, argument = waiting.pop(0)
                self._running[task.remote(forwarded_environment(), function, argument)] = index
            if not self._running:
                return
            ready, _ = ray.wait(list(self._running), timeout=_TICK)
            if not ready:
                yield None
            for reference in ready:
                yield self._collect(reference)

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _refuse_unavailable(self, resources: Resources) -> None:
        """Refuse what no node can run: Ray would wait forever."""
        wanted = {"CPU": resources.threads, "GPU": resources.gpus}
        nodes = [node["Resources"] for node in self._nodes()]
        if not any(all(node.get(name, 0) >= number for name, number in wanted.items()) for node in nodes):
            raise UsageError(
                f"no node of the Ray cluster has the {resources.threads} CPUs and {resources.gpus} GPUs that a run "
                "needs: use fewer --threads, another --device, or a larger node"
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
            return CallResult(index=index, crash=describe_error(error.cause))
        except self._ray.exceptions.RayError as error:
            return CallResult(index=index, crash=describe_error(error))


def _call(environment: Mapping[str, str], function: Callable[[Any], Any], argument: Any) -> Any:
    """The body of a task."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job; Ray cancels with SIGINT
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    return function(argument)
