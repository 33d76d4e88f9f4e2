"""Building and loading the C kernels, and falling back to PyTorch without them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qkflow.ops.csrc import build
from qkflow.ops.short_conv import short_conv

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
FAST = "-O0"
"""Speeds up the builds; these tests do not run the kernels."""
compiles = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("QKFLOW_NATIVE", raising=False)
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache"


def fake_compiler(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set CC to a script that may call the real compiler as $REAL."""
    script = folder / "mycc"
    script.write_text(f"#!/bin/sh\nREAL={COMPILER}\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))


@pytest.fixture
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not loaded the kernels."""
    monkeypatch.setattr(build, "_library", None)
    monkeypatch.setattr(build, "_build_info", None)
    monkeypatch.setattr(build, "_load_error", build._NOT_TRIED)


def test_kernels_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKFLOW_NATIVE", "0")
    assert build._try_load() == (None, None, "QKFLOW_NATIVE is 0")


def test_no_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    library, info, error = build._try_load()
    assert library is info is None
    assert error is not None
    assert "no C compiler" in error


@pytest.mark.usefixtures("not_loaded")
def test_missing_kernels_warn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    x, weight = torch.randn(1, 5, 2), torch.randn(2, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = short_conv(x, weight)
        assert torch.equal(short_conv(x, weight), first)
        assert build.load_error() is not None
        assert build.build_info() is None
    ((kind, text),) = [(warning.category, str(warning.message)) for warning in caught]
    assert kind is RuntimeWarning
    assert "no C kernels: there is no C compiler" in text
    assert "QKFLOW_NATIVE=0" in text
    assert "\n" not in text


@pytest.mark.usefixtures("not_loaded")
def test_a_warning_turned_into_an_error_is_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="no C kernels"):
            build.load()
        build.load()
    assert not build.is_loaded()


@pytest.mark.usefixtures("not_loaded")
@pytest.mark.parametrize("reason", ["disabled", "in a child process", "kernels loaded"])
def test_no_warning_is_given_if(reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if reason == "disabled":
        monkeypatch.setenv("QKFLOW_NATIVE", "0")
    elif reason == "kernels loaded":
        info = build.BuildInfo(library=tmp_path / "kernels.so", compiler="mycc 1", seconds=None)
        monkeypatch.setattr(build, "_try_load", lambda: (ctypes.CDLL(None), info, None))
    else:
        monkeypatch.setattr(multiprocessing, "parent_process", lambda: multiprocessing.current_process())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build.load()
    assert build.is_loaded() == (reason == "kernels loaded")
    assert (build.build_info() is None) == (build.load_error() is not None)


@compiles
def test_a_failing_compiler_is_reported_and_leaves_no_files(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(
        tmp_path, 'case "$*" in *--version*) echo 1;; *) echo "internal error" >&2; exit 1;; esac', monkeypatch
    )
    library, info, error = build._try_load()
    assert library is info is None
    assert error is not None
    assert "internal error" in error
    assert not list(cache.rglob("*.o"))
    assert not list(cache.rglob("*.so"))


@compiles
def test_an_unwritable_cache_is_reported(cache: Path) -> None:
    cache.write_text("a file where a folder should be")
    library, info, error = build._try_load()
    assert library is info is None
    assert error is not None
    assert "cannot be built or loaded" in error


@compiles
def test_the_library_is_built_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path, f'exec $REAL "$@" {FAST}', monkeypatch)
    script = os.environ["CC"]
    info = build._build(script)
    assert info.seconds is not None
    assert COMPILER is not None
    assert info.compiler == build._run(COMPILER, "--version").splitlines()[0]
    before = info.library.stat().st_mtime_ns
    assert build._build(script) == replace(info, seconds=None)
    assert info.library.stat().st_mtime_ns == before
    assert [file.name for file in (cache / "native").iterdir()] == [info.library.name]
    monkeypatch.setattr(build, "_library", ctypes.CDLL(str(info.library)))
    assert build.has_openmp()


@compiles
def test_a_compiler_without_openmp_builds_single_threaded_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(tmp_path, f'case "$*" in *-fopenmp*) exit 1;; *) exec $REAL "$@" {FAST};; esac', monkeypatch)
    library, info, error = build._try_load()
    assert error is None
    assert info is not None
    assert library is not None
    assert library.drift_kick_float is not None
    monkeypatch.setattr(build, "_library", library)
    assert not build.has_openmp()
