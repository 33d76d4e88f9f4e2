"""The Triton kernels compile for GPUs, ahead of time, without register spills and with little shared memory."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

from qkflow.ops.delta_rule import triton_error

FORWARD = ("recurrent", "intra_chunk", "chunk_states", "chunk_outputs")
BACKWARD = ("intra_chunk_backward", "chunk_states_backward", "scores_backward", "inputs_backward", "decay_backward")
CASES = [
    *((name, 256, torch.bfloat16, 80) for name in FORWARD),
    *((name, 256, torch.float32, 90) for name in FORWARD),
    *((name, 128, torch.bfloat16, 80) for name in BACKWARD),
    *((name, 128, torch.float32, 90) for name in BACKWARD),
    *((name, 128, torch.float16, 90) for name in ("chunk_states", "chunk_states_backward")),  # the most registers
    *((name, 64, torch.bfloat16, 90) for name in ("chunk_states", "chunk_states_backward")),  # other tiles at 64
]
"""The largest widths without spills, and tiles that differ at 64; `benchmarks/triton_resources.py` has all widths."""

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1" or "not installed" in (triton_error(torch.device("cpu")) or ""),
    reason="needs Triton's compiler",
)


@pytest.fixture(scope="module")
def compiler() -> Iterator[ProcessPoolExecutor]:
    """A process without jaxtyping's checks inside the kernels, and with a cache of compiled kernels."""
    folder, benchmarks = Path(os.environ["QKFLOW_CACHE"]) / "triton", Path(__file__).parents[4] / "benchmarks"
    with (
        mock.patch.object(sys, "path", [*sys.path, str(benchmarks)]),
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(folder)),
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        yield pool


@pytest.mark.parametrize(("name", "width", "dtype", "target"), CASES)
def test_a_kernel_fits_in_registers(
    compiler: ProcessPoolExecutor, name: str, width: int, dtype: torch.dtype, target: int
) -> None:
    from triton_resources import usage

    resources = compiler.submit(usage, name, width, width, dtype, target).result()
    assert resources.spills == 0
    assert resources.shared <= 100 * 1024
    assert 16 <= resources.registers <= 255


def test_all_kernels_are_listed(compiler: ProcessPoolExecutor) -> None:
    from triton_resources import KERNELS, launched_kernels

    assert set(KERNELS) == {*FORWARD, *BACKWARD} == set(compiler.submit(launched_kernels).result())
