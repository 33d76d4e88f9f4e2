"""Who the processes of a run are, how they share a batch out, and what one process alone does not notice of it."""

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
from qkflow.training.distributed import ALONE, World, by_torchrun, is_known_to_all, join, known_to_all, restarted
from qkflow.training.environment import changes
from qkflow.training.parallel import micro_batches, refuse_uneven
from qkflow.training.reproducibility import step_seed

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    with join("fsdp") as world:
        assert world == ALONE
    monkeypatch.setenv("WORLD_SIZE", "4")  # someone else's: whoever joins needs the rest, too
    with join() as world:
        assert world == ALONE
    assert not torch.distributed.is_initialized()


def test_one_process_agrees_with_itself() -> None:
    array = np.arange(3.0)
    assert (ALONE.any(True), ALONE.any(False)) == (True, False)
    assert (ALONE.gather(3), ALONE.first("a")) == ([3], "a")
    assert ALONE.add(array) is array
    error = DiskError(28, "full")
    with pytest.raises(DiskError) as caught, ALONE.agreed():
        raise error
    assert caught.value is error
    assert not is_known_to_all(error)


def test_what_all_know_is_known_of_what_it_caused() -> None:
    def fail() -> None:
        try:
            raise known_to_all(UsageError("inner"))
        except UsageError as error:
            raise UsageError("outer") from error

    with pytest.raises(UsageError) as caught:
        fail()
    assert is_known_to_all(caught.value)


def test_bits_may_depend_on_how_a_model_is_shared() -> None:
    record = {"processes": 2, "parallel": "ddp"}
    assert ["parallel was ddp when" in line for line in changes(record, {**record, "parallel": "fsdp"})] == [True]
    assert ["processes was 2 when" in line for line in changes(record, {"processes": 1, "parallel": None})] == [True]


def test_sharing_by_one_process_is_remarked_on(configure: Any, texts: Path, tmp_path: Path, capsys: Any) -> None:
    small = ["--size", "100k", "--context", "16", "--batch", "4", "--steps", "1", "--out", str(tmp_path / "run")]
    assert main(["train", str(texts), *small, "--parallel", "fsdp"]) == 0
    assert "--parallel fsdp is for the processes" in " ".join(capsys.readouterr().out.split())


def test_a_restart_is_known_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert (restarted(), by_torchrun()) == (False, False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert (restarted(), by_torchrun()) == (False, True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert restarted()


def test_started_again_a_command_goes_on_with_its_own_run_only(
    configure: Any, tmp_path: Path, begun: Any, watcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begun(configure(), tmp_path / "run", 2)
    with pytest.raises(UsageError, match="already holds a run"):
        train(configure(), folder)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(UsageError, match="the config given is not the one of"):
        train(configure(seed=1), folder)
    witness = watcher()
    train(configure(), folder, callbacks=[witness])
    assert witness.told[0] == ("start", 2)
    train(configure(), tmp_path / "new")  # killed before it had begun


def test_every_process_draws_masks_of_its_own_and_the_first_those_of_one_alone() -> None:
    assert step_seed(3, 5, rank=0) == step_seed(3, 5)
    assert len({step_seed(3, 5, rank) for rank in range(8)}) == 8


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
@settings(deadline=None, max_examples=25)
def test_micro_batches_are_as_few_as_memory_allows(rows: int, most: int, more: int) -> None:
    count = micro_batches(rows, most)
    assert rows % count == 0
    assert rows // count <= most
    assert not any(rows % fewer == 0 and rows // fewer <= most for fewer in range(1, count))
    assert micro_batches(rows * more, rows) == more  # one process makes as many as the config says


def test_a_run_that_has_begun_is_not_told_to_take_another_batch(configure: Any) -> None:
    with pytest.raises(UsageError, match="give --batch 2 or 4, or run 3 processes"):
        refuse_uneven(configure(batch=3), World(size=2, kind="ddp"))
    with pytest.raises(UsageError, match=r"among 2 processes: run 3 processes$"):
        refuse_uneven(configure(batch=3), World(size=2, kind="ddp"), begun=True)


def test_what_cannot_be_compiled_in_pieces_is_refused(configure: Any) -> None:
    with pytest.raises(UsageError, match="compile and fsdp do not go together"):
        refuse_uneven(configure(compile=True), World(size=2, kind="fsdp"))
    refuse_uneven(configure(compile=True), World(size=2, kind="ddp"))
