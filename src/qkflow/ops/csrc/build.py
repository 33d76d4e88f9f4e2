"""Build, load and call the C kernels.

The kernels are compiled on first use, which takes a few seconds, and cached (`library_cache.py`) under a name that
depends on the sources, the compiler and the processor. If the cache cannot be private to the user, they are compiled in
a temporary directory in every process, with a warning. If there is no C compiler, `is_loaded()` is False, callers fall
back to PyTorch operations, and a single warning gives the reason. Set QKFLOW_NATIVE=0 to disable the kernels without a
warning.
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import platform
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from qkflow import io
from qkflow.errors import UsageError
from qkflow.ops.csrc.library_cache import LibraryCache, loadable

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
    cache_error: str | None = None
    """The reason why the library could not be cached; None if it could."""


_library: ctypes.CDLL | None = None
_build_info: BuildInfo | None = None
_load_error: str | None = _NOT_TRIED


def load() -> None:
    """Load the kernels, compiling them if necessary. Runs once per process; do not call it while tracing a graph."""
    global _library, _build_info, _load_error
    if _load_error == _NOT_TRIED:
        _library, _build_info, _load_error = _try_load()
        if _load_error is not None and _load_error != _DISABLED:
            _warn(
                f"no C kernels: {_load_error}; falling back to PyTorch, which is slower"
                " (set QKFLOW_NATIVE=0 to silence this warning)"
            )
        elif _build_info is not None and _build_info.cache_error is not None:
            _warn(
                f"the C kernels cannot be cached: {_build_info.cache_error}; they are compiled again in every process"
            )


def _warn(message: str) -> None:
    if multiprocessing.parent_process() is None:  # in a child process, the parent has warned already
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def is_loaded() -> bool:
    """Whether `load` succeeded."""
    return _library is not None


def library() -> ctypes.CDLL:
    """The library, loaded if necessary; raises if it is not available."""
    load()
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
    dtype = cast(Tensor, tensors[0]).dtype if dtype is None else dtype  # the first tensor is never optional
    held = [  # keeps the copies alive
        x
        if x is None or (x.dtype is dtype and x.is_cpu and x.is_contiguous() and not x.is_neg())
        else _contiguous(x, dtype)
        for x in tensors
    ]
    pointers = [None if x is None else x.data_ptr() for x in held]
    return _function(name, dtype, signature, len(pointers))(*scalars, *pointers)


def _contiguous(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype != dtype or not x.is_cpu:
        raise UsageError(f"a C kernel got {x.dtype} on {x.device}: expected {dtype} on the CPU for all tensors")
    return x.resolve_neg().contiguous()


_C_TYPES = {"i": ctypes.c_int, "l": ctypes.c_long, "d": ctypes.c_double, "p": ctypes.c_void_p}


@cache
def _function(name: str, dtype: torch.dtype, signature: str, n_pointers: int) -> Any:
    if dtype not in (torch.float32, torch.float64):
        raise UsageError(f"the C kernels take float32 and float64, got {dtype}")
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
        return *_build(compiler), None
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines() or ["no message"]
        return None, None, f"{compiler} cannot build the kernels ({lines[0]})"
    except (OSError, UsageError, subprocess.SubprocessError) as error:
        return None, None, f"the kernels cannot be built or loaded ({error})"


def _build(compiler: str) -> tuple[ctypes.CDLL, BuildInfo]:
    """Load the library from the cache, or compile it, in a temporary directory if the cache cannot be used."""
    version = _run(compiler, "--version")
    key = (*(source.read_text() for source in _SOURCES), version, " ".join(_FLAGS), platform.machine(), _cpu_features())
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    compiled = cache(lambda: _compile(compiler))
    info = BuildInfo(library=Path(), compiler=(version.splitlines() or [compiler])[0], seconds=None)
    try:
        return _load(io.cache_folder() / "native", name, compiled, info)
    except (OSError, UsageError) as error:
        with tempfile.TemporaryDirectory(prefix="qkflow-") as folder:
            return _load(Path(folder), name, compiled, replace(info, cache_error=str(error)))


def _load(
    folder: Path, name: str, compiled: Callable[[], tuple[bytes, float]], info: BuildInfo
) -> tuple[ctypes.CDLL, BuildInfo]:
    with LibraryCache(folder) as libraries:
        library, seconds = libraries.open(name), None
        if library is None:
            content, seconds = compiled()
            libraries.store(name, content)
            library = libraries.open(name)
        if library is None:
            raise UsageError(f"{folder} does not keep what is written to it")
        return ctypes.CDLL(loadable(*library)), replace(info, library=library[1], seconds=seconds)


def _compile(compiler: str) -> tuple[bytes, float]:
    """Compile every source once per dtype and link the objects, with OpenMP if possible; also returns the seconds."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="qkflow-") as folder:
        path = Path(folder) / "kernels.so"
        objects = {
            path.with_name(f"{source.stem}.{real}.o"): (f"-DREAL={real}", "-c", str(source))
            for source in _SOURCES
            if source.suffix == ".c"
            for real in ("float", "double")
        }
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
                break
            except subprocess.CalledProcessError:
                if not openmp:
                    raise
        return path.read_bytes(), time.monotonic() - start


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_TIMEOUT).stdout


def _cpu_features() -> str:
    """The processor's instruction sets, where the system reports them: machines may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
