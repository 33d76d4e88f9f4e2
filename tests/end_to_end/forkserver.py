"""A process that imports torch once and forks a child for each training session it is asked for, to be killed at will.

One JSON order a line on stdin, one JSON answer a line on stdout. An order:

    folder, config   the run; it is resumed if the folder holds one
    signal           what to send the child (a number)
    after            ... so many seconds after the fork
    call             ... by the child to itself, just before its n-th call that changes files
    step             ... by the child to itself, at the end of this step
    full             the disk is full from the n-th such call on
    room             no file may grow beyond so many bytes
    hold             the child stays inside its first step; the answer comes at once, with its `pid`, for:
    release          kill that child

An answer: `outcome` ("finished", "killed" or the name of an exception), `message`, `notices`, `seconds`, and the
`calls` that were made, of which `started` came before training began.
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
import torch._dynamo  # an optimiser imports it: once here, instead of once a child

import qkflow.training.tensors
from qkflow.config import from_dict
from qkflow.training import Callback, Run, TrainConfig, train

CALLS = ("fsync", "rename", "mkdir", "rmdir", "unlink", "open", "ftruncate")
"""What is counted of `os`; safetensors' own writing is counted too, and torn half way."""


class Child(Callback):
    def __init__(self, order: dict[str, Any], answer: int) -> None:
        self.order, self.pipe = order, answer
        self.calls = self.started = 0
        self.notices: list[str] = []
        for name in CALLS:
            setattr(os, name, self.counted(getattr(os, name)))
        save = qkflow.training.tensors.save_file
        qkflow.training.tensors.save_file = self.counted(save, tear=True)

    def counted(self, call: Callable[..., Any], tear: bool = False) -> Callable[..., Any]:
        @functools.wraps(call)
        def counting(*args: Any, **options: Any) -> Any:
            if call.__name__ == "open" and not args[1] & os.O_CREAT:
                return call(*args, **options)  # to read, or to sync what is there: nothing changes
            self.calls += 1
            if self.order.get("call") == self.calls:
                if tear:
                    call(*args, **options)
                    os.truncate(args[1], Path(args[1]).stat().st_size // 2)
                os.kill(os.getpid(), self.order["signal"])
            if 0 < self.order.get("full", 0) <= self.calls:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **options)

        return counting

    def on_start(self, run: Run) -> None:
        self.started = self.calls

    def on_step(self, record: dict[str, Any]) -> None:
        if self.order.get("hold"):
            self.answer("holding")
            signal.pause()
        if self.order.get("step") == record["step"]:
            os.kill(os.getpid(), self.order["signal"])

    def on_notice(self, text: str) -> None:
        self.notices.append(text)

    def answer(self, outcome: str, message: str = "") -> None:
        line = {"outcome": outcome, "message": message, "notices": self.notices}
        line |= {"calls": self.calls, "started": self.started}
        os.write(self.pipe, json.dumps(line).encode() + b"\n")

    def run(self) -> None:
        folder = Path(self.order["folder"])
        config = from_dict(TrainConfig, self.order["config"])
        if "room" in self.order:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.order["room"], self.order["room"]))
        try:
            train(config, folder, callbacks=[self], resume=(folder / "config.json").exists())
            self.answer("finished")
        except BaseException as error:
            self.answer(type(error).__name__, str(error))


def serve(order: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell that started the tests did
            Child(order, write).run()
        finally:
            os._exit(0)  # also when the signal came too early or too late to be answered
    os.close(write)
    if "after" in order:
        select.select([read], [], [], order["after"])
        os.kill(pid, order["signal"])  # the child is not waited for yet, so the number is still its own
    content = b""
    while piece := os.read(read, 65536):
        content += piece
        if order.get("hold"):
            break
    os.close(read)
    answer = json.loads(content.splitlines()[0]) if content else {"outcome": "killed"}
    if order.get("hold"):
        return {**answer, "pid": pid}
    os.waitpid(pid, 0)
    return {**answer, "seconds": time.monotonic() - began}


def release(pid: int) -> dict[str, Any]:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return {"outcome": "released"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    held: set[int] = set()
    for line in sys.stdin:
        order = json.loads(line)
        answer = release(order["release"]) if "release" in order else serve(order)
        held = held | {answer["pid"]} if "pid" in answer else held - {order.get("release", 0)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for pid in held:
        release(pid)
