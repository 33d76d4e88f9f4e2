"""Building and loading the C kernels, and falling back to PyTorch without them."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qkflow.ops.csrc import build
from qkflow.ops.csrc.library_cache import LibraryCache
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


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A compiler that builds one small library quickly and logs each time it links; it has a function `answer`."""
    source, log = tmp_path / "answer.c", tmp_path / "links"
    source.write_text("int answer(void) { return 42; }")
    fake_compiler(
        tmp_path,
        f'case "$*" in *--version*) echo mycc 1;; *-shared*) echo link >> {log}; for last; do :; done;'
        f" exec $REAL -shared -fPIC {source} -o $last;; esac",
        monkeypatch,
    )
    return os.environ["CC"]


def n_builds(compiler: str) -> int:
    log = Path(compiler).with_name("links")
    return len(log.read_text().split()) if log.exists() else 0


def answer(compiler: str) -> tuple[int, build.BuildInfo]:
    library, info = build._build(compiler)
    return library.answer(), info


def foreign_library(path: Path) -> bytes:
    """A library with another answer, as an attacker would plant it."""
    source = path / "foreign.c"
    source.write_text("int answer(void) { return 666; }")
    build._run(str(COMPILER), "-shared", "-fPIC", str(source), "-o", str(path / "foreign.so"))
    return (path / "foreign.so").read_bytes()


@compiles
def test_the_library_is_built_once_in_a_private_directory(compiler: str, cache: Path) -> None:
    value, info = answer(compiler)
    assert value == 42
    assert info.seconds is not None
    assert info.compiler == "mycc 1"
    assert info.cache_error is None
    before = info.library.stat().st_mtime_ns
    assert answer(compiler) == (42, replace(info, seconds=None))
    assert info.library.stat().st_mtime_ns == before
    assert n_builds(compiler) == 1
    assert {file.suffix for file in (cache / "native").iterdir()} == {".so", ".sha256"}
    assert (cache / "native").stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in (cache / "native").iterdir())
    assert info.library.name == f"{hashlib.sha256(info.library.read_bytes()).hexdigest()}.so"


@compiles
@pytest.mark.parametrize("change", ["planted", "truncated", "flipped", "empty", "writable", "missing", "link", "pipe"])
def test_a_library_that_was_altered_is_built_again(change: str, compiler: str, tmp_path: Path) -> None:
    path = answer(compiler)[1].library
    content = path.read_bytes()
    path.unlink()
    if change == "planted":
        path.write_bytes(foreign_library(tmp_path))
    elif change == "truncated":
        path.write_bytes(content[:-1])
    elif change == "flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif change == "empty":
        path.touch()
    elif change == "writable":
        path.write_bytes(content)
        path.chmod(0o666)
    elif change == "link":
        (tmp_path / "elsewhere.so").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere.so")
    elif change == "pipe":
        os.mkfifo(path)
    value, info = answer(compiler)
    assert value == 42
    assert info.seconds is not None
    assert n_builds(compiler) == 2
    assert path.read_bytes() == content
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o022 == 0


@compiles
@pytest.mark.parametrize("content", ["", "0" * 63, "../" * 21 + "x", "0" * 64, "é" * 64])
def test_a_manifest_that_was_altered_is_written_again(content: str, compiler: str, cache: Path) -> None:
    answer(compiler)
    (manifest,) = (cache / "native").glob("*.sha256")
    digest = manifest.read_text()
    manifest.write_text(content)
    assert answer(compiler)[0] == 42
    assert n_builds(compiler) == 2
    assert manifest.read_text() == digest


@compiles
def test_a_library_and_a_manifest_planted_in_a_writable_directory_are_deleted(
    compiler: str, cache: Path, tmp_path: Path
) -> None:
    path = answer(compiler)[1].library
    planted = foreign_library(tmp_path)
    digest = hashlib.sha256(planted).hexdigest()
    path.with_name(f"{digest}.so").write_bytes(planted)
    (manifest,) = path.parent.glob("*.sha256")
    manifest.write_text(digest)
    path.parent.chmod(0o777)
    value, info = answer(compiler)
    assert value == 42
    assert info.library == path
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.with_name(f"{digest}.so").exists()


