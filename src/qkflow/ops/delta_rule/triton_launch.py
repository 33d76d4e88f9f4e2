"""The delta rule on GPUs: the host side, which launches the Triton kernels.

Outputs, and states where products read them, have the dtype of the values (float32, bfloat16 or float16). The state
itself, the errors and everything inside a chunk are float32. With TRITON_INTERPRET=1 the same kernels run on CPU
tensors, for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from qkflow.ops.delta_rule import triton_backward, triton_forward
from qkflow.ops.delta_rule.chunked import Forward, Saved
from qkflow.ops.delta_rule.inputs import DeltaInputs
from qkflow.ops.delta_rule.triton_tiles import INTERPRETED

_MAX_RECURRENT = 4
"""Number of tokens up to which the recurrence is faster than a chunk."""


class Tile(NamedTuple):
    """Block widths of keys and values, warps per program, and pipeline stages of a kernel."""

    keys: int
    values: int
    warps: int
    stages: int


class Launch(NamedTuple):
    """A kernel with its grid and arguments."""

    kernel: Any
    grid: tuple[int, ...]
    tile: Tile
    arguments: dict[str, Any]
    """Tensors (None if absent) and numbers, by parameter name."""
    constants: dict[str, int]
    """Compile-time constants."""


Run = Callable[[Launch], None]


def chunk_size(requested: int, key: int, dtype: torch.dtype) -> int:
    """The chunk size of the kernels: 16, 32 or 64 tokens, rounded up from `requested`.

    By default (0) it is the largest size whose intermediate results fit in registers, and 16 in the interpreter.

    >>> [chunk_size(requested, 64, torch.float32) for requested in (1, 17, 128)]
    [16, 32, 64]
    """
    if requested < 1:
        is_single = dtype == torch.float32
        requested = 16 if INTERPRETED or (is_single and key > 128) else 32 if is_single else 64
    return next((size for size in (16, 32) if requested <= size), 64)


def tiles(kernel: str, key: int, value: int, dtype: torch.dtype) -> Tile:
    """Tile sizes of a kernel for these widths and this dtype of the values, chosen to fit in registers."""
    is_single = dtype == torch.float32
    if kernel == "recurrent":
        key_block = triton.next_power_of_2(key)
        return Tile(key_block, _fit(value, max(8, min(64, 4096 // key_block)), 1), 4, 1)
    keys, values, warps, stages = {
        "intra_chunk": (32, 32, 4, 1),
        "chunk_states": (64, 16, 4, 2 if key <= 128 else 1) if is_single or key > 64 else (64, 32, 4, 2),
        "chunk_outputs": (64, 64, 4, 1) if is_single else (64, 32, 4, 2),
        "intra_chunk_backward": (32, 32 if is_single else 16, 4, 1),
        "chunk_states_backward": (64, 16, 4, 1)
        if is_single or key > 128
        else (64, 16, 4, 2)
        if key <= 64
        else (128, 16, 8, 1),
        "scores_backward": (64, 32, 4, 1) if is_single else (64, 16, 4, 1),
        "inputs_backward": (64, 16, 4, 1) if is_single else (32, 32, 4, 1),
        "decay_backward": (64, 64, 4, 1),
    }[kernel]
    return Tile(_fit(key, keys), _fit(value, values), warps, stages)


def _fit(width: int, most: int, least: int = 16) -> int:
    """The next power of two, within bounds; tensor cores require at least 16."""
    return min(max(triton.next_power_of_2(width), least), most)


def launch(item: Launch) -> None:
    """Run a kernel on the GPU of its tensors."""
    with torch.cuda.device_of(next(x for x in item.arguments.values() if isinstance(x, Tensor))):
        item.kernel[item.grid](**item.arguments, **item.constants, **({} if INTERPRETED else options(item.tile)))


def options(tile: Tile) -> dict[str, Any]:
    """Compiler options; fused multiply-add is explicit because its default is about to change."""
    return {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}


def forward(
    inputs: DeltaInputs, state: Tensor | None, scale: float, chunk: int, save: bool, run: Run = launch
) -> Forward:
    """Outputs and the final state; `chunk` 0 selects the default size."""
    q, k, v, beta, log_alpha, _ = inputs = inputs.map(Tensor.contiguous)
    state = None if state is None else state.contiguous()
    (n, t, h, width), value_width = q.shape, v.shape[3]
    o, final = torch.empty_like(v), q.new_empty((n, h, value_width, width), dtype=torch.float32)
    call = _Call(run, n, t, h, width, value_width, chunk_size(chunk, width, v.dtype), v.dtype)
    if t <= _MAX_RECURRENT and not save:
        call(triton_forward.recurrent, "rows", **inputs._asdict(), state=state, o=o, final=final, scale=scale)
        return Forward(o, final, v.new_empty(0), v.new_empty(0))
    x_solved, checkpoints = v.new_empty(q.shape), v.new_empty(n, h, call.chunks + 1, width, value_width)
    errors = v.new_empty(v.shape, dtype=torch.float32)
    intra = {name: x for name, x in inputs._asdict().items() if name != "q"}
    call(triton_forward.intra_chunk, "chunks", **intra, x_solved=x_solved, v_solved=errors)
    shared = {"k": k, "beta": beta, "log_alpha": log_alpha, "errors": errors, "checkpoints": checkpoints}
    call(triton_forward.chunk_states, "rows", **shared, state=state, x_solved=x_solved, final=final)
    call(triton_forward.chunk_outputs, "values", **shared, q=q, o=o, scale=scale)
    return Forward(o, final, *((errors, checkpoints) if save else (v.new_empty(0), v.new_empty(0))))


def backward(
    go: Tensor | None,
    gfinal: Tensor | None,
    inputs: DeltaInputs,
    saved: Saved,
    scale: float,
    chunk: int,
    run: Run = launch,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the inputs and of the initial state."""
    q, k, v, beta, log_alpha, erase = inputs.map(Tensor.contiguous)
    go = torch.zeros_like(v) if go is None else go.contiguous()
    gfinal = None if gfinal is None else gfinal.contiguous()
    (n, t, h, width), value_width = q.shape, v.shape[3]
    call = _Call(run, n, t, h, width, value_width, chunk_size(chunk, width, v.dtype), v.dtype)
    x_solved, gn = v.new_empty(q.shape), beta.new_empty(v.shape)
    gcheckpoints = v.new_empty(n, h, call.chunks, width, value_width)
    gv = None if v.dtype == gn.dtype else torch.empty_like(v)
    gq, gk, gstate = torch.empty_like(q), torch.empty_like(k), beta.new_empty(n, h, value_width, width)
    gbeta = beta.new_empty(call.key_blocks, n, t, h)
    gerase = None if erase is None else torch.empty_like(erase)
    gG_read = None if log_alpha is None else torch.empty_like(gbeta)
    gG_end = None if log_alpha is None else beta.new_empty(call.value_blocks, n, h, call.chunks)
    galpha = beta.new_empty(0) if log_alpha is None else torch.empty_like(log_alpha)
    shared = {"q": q, "k": k, "log_alpha": log_alpha, "erase": erase, "go": go, "scale": scale}
    call(triton_backward.intra_chunk_backward, "chunks", **shared, beta=beta, x_solved=x_solved, v_solved=gn)
    states = {"checkpoints": saved.checkpoints, "gn": gn, "gcheckpoints": gcheckpoints}
    outputs = {"gfinal": gfinal, "x_solved": x_solved, "gv": gv, "gG_end": gG_end, "gstate": gstate}
    call(triton_backward.chunk_states_backward, "rows", **shared, **states, **outputs)
    E, F = (beta.new_empty(n, h, call.chunks, call.chunk, call.chunk) for _ in range(2))
    scores = {"errors": saved.errors, "E": E, "F": F}
    call(triton_backward.scores_backward, "chunks", log_alpha=log_alpha, go=go, gn=gn, scale=scale, **scores)
    gradients = {"gq": gq, "gk": gk, "gbeta": gbeta, "gerase": gerase, "gG_read": gG_read}
    call(triton_backward.inputs_backward, "keys", **shared, **states, **scores, **gradients, beta=beta)
    if gG_end is not None:
        call(triton_backward.decay_backward, "chunks", v=v, gn=gn, gG_read=gG_read, gG_end=gG_end, galpha=galpha)
    gv = gn if gv is None else gv
    return gq, gk, gv, _sum(gbeta), galpha, beta.new_empty(0) if gerase is None else gerase, gstate


