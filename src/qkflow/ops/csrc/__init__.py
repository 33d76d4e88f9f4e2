"""Kernels in C for CPUs, built in seconds where they are first needed, and called by pointer.

Nobody has to have a compiler: without one `ready()` is False, callers use torch's own operations, and one warning says
so. A library is kept in the cache under a name that tells its source, its compiler and its processor; QKFLOW_NATIVE=0
does without, and without a word.
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import platform
import shutil
import subprocess
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from qkflow import io
from qkflow.errors import UsageError

_SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fPIC", "-std=gnu11")
if platform.machine().lower() in ("x86_64", "amd64"):
    _FLAGS += ("-mprefer-vector-width=512",)  # where there are such: compilers hesitate for what else a chip may run
# not -ffast-math: a library linked with it changes how the whole process treats tiny numbers
_SECONDS = 120
"""How long a build may take."""
_OFF = "QKFLOW_NATIVE is 0"


@dataclass(frozen=True, kw_only=True)
class Build:
    """The library that holds the kernels, and how it came about."""

    library: Path
    """Its file."""
    compiler: str
    """What the compiler calls itself."""
    seconds: float | None
    """What building it took; None where it was there already."""


_kernels: ctypes.CDLL | None = None
_build: Build | None = None
_fault: str | None = "not tried yet"


def prepare() -> None:
    """Load the kernels, and build them if need be; done once in a process, and never while a graph is traced."""
    global _kernels, _build, _fault
    if _fault == "not tried yet":
        _kernels, _build, _fault = _attempt()
        told = multiprocessing.parent_process() is not None  # a study's runs would repeat what it has said itself
        if _fault is not None and _fault != _OFF and not told:
            warnings.warn(
                f"no kernels in C: {_fault}; plain torch serves instead, and is slower (QKFLOW_NATIVE=0 silences this)",
                RuntimeWarning,
                stacklevel=3,
            )


def ready() -> bool:
    """Whether `prepare` found the kernels."""
    return _kernels is not None


def library() -> ctypes.CDLL:
    """The kernels; ask whether they are `ready` first."""
    if _kernels is None:
        raise UsageError(f"there are no native kernels: {_fault}")
    return _kernels


def fault() -> str | None:
    """Why there are no kernels; None where there are."""
    prepare()
    return _fault


def build() -> Build | None:
    """How the kernels came about; None where there are none."""
    prepare()
    return _build


def threaded() -> bool:
    """Whether the kernels can use more than one thread: whether their compiler had OpenMP."""
    return hasattr(library(), "omp_get_max_threads")


def _attempt() -> tuple[ctypes.CDLL | None, Build | None, str | None]:
    if os.environ.get("QKFLOW_NATIVE") == "0":
        return None, None, _OFF
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if compiler is None:
        return None, None, "there is no C compiler (cc, gcc or clang)"
    try:
        made = _built(compiler)
        return ctypes.CDLL(str(made.library)), made, None
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines() or ["no message"]
        return None, None, f"{compiler} cannot build the kernels ({lines[0]})"
    except (OSError, UsageError, subprocess.SubprocessError) as error:
        return None, None, f"the kernels cannot be built or loaded ({error})"


def _built(compiler: str) -> Build:
    """The library, built unless it was before; whoever builds at the same time builds the same."""
    version = _run(compiler, "--version")
    what = (*(source.read_text() for source in _SOURCES), version, " ".join(_FLAGS), platform.machine(), _features())
    path = io.cache_folder() / "native" / f"{hashlib.sha256(repr(what).encode()).hexdigest()[:32]}.so"
    seconds = None
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        io.replace(path, lambda temporary: _compile(compiler, temporary))
        seconds = time.monotonic() - began
    return Build(library=path, compiler=(version.splitlines() or [compiler])[0], seconds=seconds)


def _compile(compiler: str, path: Path) -> None:
    parts = {
        path.with_name(f"{path.name}.{source.stem}.{real}.o"): (f"-DREAL={real}", "-c", str(source))
        for source in _SOURCES
        if source.suffix == ".c"
        for real in ("float", "double")
    }
    try:
        for threads in (("-fopenmp",), ()):  # a compiler without OpenMP makes kernels of one thread
            try:
                with ThreadPoolExecutor(2) as pool:
                    made = [
                        pool.submit(_run, compiler, *_FLAGS, *threads, *what, "-o", str(part))
                        for part, what in parts.items()
                    ]
                for one in made:
                    one.result()
                _run(compiler, "-shared", *threads, *map(str, parts), "-lm", "-o", str(path))
            except subprocess.CalledProcessError:
                if not threads:
                    raise
            else:
                return
    finally:
        for part in parts:
            part.unlink(missing_ok=True)


def _run(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
    return done.stdout


def _features() -> str:
    """What the processor can do, as far as the system tells: a cache may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
