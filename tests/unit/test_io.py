from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qkflow import io
from qkflow.errors import BusyError, DiskError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_checksum_is_the_sha256(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "a").write_bytes(data)
    assert io.checksum(tmp_path / "a") == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(("content", "expected"), [("é\n", b"\xc3\xa9\n"), (b"\x00\xff", b"\x00\xff"), ("", b"")])
def test_write_file_leaves_no_temporary_file(tmp_path: Path, content: str | bytes, expected: bytes) -> None:
    io.write_file(tmp_path / "new" / "a", content)
    assert (tmp_path / "new" / "a").read_bytes() == expected
    assert names(tmp_path / "new") == ["a"]


def test_json_is_sorted_and_ends_with_a_newline(tmp_path: Path) -> None:
    io.write_json(tmp_path / "a.json", {"b": [1, None], "a": "é"})
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == {"a": "é", "b": [1, None]}
    assert text.index('"a"') < text.index('"b"')
    assert text.endswith("}\n")


def test_nan_raises_and_keeps_the_old_file(tmp_path: Path) -> None:
    io.write_json(tmp_path / "a.json", 1)
    with pytest.raises(ValueError, match="JSON"):
        io.write_json(tmp_path / "a.json", float("nan"))
    assert (tmp_path / "a.json").read_text() == "1\n"


def test_reader_never_sees_a_partial_file(tmp_path: Path) -> None:
    io.write_file(tmp_path / "a", "old")

    def fill(temporary: Path) -> None:
        temporary.write_text("ne")
        assert (tmp_path / "a").read_text() == "old"
        temporary.write_text("new")
        assert (tmp_path / "a").read_text() == "old"

    io.replace(tmp_path / "a", fill)
    assert (tmp_path / "a").read_text() == "new"


def test_content_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []
    real_sync, real_rename = io.sync, os.rename
    monkeypatch.setattr(io, "sync", lambda path: (calls.append(("sync", path.name)), real_sync(path)))
    monkeypatch.setattr(os, "rename", lambda a, b: (calls.append(("rename", b.name)), real_rename(a, b)))

    def fill(folder: Path) -> None:
        (folder / "inside").mkdir()
        (folder / "inside" / "leaf").write_text("x")

    io.write_folder(tmp_path / "run", fill)
    temporary = f".run.{os.getpid()}.tmp"
    assert calls == [
        ("sync", "inside"),
        ("sync", "leaf"),
        ("sync", temporary),
        ("rename", "run"),
        ("sync", tmp_path.name),
    ]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("a bug")])
@pytest.mark.parametrize("folder", [False, True])
def test_failed_write_keeps_the_old_file(tmp_path: Path, folder: bool, error: Exception) -> None:
    io.write_file(tmp_path / "a", "old")

    def fill(temporary: Path) -> None:
        (temporary / "file" if folder else temporary).write_text("half")
        raise error

    with pytest.raises(DiskError if isinstance(error, OSError) else ValueError):
        (io.write_folder if folder else io.replace)(tmp_path / "a", fill)
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_disk_error_names_the_file_and_the_reason(tmp_path: Path) -> None:
    def fill(temporary: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskError, match=r"could not write .*weights \(No space left on device\)") as caught:
        io.replace(tmp_path / "weights", fill)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("path", [".", "/"])
def test_the_current_folder_and_the_root_are_not_replaced(path: str) -> None:
    with pytest.raises(DiskError, match="is a directory: give another path") as caught:
        io.write_file(Path(path), "new")
    assert caught.value.errno == errno.EISDIR


def test_write_folder(tmp_path: Path) -> None:
    io.write_folder(tmp_path / "deep" / "run", lambda folder: (folder / "a").write_text("1") and None)
    assert (tmp_path / "deep" / "run" / "a").read_text() == "1"
    assert names(tmp_path / "deep") == ["run"]


def test_nonempty_folder_is_not_replaced(tmp_path: Path) -> None:
    io.write_file(tmp_path / "run" / "a", "old")
    with pytest.raises(DiskError, match="previous content is unchanged"):
        io.write_folder(tmp_path / "run", lambda folder: (folder / "a").write_text("new") and None)
    assert (tmp_path / "run" / "a").read_text() == "old"
    assert names(tmp_path) == ["run"]


def test_discard_files_folders_and_missing_paths(tmp_path: Path) -> None:
    io.write_file(tmp_path / "folder" / "a", "x")
    io.write_file(tmp_path / "file", "x")
    for name in ("folder", "file", "absent"):
        io.discard(tmp_path / name)
    assert names(tmp_path) == []


def test_discard_of_a_link_keeps_the_target(tmp_path: Path) -> None:
    io.write_file(tmp_path / "folder" / "a", "x")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    io.discard(tmp_path / "link")
    assert names(tmp_path) == ["folder"]
    assert names(tmp_path / "folder") == ["a"]


def test_second_lock_raises_with_the_process_id(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    with io.locked(path), pytest.raises(BusyError, match=rf"run is in use by another process \(id {os.getpid()}\)"):
        io.locked(path).__enter__()
    with io.locked(path):
        pass


def test_lock_is_released_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(KeyError), io.locked(tmp_path / "lock"):
        raise KeyError
    with io.locked(tmp_path / "lock"):
        pass


HOLD_LOCK = """
import fcntl, os, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print(os.getpid(), file=file, flush=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_lock_of_a_killed_process_is_released(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", HOLD_LOCK, str(tmp_path / "lock")]  # without qkflow: it imports torch
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(BusyError, match=f"id {child.pid}"):
            io.locked(tmp_path / "lock").__enter__()
        child.kill()
        child.wait()
        with io.locked(tmp_path / "lock"):
            pass


def test_lock_in_an_invalid_place_raises(tmp_path: Path) -> None:
    io.write_file(tmp_path / "file", "x")
    with pytest.raises(DiskError, match="could not write"):
        io.locked(tmp_path / "file" / "lock").__enter__()
