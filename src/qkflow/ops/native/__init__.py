"""Kernels in C for CPUs, built in seconds where they are first needed, and called by pointer.

Nobody has to have a compiler: without one `ready()` is False, and callers use torch's own operations. A library is kept
in the cache under a name that tells its source, its compiler and its processor; QKFLOW_NATIVE=0 does without.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from qkflow import files
from qkflow.errors import UsageError

_SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fPIC", "-std=gnu11")
if platform.machine().lower() in ("x86_64", "amd64"):
    _FLAGS += ("-mprefer-vector-width=512",)  # where there are such: compilers hesitate for what else a chip may run
# not -ffast-math: a library linked with it changes how the whole process treats tiny numbers
_SECONDS = 120
"""How long a build may take."""


_kernels: ctypes.CDLL | None = None
_fault: str | None = "not tried yet"


def prepare() -> None:
    """Load the kernels, and build them if need be; done once in a process, and never while a graph is traced."""
    global _kernels, _fault
    if _fault == "not tried yet":
        _kernels, _fault = _attempt()


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


def _attempt() -> tuple[ctypes.CDLL | None, str | None]:
    if os.environ.get("QKFLOW_NATIVE") == "0":
        return None, "QKFLOW_NATIVE is 0"
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if compiler is None:
        return None, "there is no C compiler (cc, gcc or clang)"
    try:
        return ctypes.CDLL(str(_built(compiler))), None
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines() or ["no message"]
        return None, f"{compiler} cannot build the kernels ({lines[0]})"
    except (OSError, UsageError, subprocess.SubprocessError) as error:
        return None, f"the kernels cannot be built or loaded ({error})"


def _built(compiler: str) -> Path:
    """The library's file, built unless it was before; whoever builds at the same time builds the same."""
    version = _run(compiler, "--version")
    what = (*(source.read_text() for source in _SOURCES), version, " ".join(_FLAGS), platform.machine(), _features())
    path = files.cache_folder() / "native" / f"{hashlib.sha256(repr(what).encode()).hexdigest()[:32]}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, lambda temporary: _build(compiler, temporary))
    return path


def _build(compiler: str, path: Path) -> None:
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
