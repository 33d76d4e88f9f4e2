"""Kernels are built where they can be, and done without where they cannot."""

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
from torch.testing import assert_close

from qkflow.ops import csrc
from qkflow.ops.short_conv import short_conv
from qkflow.ops.symplectic.cpu import native_backward, native_forward
from qkflow.ops.symplectic.naive import drifts

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
HASTE = "-O0"
"""What makes a compiler quick: these tests look at where it leaves things, not at what."""
compiles = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    csrc.prepare()  # the suite's own, which may be built already
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("QKFLOW_NATIVE", raising=False)
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache"


def compiler(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler of our own: a script that may call the real one as $REAL."""
    script = folder / "mycc"
    script.write_text(f"#!/bin/sh\nREAL={COMPILER}\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not looked for kernels yet."""
    monkeypatch.setattr(csrc, "_kernels", None)
    monkeypatch.setattr(csrc, "_build", None)
    monkeypatch.setattr(csrc, "_fault", "not tried yet")


def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKFLOW_NATIVE", "0")
    assert csrc._attempt() == (None, None, "QKFLOW_NATIVE is 0")


def test_a_machine_without_a_compiler_does_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    kernels, build, fault = csrc._attempt()
    assert kernels is build is None
    assert fault is not None
    assert "no C compiler" in fault


@pytest.mark.usefixtures("untried")
def test_where_they_are_missing_one_notice_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    x, weight = torch.randn(1, 5, 2), torch.randn(2, 4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        first = short_conv(x, weight)
        assert torch.equal(short_conv(x, weight), first)
        assert csrc.fault() is not None
        assert csrc.build() is None
    ((kind, text),) = [(warning.category, str(warning.message)) for warning in told]
    assert kind is RuntimeWarning
    assert text.startswith("no kernels in C: there is no C compiler (cc, gcc or clang); plain torch serves instead")
    assert "QKFLOW_NATIVE=0 silences this" in text
    assert "\n" not in text


@pytest.mark.usefixtures("untried")
def test_a_notice_that_someone_makes_an_error_is_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="no kernels in C"):
            csrc.prepare()
        csrc.prepare()
    assert not csrc.ready()


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("why", ["asked off", "a run of a study, which has said it", "there are kernels"])
def test_no_notice_is_given_without_need(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if why == "asked off":
        monkeypatch.setenv("QKFLOW_NATIVE", "0")
    elif why == "there are kernels":
        build = csrc.Build(library=tmp_path / "kernels.so", compiler="mycc 1", seconds=None)
        monkeypatch.setattr(csrc, "_attempt", lambda: (ctypes.CDLL(None), build, None))
    else:
        monkeypatch.setattr(multiprocessing, "parent_process", lambda: multiprocessing.current_process())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        csrc.prepare()
    assert csrc.ready() == (why == "there are kernels")
    assert (csrc.build() is None) == (csrc.fault() is not None)


@compiles
def test_a_compiler_that_fails_is_told_and_done_without(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, 'case "$*" in *--version*) echo 1;; *) echo "out of luck" >&2; exit 1;; esac', monkeypatch)
    kernels, build, fault = csrc._attempt()
    assert kernels is build is None
    assert fault is not None
    assert "out of luck" in fault
    assert not list(cache.rglob("*.o"))
    assert not list(cache.rglob("*.so"))


@compiles
def test_a_cache_that_cannot_be_written_is_no_end(cache: Path) -> None:
    cache.write_text("a file where a folder should be")
    kernels, build, fault = csrc._attempt()
    assert kernels is build is None
    assert fault is not None
    assert "cannot be built or loaded" in fault


@compiles
def test_they_are_built_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, f'exec $REAL "$@" {HASTE}', monkeypatch)
    script = os.environ["CC"]
    build = csrc._built(script)
    assert build.seconds is not None
    assert COMPILER is not None
    assert build.compiler == csrc._run(COMPILER, "--version").splitlines()[0]
    before = build.library.stat().st_mtime_ns
    assert csrc._built(script) == replace(build, seconds=None)
    assert build.library.stat().st_mtime_ns == before
    assert [file.name for file in (cache / "native").iterdir()] == [build.library.name]
    monkeypatch.setattr(csrc, "_kernels", ctypes.CDLL(str(build.library)))
    assert csrc.threaded()


@compiles
def test_a_compiler_without_openmp_makes_kernels_of_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, f'case "$*" in *-fopenmp*) exit 1;; *) exec $REAL "$@" {HASTE};; esac', monkeypatch)
    kernels, build, fault = csrc._attempt()
    assert fault is None
    assert build is not None
    assert kernels is not None
    assert kernels.alternate_float is not None
    monkeypatch.setattr(csrc, "_kernels", kernels)
    assert not csrc.threaded()


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="there is one core")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threads_change_the_last_bits_at_most_and_the_same_threads_change_nothing(dtype: torch.dtype) -> None:
    if fault := csrc.fault():
        pytest.skip(fault)
    n, width, hidden = 1001, 24, 20
    q, k, gq, gk = (torch.randn(n, width, dtype=dtype) for _ in range(4))
    inner, outer = torch.randn(hidden, width, dtype=dtype) / 5, torch.randn(width, hidden, dtype=dtype) / 5
    force = (inner, torch.randn(hidden, dtype=dtype), outer, torch.randn(width, dtype=dtype))
    dt, parts = torch.tensor(0.1, dtype=dtype), drifts("leapfrog", 3)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 2, 3):
            torch.set_num_threads(threads)
            there = native_forward(q, k, dt, force, parts, "silu")
            found.append((*there, *native_backward(*there, gq, gk, dt, force, parts, "silu")))
    finally:
        torch.set_num_threads(before)
    one, two, again, three = found
    assert all(torch.equal(a, b) for a, b in zip(two, again, strict=True))
    within = 1e-4 if dtype == torch.float32 else 1e-12
    for a, b, c in zip(one, two, three, strict=True):
        assert_close(a, b, rtol=within, atol=within)
        assert_close(a, c, rtol=within, atol=within)
