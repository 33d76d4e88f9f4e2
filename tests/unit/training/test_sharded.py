"""Shards of tensors are assembled for any number of processes, and refused if they do not fit."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qkflow.errors import CheckpointError, DiskError
from qkflow.training import checkpoint
from qkflow.training.checkpoint import ShardedTensors
from qkflow.training.distributed import SingleProcess


class OneShardedProcess(SingleProcess):
    kind = "fsdp"


WHOLE = torch.arange(12.0).reshape(6, 2)


def write(path: Path, tensors: Mapping[str, Tensor], offsets: Any) -> Path:
    metadata = (
        {name: {"saved_offsets": offset} for name, offset in offsets.items()} if isinstance(offsets, dict) else offsets
    )
    save_file(dict(tensors), path, metadata={"DCP_SHARDING_INFO": json.dumps(metadata)})
    return path


def shards(folder: Path, cuts: list[tuple[int, int]]) -> list[Path]:
    """The rows of `WHOLE` in shards."""
    return [
        write(folder / f"{number}.safetensors", {"weights.a": WHOLE[first:last].clone()}, {"weights.a": [first, 0]})
        for number, (first, last) in enumerate(cuts)
    ]


@pytest.mark.parametrize("cuts", [[(0, 6)], [(3, 6), (0, 3)], [(0, 1), (1, 2), (2, 6)], [(0, 6), (6, 6)]])
def test_shards_of_any_size_are_assembled(tmp_path: Path, cuts: list[tuple[int, int]]) -> None:
    tensors = ShardedTensors(shards(tmp_path, cuts), "weights")
    assert list(tensors) == ["a"]
    assert torch.equal(tensors["a"], WHOLE)
    assert len(ShardedTensors(shards(tmp_path, cuts), "optimizer")) == 0


def test_a_scalar_has_one_shard(tmp_path: Path) -> None:
    file = write(tmp_path / "0.safetensors", {"optimizer.step.a": torch.tensor(3.0)}, {"optimizer.step.a": []})
    assert float(ShardedTensors([file], "optimizer")["step.a"]) == 3.0


@pytest.mark.parametrize("cuts", [[(0, 2), (3, 6)], [(0, 4), (3, 6)], [(1, 6)], [(0, 3), (0, 3), (3, 6)]])
def test_gaps_and_overlaps_are_refused(tmp_path: Path, cuts: list[tuple[int, int]]) -> None:
    with pytest.raises(CheckpointError, match="the shards of 'a' do not fit together"):
        ShardedTensors(shards(tmp_path, cuts), "weights")


@pytest.mark.parametrize(
    "offsets",
    [
        *(None, [], "weights.a", {"b": [0, 0]}),
        *({"weights.a": offset} for offset in (None, [0], [0, 1], [-1, 0], ["0", 0], [0.0, 0])),
    ],
)
def test_a_header_without_the_position_of_a_shard_is_refused(tmp_path: Path, offsets: Any) -> None:
    file = write(tmp_path / "0.safetensors", {"weights.a": WHOLE}, offsets)
    with pytest.raises(CheckpointError, match=r"0\.safetensors"):
        ShardedTensors([file], "weights")


def test_shards_of_different_tensors_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "0.safetensors", {"weights.a": WHOLE[:3].clone()}, {"weights.a": [0, 0]})
    for other in (WHOLE[3:].double(), WHOLE[3:, :1].clone()):
        second = write(tmp_path / "1.safetensors", {"weights.a": other}, {"weights.a": [3, 0]})
        with pytest.raises(CheckpointError, match="do not fit together"):
            ShardedTensors([first, second], "weights")


def test_files_other_than_safetensors_are_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "0.safetensors"
    file.write_bytes(b"\x80\x04\x95 a pickle")
    with pytest.raises(CheckpointError, match="can run code"):
        ShardedTensors([file], "weights")


@pytest.mark.parametrize("name", ["../weights.safetensors", "shard-00001-model-00003-of-00002.safetensors", "a.pt"])
def test_a_manifest_that_names_other_files_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "checkpoints" / "step-00000001"
    path.mkdir(parents=True)
    body = {"format": checkpoint.SHARDED_FORMAT, "step": 1, "files": {name: "0"}, "extra": {}}
    (path / "manifest.json").write_bytes(checkpoint._render(body))
    with pytest.raises(CheckpointError, match="is not a manifest of qkflow"):
        checkpoint.load(path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_a_full_disk_at_any_call_keeps_the_previous_sharded_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(step: int) -> Path:
        memory = {"exp_avg.a": WHOLE * step, "step.a": torch.tensor(float(step))}
        return checkpoint.save(tmp_path, step, {"a": WHOLE + step}, memory, {"tokens": step}, OneShardedProcess())

    calls, full = 0, 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **options)

        return counting

    save(1)
    for name in ("fsync", "rename", "mkdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    save(2)
    total, refusals = calls, 0
    for moment in range(1, total + 1):
        full, calls = moment, 0
        try:
            save(3)
        except DiskError:
            refusals += 1
        tensors, refused = checkpoint.load_latest(tmp_path)
        assert tensors is not None
        assert tensors.step in (2, 3)  # the files are in place, but the manifest is not written
        assert refused == {}
        assert torch.equal(tensors.weights["a"], WHOLE + tensors.step)
        assert not list((tmp_path / "checkpoints").glob(".*"))
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000003", ignore_errors=True)
    assert refusals >= 6
    full, calls = 0, 0
    newest = checkpoint.load(save(4))
    assert (newest.step, newest.extra, len(checkpoint.find(tmp_path))) == (4, {"tokens": 4}, 2)
    assert torch.equal(newest.optimizer["exp_avg.a"], WHOLE * 4)
    assert float(newest.optimizer["step.a"]) == 4.0
