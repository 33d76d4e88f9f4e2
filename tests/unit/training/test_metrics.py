"""metrics.jsonl after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.training.metrics import Metrics, read_metrics, trim_metrics


def written(path: Path, steps: int) -> list[dict[str, object]]:
    metrics = Metrics(path)
    for step in range(steps):
        metrics.write({"kind": "train", "step": step, "loss": step / 3})
        metrics.write({"kind": "eval", "step": step, "loss": step / 7})
    metrics.sync()
    metrics.close()
    return read_metrics(path)


@given(keep=st.integers(-1, 4), tear=st.integers(0, 40))
@settings(deadline=None, max_examples=25)
def test_records_after_the_checkpoint_and_truncated_lines_are_removed(
    tmp_path_factory: pytest.TempPathFactory, keep: int, tear: int
) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    records = written(path, 5)
    path.write_bytes(path.read_bytes()[: -tear or None])
    trim_metrics(path, keep)
    remaining = read_metrics(path)
    assert remaining == [record for record in records if record["step"] <= keep][: len(remaining)]
    assert len(remaining) == 2 * (keep + 1) or keep == 4
    assert path.read_bytes() == b"".join(json.dumps(record).encode() + b"\n" for record in remaining)


def test_a_file_without_changes_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 2)
    before = path.stat().st_ino
    assert trim_metrics(path, 9) == 0
    assert path.stat().st_ino == before
    assert trim_metrics(tmp_path / "none.jsonl", 9) == 0
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize("line", [b"[1, 2]", b'{"kind": "eval"}', b'{"step": 1}', b"\xff\xfe", b"{", b'"text"'])
def test_a_line_that_is_not_a_record_is_skipped(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    records = written(path, 2)
    path.write_bytes(line + b"\n" + path.read_bytes() + line + b"\n")
    assert read_metrics(path) == records
    assert trim_metrics(path, 9) == 2


def test_a_non_finite_number_is_refused(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        metrics.write({"kind": "train", "step": 1, "loss": float("nan")})
    metrics.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == []
