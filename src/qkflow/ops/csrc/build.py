"""Build, load and call the C kernels.

The kernels are compiled on first use, which takes a few seconds, and cached under a name that depends on the sources,
the compiler and the processor. If there is no C compiler, `is_loaded()` is False, callers fall back to PyTorch
operations, and a single warning gives the reason. Set QKFLOW_NATIVE=0 to disable the kernels without a warning.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from qkflow import io
from qkflow.errors import UsageError

_SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fPIC", "-std=gnu11")
if platform.machine().lower() in ("x86_64", "amd64"):
    _FLAGS += ("-mprefer-vector-width=512",)  # compilers avoid 512-bit vectors by default, even where they are fast
# -ffast-math is left out: a library linked with it changes how the whole process treats denormal numbers
_BUILD_TIMEOUT = 120
"""Seconds that a compiler call may take."""
_DISABLED = "QKFLOW_NATIVE is 0"
_NOT_TRIED = "not tried yet"


@dataclass(frozen=True, kw_only=True)
class BuildInfo:
    """The shared library that holds the kernels."""

    library: Path
    compiler: str
    """First line of the compiler's version."""
    seconds: float | None
    """Build time; None if the library was in the cache."""


_library: ctypes.CDLL | None = None
_build_info: BuildInfo | None = None
_load_error: str | None = _NOT_TRIED


def load() -> None:
    """Load the kernels, compiling them if necessary. Runs once per process; do not call it while tracing a graph."""
    global _library, _build_info, _load_error
    if _load_error == _NOT_TRIED:
        _library, _build_info, _load_error = _try_load()
        is_child = multiprocessing.parent_process() is not None  # the parent has warned already
        if _load_error is not None and _load_error != _DISABLED and not is_child:
            warnings.warn(
                f"no C kernels: {_load_error}; falling back to PyTorch, which is slower"
                " (set QKFLOW_NATIVE=0 to silence this warning)",
                RuntimeWarning,
                stacklevel=3,
            )


def is_loaded() -> bool:
    """Whether `load` succeeded."""
    return _library is not None


def library() -> ctypes.CDLL:
    """The loaded library; raises if `is_loaded()` is False."""
    if _library is None:
        raise UsageError(f"the C kernels are not available: {_load_error}")
    return _library


def load_error() -> str | None:
    """The reason why the kernels are not available; None if they are."""
    load()
    return _load_error


def build_info() -> BuildInfo | None:
    """How the library was built; None if the kernels are not available."""
    load()
    return _build_info


def has_openmp() -> bool:
    """Whether the kernels can use more than one thread."""
    return hasattr(library(), "omp_get_max_threads")


def supports(x: Tensor) -> bool:
    """Whether the kernels are available for a tensor of this device and dtype."""
    if not torch.compiler.is_compiling():
        load()
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and is_loaded()


def call(
    name: str,
    signature: str,
    scalars: Sequence[Any],
    tensors: Sequence[Tensor | None],
    dtype: torch.dtype | None = None,
) -> int:
    """Call a kernel in the given dtype, or that of the first tensor, and return its status code, 0 on success.

    The signature has a letter per scalar: i (int), l (long), d (double) or p (pointer). Tensors follow as pointers to
    contiguous memory, None as a null pointer. Decoding calls this once per layer and token, so it is kept short.
    """
    held = [x if x is None or x.is_contiguous() else x.contiguous() for x in tensors]  # keeps the copies alive
    pointers = [None if x is None else x.data_ptr() for x in held]
    dtype = cast(Tensor, held[0]).dtype if dtype is None else dtype  # the first tensor is never optional
    return _function(name, dtype, signature, len(pointers))(*scalars, *pointers)


_C_TYPES = {"i": ctypes.c_int, "l": ctypes.c_long, "d": ctypes.c_double, "p": ctypes.c_void_p}


@cache
def _function(name: str, dtype: torch.dtype, signature: str, n_pointers: int) -> Any:
    function = getattr(library(), f"{name}_{'float' if dtype == torch.float32 else 'double'}")
    function.argtypes = [_C_TYPES[letter] for letter in signature + "p" * n_pointers]
    return function


def _try_load() -> tuple[ctypes.CDLL | None, BuildInfo | None, str | None]:
    if os.environ.get("QKFLOW_NATIVE") == "0":
        return None, None, _DISABLED
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if compiler is None:
        return None, None, "there is no C compiler (cc, gcc or clang)"
    try:
        info = _build(compiler)
        return ctypes.CDLL(str(info.library)), info, None
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines() or ["no message"]
        return None, None, f"{compiler} cannot build the kernels ({lines[0]})"
    except (OSError, UsageError, subprocess.SubprocessError) as error:
        return None, None, f"the kernels cannot be built or loaded ({error})"


def _build(compiler: str) -> BuildInfo:
    """Compile the library unless it is cached. Concurrent builds write identical files, so they need no lock."""
    version = _run(compiler, "--version")
    key = (*(source.read_text() for source in _SOURCES), version, " ".join(_FLAGS), platform.machine(), _cpu_features())
    path = io.cache_folder() / "native" / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.so"
    seconds = None
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        io.replace(path, lambda temporary: _compile(compiler, temporary))
        seconds = time.monotonic() - start
    return BuildInfo(library=path, compiler=(version.splitlines() or [compiler])[0], seconds=seconds)


def _compile(compiler: str, path: Path) -> None:
    """Compile every source once per dtype and link the objects, with OpenMP if the compiler has it."""
    objects = {
        path.with_name(f"{path.name}.{source.stem}.{real}.o"): (f"-DREAL={real}", "-c", str(source))
        for source in _SOURCES
        if source.suffix == ".c"
        for real in ("float", "double")
    }
    try:
        for openmp in (("-fopenmp",), ()):
            try:
                with ThreadPoolExecutor(2) as pool:
                    jobs = [
                        pool.submit(_run, compiler, *_FLAGS, *openmp, *arguments, "-o", str(target))
                        for target, arguments in objects.items()
                    ]
                for job in jobs:
                    job.result()
                _run(compiler, "-shared", *openmp, *map(str, objects), "-lm", "-o", str(path))
            except subprocess.CalledProcessError:
                if not openmp:
                    raise
            else:
                return
    finally:
        for target in objects:
            target.unlink(missing_ok=True)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_TIMEOUT).stdout


def _cpu_features() -> str:
    """The processor's instruction sets, where the system reports them: machines may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
