"""Damaged checkpoints are refused, and the error names the file."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

import qkflow.training.tensors
from qkflow.errors import CheckpointError, DiskError
from qkflow.training import checkpoint

FILES = ("manifest.json", "optimizer.safetensors", "weights.safetensors")


def save(folder: Path, step: int) -> Path:
    generator = torch.Generator().manual_seed(step)
    weights = {"a": torch.randn(20, 10, generator=generator), "b": torch.randn(7, generator=generator)}
    memory = {f"exp_avg.{name}": tensor / 2 for name, tensor in weights.items()}
    return checkpoint.save(folder, step, weights, memory, {"tokens": 3 * step, "seconds": step / 3})


def test_a_saved_checkpoint_is_loaded_completely(tmp_path: Path) -> None:
    path = save(tmp_path, 12)
    loaded = checkpoint.load(path)
    assert path == loaded.path == tmp_path / "checkpoints" / "step-00000012"
    assert (loaded.step, loaded.extra) == (12, {"tokens": 36, "seconds": 4.0})
    assert torch.equal(loaded.optimizer["exp_avg.a"], loaded.weights["a"] / 2)
    assert sorted(file.name for file in path.iterdir()) == sorted(FILES)


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (1, 5, 30, 200):
        save(tmp_path, step)
    assert [path.name for path in checkpoint.find(tmp_path)] == ["step-00000030", "step-00000200"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("bit", [0, 5])
def test_a_flipped_bit_is_detected_and_the_previous_checkpoint_is_used(tmp_path: Path, name: str, bit: int) -> None:
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    whole = file.read_bytes()
    for part in range(64):
        for position in {part * len(whole) // 64, (part + 1) * len(whole) // 64 - 1}:
            file.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << bit]) + whole[position + 1 :])
            loaded, refused = checkpoint.load_latest(tmp_path)
            assert loaded is not None
            assert loaded.step == 1
            assert list(refused) == [file.parent]
            assert str(file) in refused[file.parent], position
    file.write_bytes(whole)
    loaded, refused = checkpoint.load_latest(tmp_path)
    assert loaded is not None
    assert (loaded.step, refused) == (2, {})


def damages(name: str) -> dict[str, Callable[[Path], object]]:
    def cut(length: Callable[[int], int]) -> Callable[[Path], object]:
        return lambda folder: os.truncate(folder / name, length((folder / name).stat().st_size))

    return {
        "emptied": cut(lambda size: 0),
        "cut to a byte": cut(lambda size: 1),
        "cut to its first 8": cut(lambda size: 8),
        "cut in half": cut(lambda size: size // 2),
        "cut by one": cut(lambda size: size - 1),
        "longer by a zero": cut(lambda size: size + 1),
        "removed": lambda folder: (folder / name).unlink(),
        "a folder": lambda folder: [(folder / name).unlink(), (folder / name).mkdir()],
        "of another checkpoint": lambda folder: shutil.copy(folder.with_name("step-00000001") / name, folder / name),
        "beside a stranger": lambda folder: (folder / f"more-{name}").write_bytes(b"?"),
    }


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", damages(""))
def test_a_damaged_file_is_detected_and_the_previous_checkpoint_is_used(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    damages(name)[damage](path)
    loaded, refused = checkpoint.load_latest(tmp_path)
    assert loaded is not None
    assert loaded.step == 1
    assert list(refused) == [path]


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    other = path.with_name("step-00000009")
    path.rename(other)
    with pytest.raises(CheckpointError, match="contains step 2: it was renamed"):
        checkpoint.load(other)


def test_without_a_valid_checkpoint_the_error_lists_all_of_them(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, step) / "weights.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="restart the run from step 0") as caught:
        checkpoint.load_latest(tmp_path)
    assert "step-00000001" in str(caught.value)
    assert "step-00000002" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_without_checkpoints_has_no_latest_one(tmp_path: Path) -> None:
    assert checkpoint.load_latest(tmp_path) == (None, {})


def test_a_newer_format_raises_instead_of_being_skipped(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    body = json.loads((path / "manifest.json").read_bytes())["manifest"]
    (path / "manifest.json").write_bytes(checkpoint._render({**body, "format": 99}))
    with pytest.raises(CheckpointError, match="has format 99, but this qkflow reads formats 1"):
        checkpoint.load_latest(tmp_path)


def test_a_manifest_of_another_program_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    body = json.loads((path / "manifest.json").read_bytes())["manifest"]
    for changes in ({"files": {"../secret": ""}}, {"step": "1"}, {"files": None}, {"extra": []}):
        (path / "manifest.json").write_bytes(checkpoint._render({**body, **changes}))
        with pytest.raises(CheckpointError, match="not a manifest of qkflow"):
            checkpoint.load(path)
    (path / "manifest.json").write_bytes(b"[" * 100_000)
    with pytest.raises(CheckpointError, match="not a manifest"):
        checkpoint.load(path)


def test_a_checkpoint_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(CheckpointError, match="can run code when it is opened"):
        checkpoint.load(tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        checkpoint.load(tmp_path / "nothing")


def test_a_refused_checkpoint_is_renamed_and_not_found_again(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for _ in range(2):
        aside = checkpoint.set_aside(save(tmp_path, 2))
        assert aside.is_dir()
        assert [path.name for path in checkpoint.find(tmp_path)] == ["step-00000001"]


class FullDisk:
    """Make every call that creates or renames a file fail from the n-th on."""

    def __init__(self, patch: pytest.MonkeyPatch, first: int) -> None:
        self.first, self.calls = first, 0
        for name in ("fsync", "rename", "mkdir", "open"):
            patch.setattr(os, name, self.limited(getattr(os, name)))
        library = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        limited = self.limited(qkflow.training.tensors.save_file, library)
        patch.setattr(qkflow.training.tensors, "save_file", limited)

    def limited(self, call: Callable[..., Any], error: Exception | None = None) -> Callable[..., Any]:
        @functools.wraps(call)
        def limiting(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls >= self.first:
                raise error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **options)

        return limiting


def test_a_full_disk_at_any_call_keeps_earlier_checkpoints(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "elsewhere" / "checkpoints").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        disk = FullDisk(patch, first=1_000)
        save(tmp_path / "elsewhere", 3)
        total = disk.calls
    assert total >= 10
    for first in range(1, total + 1):
        with pytest.MonkeyPatch.context() as patch:
            FullDisk(patch, first)
            with pytest.raises(DiskError, match="No space left") as caught:
                save(tmp_path, 3)
        assert caught.value.errno == errno.ENOSPC
        names = [path.name for path in checkpoint.find(tmp_path)]
        assert names[:2] == ["step-00000001", "step-00000002"], first
        assert [checkpoint.load(path).step for path in checkpoint.find(tmp_path)[:2]] == [1, 2]
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000003", ignore_errors=True)
        for leftover in (tmp_path / "checkpoints").glob(".*"):
            shutil.rmtree(leftover)
    save(tmp_path, 3)
    assert [path.name for path in checkpoint.find(tmp_path)] == ["step-00000002", "step-00000003"]
