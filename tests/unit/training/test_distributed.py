"""Process groups, splitting a batch among processes, and single-process runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.cli import main
from qkflow.errors import DiskError, UsageError
from qkflow.training import train
from qkflow.training.distributed import (
    ProcessGroup,
    SingleProcess,
    is_on_all_ranks,
    is_torchrun,
    join,
    mark_on_all_ranks,
    was_restarted,
)
from qkflow.training.parallel import n_micro_batches, validate_parallel
from qkflow.training.reproducibility import changes, step_seed

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    with join("fsdp") as world:
        assert type(world) is SingleProcess
    monkeypatch.setenv("WORLD_SIZE", "4")  # set by another launcher: the other variables are required
    with join() as world:
        assert type(world) is SingleProcess
    assert not torch.distributed.is_initialized()


def test_collectives_of_a_single_process_are_trivial() -> None:
    array, group = np.arange(3.0), SingleProcess()
    assert (group.any(True), group.any(False)) == (True, False)
    assert (group.gather(3), group.broadcast("a")) == ([3], "a")
    assert group.sum(array) is array
    error = DiskError(28, "full")
    with pytest.raises(DiskError) as caught, group.raise_on_all_ranks():
        raise error
    assert caught.value is error
    assert not is_on_all_ranks(error)


def test_an_error_caused_by_a_marked_error_is_on_all_ranks() -> None:
    def fail() -> None:
        try:
            raise mark_on_all_ranks(UsageError("inner"))
        except UsageError as error:
            raise UsageError("outer") from error

    with pytest.raises(UsageError) as caught:
        fail()
    assert is_on_all_ranks(caught.value)


def test_a_changed_parallel_setting_is_reported() -> None:
    record = {"processes": 2, "parallel": "ddp"}
    assert ["parallel was ddp when" in line for line in changes(record, {**record, "parallel": "fsdp"})] == [True]
    assert ["processes was 2 when" in line for line in changes(record, {"processes": 1, "parallel": None})] == [True]


def test_parallel_without_torchrun_prints_a_notice(configure: Any, texts: Path, tmp_path: Path, capsys: Any) -> None:
    small = ["--size", "100k", "--context", "16", "--batch", "4", "--steps", "1", "--out", str(tmp_path / "run")]
    assert main(["train", str(texts), *small, "--parallel", "fsdp"]) == 0
    assert "--parallel fsdp has no effect" in " ".join(capsys.readouterr().out.split())


def test_a_restart_is_detected_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert (was_restarted(), is_torchrun()) == (False, False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert (was_restarted(), is_torchrun()) == (False, True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert was_restarted()


def test_a_restarted_command_resumes_its_own_run_only(
    configure: Any, tmp_path: Path, stopped_run: Any, watcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stopped_run(configure(), tmp_path / "run", 2)
    with pytest.raises(UsageError, match="already holds a run"):
        train(configure(), folder)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(UsageError, match="the config differs from that of"):
        train(configure(seed=1), folder)
    recorder = watcher()
    train(configure(), folder, callbacks=[recorder])
    assert recorder.events[0] == ("start", 2)
    train(configure(), tmp_path / "new")  # killed before the first step


def test_ranks_have_different_seeds_and_rank_0_that_of_a_single_process() -> None:
    assert step_seed(3, 5, rank=0) == step_seed(3, 5)
    assert len({step_seed(3, 5, rank) for rank in range(8)}) == 8


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
@settings(deadline=None, max_examples=25)
def test_the_number_of_micro_batches_is_minimal(rows: int, most: int, more: int) -> None:
    count = n_micro_batches(rows, most)
    assert rows % count == 0
    assert rows // count <= most
    assert not any(rows % fewer == 0 and rows // fewer <= most for fewer in range(1, count))
    assert n_micro_batches(rows * more, rows) == more  # one process uses the number in the config


def pair(kind: Any) -> ProcessGroup:
    return ProcessGroup(rank=0, size=2, local_rank=0, kind=kind)


def test_a_resumed_run_is_not_advised_to_change_its_batch(configure: Any) -> None:
    with pytest.raises(UsageError, match="use --batch 2 or 4, or use 3 processes"):
        validate_parallel(configure(batch=3), pair("ddp"))
    with pytest.raises(UsageError, match=r"among 2 processes: use 3 processes$"):
        validate_parallel(configure(batch=3), pair("ddp"), resume=True)


def test_compile_with_fsdp_is_refused(configure: Any) -> None:
    with pytest.raises(UsageError, match="compile does not support fsdp"):
        validate_parallel(configure(compile=True), pair("fsdp"))
    validate_parallel(configure(compile=True), pair("ddp"))