def test_only_files_of_the_cache_are_deleted_from_a_writable_directory(tmp_path: Path) -> None:
    key, digest, suffix = "0a" * 16, "0a" * 32, "0a" * 8
    own = [f"{digest}.so", f"{key}.sha256", f".{digest}.so.{suffix}", f".{key}.sha256.{suffix}"]
    foreign = ["notes.txt", "libm.so", "download.sha256", f"{digest}.so.bak", f"{digest.upper()}.so", f"{key}.py"]
    for name in (*own, *foreign):
        (tmp_path / name).write_text("?")
    (tmp_path / f"{'1b' * 32}.so").mkdir()
    tmp_path.chmod(0o777)
    with LibraryCache(tmp_path):
        pass
    assert {file.name for file in tmp_path.iterdir()} == {*foreign, f"{'1b' * 32}.so"}
    assert tmp_path.stat().st_mode & 0o777 == 0o700


@compiles
def test_a_directory_that_others_can_only_read_is_made_private(compiler: str, cache: Path) -> None:
    answer(compiler)
    (cache / "native").chmod(0o755)
    assert answer(compiler)[1].seconds is None
    assert (cache / "native").stat().st_mode & 0o777 == 0o700


@compiles
@pytest.mark.parametrize("through", ["directory", "symlink"])
@pytest.mark.parametrize("planted", [False, True])
def test_a_directory_of_another_user_is_not_used(
    planted: bool, through: str, compiler: str, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if planted:
        answer(compiler)
        for file in list((cache / "native").iterdir()):
            content = file.read_bytes()
            file.unlink()  # this process has loaded it: writing to it would crash the process at its end
            file.write_bytes(content + b"?")
    folder = cache / "native"
    folder.mkdir(parents=True, exist_ok=True)
    if through == "symlink":
        folder = folder.rename(tmp_path / "theirs")
        (cache / "native").symlink_to(folder)
    before = {file: file.read_bytes() for file in folder.iterdir()}
    if os.geteuid() == 0:
        os.chown(folder, 12345, 12345)
    else:  # the temporary directory is then not ours either, so there are no kernels
        another = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: another)
    library, info, error = build._try_load()
    if library is not None and info is not None:
        assert library.answer() == 42
        error = info.cache_error
    assert error is not None
    assert "belongs to user" in error
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


@compiles
def test_a_link_to_a_directory_of_our_own_is_followed(compiler: str, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    cache.mkdir()
    (cache / "native").symlink_to(tmp_path / "ours")
    assert answer(compiler)[1].cache_error is None
    assert answer(compiler)[1].seconds is None
    assert (tmp_path / "ours").stat().st_mode & 0o777 == 0o700


@compiles
@pytest.mark.usefixtures("not_loaded")
@pytest.mark.parametrize("reason", ["a file in its place", "read-only home", "full disk", "no home"])
def test_without_a_cache_the_library_is_loaded_from_a_temporary_directory(
    reason: str, compiler: str, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if reason == "a file in its place":
        cache.write_text("a file where a folder should be")
    elif reason == "full disk":
        write, first = LibraryCache._write, []

        def failing(self: LibraryCache, name: str, content: bytes) -> None:
            if not first:
                first.append(name)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(self, name, content)

        monkeypatch.setattr(LibraryCache, "_write", failing)
    elif reason == "no home":
        monkeypatch.delenv("QKFLOW_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-this-name/cache")
    else:  # root may write anywhere except in /proc
        monkeypatch.delenv("QKFLOW_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", "/proc")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with pytest.warns(RuntimeWarning, match="the C kernels cannot be cached") as caught:
        build.load()
    assert len(caught) == 1
    assert build.library().answer() == 42  # without another warning
    assert n_builds(compiler) == 1
    assert not list(temporary.iterdir())


@compiles
def test_processes_that_build_at_the_same_time_load_the_same_library(compiler: str, cache: Path) -> None:
    code = (
        "from qkflow.ops.csrc import build\nimport sys\nlibrary, info = build._build(sys.argv[1])\n"
        "print(library.answer(), info.library, info.cache_error)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, compiler], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outputs = {process.communicate()[0] for process in processes}
    (library,) = (cache / "native").glob("*.so")
    assert outputs == {f"42 {library} None\n"}
    assert {file.suffix for file in (cache / "native").iterdir()} == {".so", ".sha256"}


@compiles
def test_a_file_that_replaces_the_library_after_its_check_is_not_loaded(
    compiler: str, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, planted = answer(compiler)[1].library, foreign_library(tmp_path)
    verified = LibraryCache.open

    def replace_after(self: LibraryCache, key: str) -> tuple[int, Path] | None:
        library = verified(self, key)
        path.unlink()
        path.write_bytes(planted)
        return library

    monkeypatch.setattr(LibraryCache, "open", replace_after)
    assert answer(compiler)[0] == 42


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
