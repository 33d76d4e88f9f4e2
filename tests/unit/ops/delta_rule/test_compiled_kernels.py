"""The kernels in Triton compile for GPUs that are not here, and fit: no register spills, and little shared memory."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

from qkflow.ops.delta_rule import triton_error

WHOLE = ("recurrent", "intra_chunk", "chunk_states", "chunk_outputs")
BACK = ("intra_chunk_backward", "chunk_states_backward", "scores_backward", "inputs_backward", "decay_backward")
CORNERS = [
    *((name, 64, torch.float32, 80) for name in (*WHOLE, *BACK)),
    *((name, 64, torch.bfloat16, 90) for name in (*WHOLE, *BACK)),
    *((name, 256, torch.bfloat16, 80) for name in WHOLE),
    *((name, 256, torch.float32, 90) for name in WHOLE),
    *((name, 128, torch.bfloat16, 80) for name in BACK),
    *((name, 128, torch.float32, 90) for name in BACK),
    *((name, 128, torch.float16, 90) for name in ("chunk_states", "chunk_states_backward")),  # the tightest of all
]
"""What must not spill: forward at every width, backward at 64 and 128. `benchmarks/triton_matrix.py` tries them all."""

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1" or "not installed" in (triton_error(torch.device("cpu")) or ""),
    reason="there is no compiler of Triton's here",
)


@pytest.fixture(scope="module")
def compiler() -> Iterator[ProcessPoolExecutor]:
    """A process of its own, without checks of types inside the kernels; what was compiled before is only read there."""
    folder = Path(os.environ["QKFLOW_CACHE"]) / "triton"  # beside the kernels in C
    with (
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(folder)),
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        yield pool


@pytest.mark.parametrize(("name", "width", "dtype", "target"), CORNERS)
def test_a_kernel_fits(compiler: ProcessPoolExecutor, name: str, width: int, dtype: torch.dtype, target: int) -> None:
    from qkflow.ops.delta_rule.triton_resources import usage

    found = compiler.submit(usage, name, width, width, dtype, target).result()
    assert found.spills == 0
    assert found.shared <= 100 * 1024
    assert 16 <= found.registers <= 255


def test_the_kernels_named_here_are_all_there_are(compiler: ProcessPoolExecutor) -> None:
    from qkflow.ops.delta_rule.triton_resources import KERNELS, names

    assert set(KERNELS) == {*WHOLE, *BACK} == set(compiler.submit(names).result())
