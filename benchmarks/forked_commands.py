"""Run `qkflow` commands in forked children of a process that has imported it, with limits, as a user would see them."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # optimizers import it: once here instead of once per child

import qkflow
from qkflow.cli import main
from qkflow.ops.csrc import build

SECONDS = 60.0
"""Time limit of a command."""
GRACE = 20.0
"""Seconds in which a command must end after Ctrl-C."""
MEMORY = 4 << 30
"""Bytes that a command may allocate in addition to the imported libraries."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a command ended."""

    code: int
    """Exit code; minus the number of the signal that killed it."""
    out: str
    err: str
    seconds: float
    was_interrupted: bool
    """Whether the time limit was reached, so that Ctrl-C was sent."""
    busy_seconds: float
    """Time that it and its processes used or waited for a core, up to the time limit; 0 if it ended earlier."""

    def problems(self) -> list[str]:
        """What no command may do: crash, hang, show a traceback or control characters, or have another exit code."""
        text = self.out + self.err
        problems = []
        if self.code < 0:
            problems.append(f"killed by signal {-self.code}" + (" after Ctrl-C" if self.was_interrupted else ""))
        elif self.code not in (0, 1, 2) and not (self.was_interrupted and self.code == 128 + signal.SIGINT):
            problems.append(f"exit code {self.code}")
        if "Traceback (most recent call last)" in text:
            problems.append("traceback")
        if _CONTROL.search(self.err) or (self.code and _CONTROL.search(self.out)):
            problems.append("control characters")
        if self.code == 2 and not self.err.strip():
            problems.append("no error message")
        if "qkflow: " in self.err and self.err.count("\n") != 1 + self.err.count("\nnote: ") + self.err.startswith(
            "note: "
        ):
            problems.append("more than one line")
        return problems


def prepare() -> None:
    """Import and load in this process what commands need, and take one thread: children are then forked quickly."""
    torch.set_num_threads(1)
    build.load()
    for package in ("cli", "data", "experiment", "hub", "judge", "probes", "report", "training"):
        for module in pkgutil.walk_packages([str(Path(qkflow.__file__).parent / package)], f"qkflow.{package}."):
            if "ray" not in module.name:
                importlib.import_module(module.name)
    os.environ.update(COLUMNS="80", OMP_NUM_THREADS="1")
    os.environ.pop("QKFLOW_DATA", None)


def run(args: Sequence[str], folder: Path, *, seconds: float = SECONDS) -> Outcome:
    """Run a command in a folder. At the time limit it gets Ctrl-C, and SIGKILL if it does not end."""
    begin = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = start(args, folder, out.fileno(), err.fileno())
        status, was_interrupted, busy = _wait(pid, seconds), False, 0.0
        if status is None:
            was_interrupted, busy = True, busy_seconds(pid)
            os.kill(pid, signal.SIGINT)
            status = _wait(pid, GRACE)
        if status is None:
            os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="surrogateescape"))
    return Outcome(
        code=os.waitstatus_to_exitcode(status),
        out=texts[0],
        err=texts[1],
        seconds=time.monotonic() - begin,
        was_interrupted=was_interrupted,
        busy_seconds=busy,
    )


def busy_seconds(pid: int) -> float:
    """The time that a running process and its descendants, also in other sessions, have used or waited for a core."""
    parents, ticks = dict[int, int](), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            fields = path.read_text(errors="replace").rpartition(")")[2].split()  # from the third field on
            process = int(path.parent.name)
            parents[process], ticks[process] = int(fields[1]), sum(map(int, fields[11:15]))
    family = {pid}
    while more := {process for process, parent in parents.items() if parent in family} - family:
        family |= more
    used = sum(ticks.get(process, 0) for process in family) / os.sysconf("SC_CLK_TCK")
    return used + sum(map(_seconds_without_core, family))


def _seconds_without_core(pid: int) -> float:
    """The time that the threads of a process could have run, but all cores were busy."""
    seconds = 0.0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has ended
            seconds += int(path.read_text().split()[1]) / 1e9
    return seconds


def start(args: Sequence[str], folder: Path, out: int, err: int) -> int:
    """Start a command in a folder, with its output in two open files. Returns its process id."""
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        _child(args, folder, out, err)
    return pid


def _wait(pid: int, seconds: float) -> int | None:
    """The status of a child, or None if it has not ended in time."""
    end, pause = time.monotonic() + seconds, 0.001
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    return None


def _child(args: Sequence[str], folder: Path, out: int, err: int) -> None:
    """Run the command as `python -m qkflow` does, and end the process."""
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (out, 1), (err, 2)):
            os.dup2(source, target)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["qkflow", *args]
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
