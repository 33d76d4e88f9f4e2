"""A process that imports torch once and forks a child for each training session. Tests kill the children.

It reads one JSON request per line on stdin and writes one JSON response per line on stdout. Keys of a request:

    folder, config   the run; it is resumed if the folder contains one
    signal           a signal for the child, sent
    after            ... this many seconds after the fork,
    call             ... by the child to itself before its n-th call that changes files, or
    step             ... by the child to itself at the end of this step
    full_from        the disk is full from the n-th such call on
    max_file_bytes   the largest size of a file
    log              write metrics.csv as well
    hold             the child waits in its first step; the response follows immediately, with the `pid` of the child
    release          kill the held_pids child with this pid

Keys of a response: `outcome` ("finished", "killed" or the name of an exception), `message`, `notices`, `seconds`, the
number of `calls`, and `started`, the number of calls before training started.
"""

import errno
import functools
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it: once here instead of once per child

import qkflow.training.tensors
from qkflow.config import from_dict
from qkflow.ops.csrc import build
from qkflow.training import Callback, CSVLogger, Run, TrainConfig, train

CALLS = ("fsync", "rename", "mkdir", "rmdir", "unlink", "open", "ftruncate")
"""The counted functions of `os`. `save_file` of safetensors is counted too; a kill leaves half of its file."""


def fsync(descriptor: int) -> None:
    """Replace `os.fsync`: a process that is killed loses nothing it has written, so no test waits for the disk."""


class Child(Callback):
    def __init__(self, request: dict[str, Any], pipe: int) -> None:
        self.request, self.pipe = request, pipe
        self.calls = self.started = 0
        self.notices: list[str] = []
        os.fsync = fsync
        for name in CALLS:
            setattr(os, name, self.counted(getattr(os, name)))
        save = qkflow.training.tensors.save_file
        qkflow.training.tensors.save_file = self.counted(save, truncate=True)

    def counted(self, call: Callable[..., Any], truncate: bool = False) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted_call(*args: Any, **options: Any) -> Any:
            if call.__name__ == "open" and not args[1] & os.O_CREAT:
                return call(*args, **options)  # opened for reading: nothing changes
            self.calls += 1
            if self.request.get("call") == self.calls:
                if truncate:
                    call(*args, **options)
                    os.truncate(args[1], Path(args[1]).stat().st_size // 2)
                os.kill(os.getpid(), self.request["signal"])
            if 0 < self.request.get("full_from", 0) <= self.calls:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **options)

        return counted_call

    def on_start(self, run: Run) -> None:
        self.started = self.calls

    def on_step(self, record: dict[str, Any]) -> None:
        if self.request.get("hold"):
            self.respond("holding")
            signal.pause()
        if self.request.get("step") == record["step"]:
            os.kill(os.getpid(), self.request["signal"])

    def on_notice(self, text: str) -> None:
        self.notices.append(text)

    def respond(self, outcome: str, message: str = "") -> None:
        response = {"outcome": outcome, "message": message, "notices": self.notices}
        response |= {"calls": self.calls, "started": self.started}
        os.write(self.pipe, json.dumps(response).encode() + b"\n")

    def run(self) -> None:
        folder = Path(self.request["folder"])
        config = from_dict(TrainConfig, self.request["config"])
        if "max_file_bytes" in self.request:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.request["max_file_bytes"],) * 2)
        try:
            callbacks = [self, CSVLogger()] if self.request.get("log") else [self]
            train(config, folder, callbacks=callbacks, resume=(folder / "config.json").exists())
            self.respond("finished")
        except BaseException as error:
            self.respond(type(error).__name__, str(error))


def serve(request: dict[str, Any]) -> dict[str, Any]:
    start = time.monotonic()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # background shells ignore SIGINT
            Child(request, write).run()
        finally:
            os._exit(0)  # also if the signal arrived before or after the session
    os.close(write)
    if "after" in request:
        select.select([read], [], [], request["after"])
        os.kill(pid, request["signal"])  # valid until waitpid, even if the child has exited
    content = b""
    while chunk := os.read(read, 65536):
        content += chunk
        if request.get("hold"):
            break
    os.close(read)
    response = json.loads(content.splitlines()[0]) if content else {"outcome": "killed"}
    if request.get("hold"):
        return {**response, "pid": pid}
    os.waitpid(pid, 0)
    return {**response, "seconds": time.monotonic() - start}


def release(pid: int) -> dict[str, Any]:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return {"outcome": "released"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    build.load()
    held_pids: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        response = release(request["release"]) if "release" in request else serve(request)
        held_pids = held_pids | {response["pid"]} if "pid" in response else held_pids - {request.get("release", 0)}
        sys.stdout.write(json.dumps(response) + "\n")
        sys.stdout.flush()
    for pid in held_pids:
        release(pid)