def _sum(blocks: Tensor) -> Tensor:
    return blocks[0] if len(blocks) == 1 else blocks.sum(0)


class _Call(NamedTuple):
    """Launches kernels over the same tokens."""

    run: Run
    n: int
    t: int
    h: int
    key: int
    value: int
    chunk: int
    dtype: torch.dtype

    @property
    def chunks(self) -> int:
        return triton.cdiv(self.t, self.chunk)

    def tile(self, kernel: Any) -> Tile:
        return tiles(kernel.fn.__name__, self.key, self.value, self.dtype)

    @property
    def key_blocks(self) -> int:
        """Number of blocks of keys in `inputs_backward`."""
        return triton.cdiv(self.key, self.tile(triton_backward.inputs_backward).keys)

    @property
    def value_blocks(self) -> int:
        """Number of blocks of values in `chunk_states_backward`."""
        return triton.cdiv(self.value, self.tile(triton_backward.chunk_states_backward).values)

    def __call__(self, kernel: Any, over: str, **arguments: Any) -> None:
        """Launch one program per row and head (`rows`), or per chunk, times blocks of values or keys."""
        rows, tile = self.n * self.h, self.tile(kernel)
        if not rows:
            return
        grid = {
            "rows": (rows, triton.cdiv(self.value, tile.values)),
            "chunks": (rows * self.chunks,),
            "values": (rows * self.chunks, triton.cdiv(self.value, tile.values)),
            "keys": (rows * self.chunks, triton.cdiv(self.key, tile.keys)),
        }[over]
        possible = {"K": self.key, "V": self.value, "C": self.chunk, "BK": tile.keys, "BV": tile.values}
        possible |= {"BC": 16, "NK": self.key_blocks, "NV": self.value_blocks}
        constants = {name: value for name, value in possible.items() if name in kernel.arg_names}
        self.run(Launch(kernel, grid, tile, {**arguments, "t": self.t, "h": self.h}, constants))
