"""The delta rule on GPUs: the host's side of the Triton kernels, which it gives tensors, places and sizes of tiles.

The type of the values (float32, bfloat16 or float16) is that of outputs and of memories where products read them; the
memory itself, the errors and everything inside a chunk are float32. With TRITON_INTERPRET=1 in the environment the same
kernels run on CPU tensors, for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from qkflow.ops.delta_rule import triton_backward, triton_forward
from qkflow.ops.delta_rule.chunked import Forward, Kept
from qkflow.ops.delta_rule.inputs import Inputs
from qkflow.ops.delta_rule.triton_parts import INTERPRETED

_FEW = 4
"""Tokens up to which the recurrence itself is faster."""


class Tile(NamedTuple):
    """How a kernel is cut: columns of a block of keys and of values, warps of a program, and stages of its loops."""

    keys: int
    values: int
    warps: int
    stages: int


class Launch(NamedTuple):
    """One kernel with all it is given: of a program it is what is run, or looked at."""

    kernel: Any
    grid: tuple[int, ...]
    tile: Tile
    given: dict[str, Any]
    """Tensors, None for those left out, and numbers, by the kernel's names."""
    constants: dict[str, int]
    """What the kernel is compiled for."""


Run = Callable[[Launch], None]


def chunk_of(asked: int, key: int, dtype: torch.dtype) -> int:
    """Chunks that the kernels are made for: 16, 32 or 64 tokens, the next that holds as many as asked for.

    Left to us they are as long as registers hold what is inside of one; the interpreter likes them short.

    >>> [chunk_of(asked, 64, torch.float32) for asked in (1, 17, 128)]
    [16, 32, 64]
    """
    if asked < 1:
        asked = 16 if INTERPRETED or (dtype == torch.float32 and key > 128) else 32 if dtype == torch.float32 else 64
    return next((size for size in (16, 32) if asked <= size), 64)


def tiles(kernel: str, key: int, value: int, dtype: torch.dtype) -> Tile:
    """How a kernel is cut for these widths and this type of values: such that it fits into a GPU's registers."""
    single = dtype == torch.float32
    if kernel == "few":
        wide = triton.next_power_of_2(key)
        return Tile(wide, _fit(value, max(8, min(64, 4096 // wide)), 1), 4, 1)
    keys, values, warps, stages = {
        "inside": (32, 32, 4, 1),
        "states": (64, 16, 4, 2 if key <= 128 else 1) if single or key > 64 else (64, 32, 4, 2),
        "outputs": (64, 64, 4, 1) if single else (64, 32, 4, 2),
        "inside_backward": (32, 32 if single else 16, 4, 1),
        "states_backward": (64, 16, 4, 1) if single or key > 128 else (64, 16, 4, 2) if key <= 64 else (128, 16, 8, 1),
        "pairs_backward": (64, 32, 4, 1) if single else (64, 16, 4, 1),
        "gradients": (64, 16, 4, 1) if single else (32, 32, 4, 1),
        "decay_backward": (64, 64, 4, 1),
    }[kernel]
    return Tile(_fit(key, keys), _fit(value, values), warps, stages)


def _fit(width: int, most: int, least: int = 16) -> int:
    """The next power of two, within bounds: tensor cores want at least 16."""
    return min(max(triton.next_power_of_2(width), least), most)


def launch(it: Launch) -> None:
    """Run it on the GPU where its tensors are, whichever is the current one."""
    with torch.cuda.device_of(next(x for x in it.given.values() if isinstance(x, Tensor))):
        it.kernel[it.grid](**it.given, **it.constants, **({} if INTERPRETED else options(it.tile)))


def options(tile: Tile) -> dict[str, Any]:
    """What the compiler is told; fusing a product with a sum is said aloud, since its default is about to change."""
    return {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}


def forward(given: Inputs, state: Tensor | None, scale: float, chunk: int, keep: bool, run: Run = launch) -> Forward:
    """Outputs and the memory after the last token; `chunk` 0 leaves it to us."""
    q, k, v, beta, log_alpha, _ = given = given.map(Tensor.contiguous)
    state = None if state is None else state.contiguous()
    (n, t, h, width), deep = q.shape, v.shape[3]
    o, final = torch.empty_like(v), q.new_empty((n, h, deep, width), dtype=torch.float32)
    call = _Call(run, n, t, h, width, deep, chunk_of(chunk, width, v.dtype), v.dtype)
    if t <= _FEW and not keep:
        call(triton_forward.few, "rows", **given._asdict(), state=state, o=o, final=final, scale=scale)
        return Forward(o, final, v.new_empty(0), v.new_empty(0))
    by, marks = v.new_empty(q.shape), v.new_empty(n, h, call.chunks + 1, width, deep)
    errors = v.new_empty(v.shape, dtype=torch.float32)
    gates = {"beta": beta, "log_alpha": log_alpha}
    call(triton_forward.inside, "chunks", **given._asdict(), by=by, ahead=errors)
    call(triton_forward.states, "rows", k=k, **gates, state=state, by=by, errors=errors, marks=marks, final=final)
    call(triton_forward.outputs, "values", q=q, k=k, **gates, errors=errors, marks=marks, o=o, scale=scale)
    return Forward(o, final, *((errors, marks) if keep else (v.new_empty(0), v.new_empty(0))))


def backward(
    go: Tensor | None,
    gfinal: Tensor | None,
    given: Inputs,
    kept: Kept,
    scale: float,
    chunk: int,
    run: Run = launch,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the inputs, and of the memory before the first token."""
    q, k, v, beta, log_alpha, lam = given.map(Tensor.contiguous)
    go = torch.zeros_like(v) if go is None else go.contiguous()
    gfinal = None if gfinal is None else gfinal.contiguous()
    (n, t, h, width), deep = q.shape, v.shape[3]
    call = _Call(run, n, t, h, width, deep, chunk_of(chunk, width, v.dtype), v.dtype)
    by, gn, gmarks = v.new_empty(q.shape), beta.new_empty(v.shape), v.new_empty(n, h, call.chunks, width, deep)
    gv = None if v.dtype == gn.dtype else torch.empty_like(v)
    gq, gk, gstate = torch.empty_like(q), torch.empty_like(k), beta.new_empty(n, h, deep, width)
    gbeta = beta.new_empty(call.blocks(triton_backward.gradients)[0], n, t, h)
    glam = None if lam is None else torch.empty_like(gbeta)
    reads = None if log_alpha is None else torch.empty_like(gbeta)
    parts = call.blocks(triton_backward.states_backward)[1]
    ends = None if log_alpha is None else beta.new_empty(parts, n, h, call.chunks)
    galpha = beta.new_empty(0) if log_alpha is None else torch.empty_like(log_alpha)
    pair, shared = {"q": q, "k": k}, {"log_alpha": log_alpha, "lam": lam, "go": go, "scale": scale}
    call(triton_backward.inside_backward, "chunks", **pair, **shared, beta=beta, by=by, ahead=gn)
    memory = {"marks": kept.marks, "gn": gn, "gmarks": gmarks}
    passed = {"gfinal": gfinal, "by": by, "gv": gv, "ends": ends, "gstate": gstate}
    call(triton_backward.states_backward, "rows", **pair, **shared, **memory, **passed)
    E, F = (beta.new_empty(n, h, call.chunks, call.chunk, call.chunk) for _ in range(2))
    met = {"errors": kept.errors, "E": E, "F": F}
    call(triton_backward.pairs_backward, "chunks", log_alpha=log_alpha, go=go, gn=gn, scale=scale, **met)
    made = {"gq": gq, "gk": gk, "gbeta": gbeta, "glam": glam, "reads": reads}
    call(triton_backward.gradients, "keys", **pair, **shared, **memory, **met, **made, beta=beta)
    if ends is not None:
        call(triton_backward.decay_backward, "chunks", v=v, gn=gn, reads=reads, ends=ends, galpha=galpha)
    return (
        gq,
        gk,
        gn if gv is None else gv,
        _sum(gbeta),
        galpha,
        beta.new_empty(0) if glam is None else _sum(glam),
        gstate,
    )


def _sum(parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(0)


class _Call(NamedTuple):
    """Kernels over the same tokens."""

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

    def blocks(self, kernel: Any) -> tuple[int, int]:
        """Blocks of keys and of values."""
        tile = tiles(_name(kernel), self.key, self.value, self.dtype)
        return triton.cdiv(self.key, tile.keys), triton.cdiv(self.value, tile.values)

    def __call__(self, kernel: Any, over: str, **given: Any) -> None:
        """One program for each row and head, or for each of their chunks, and perhaps for each block of them."""
        rows, (keys, values) = self.n * self.h, self.blocks(kernel)
        if not rows:
            return
        tile = tiles(_name(kernel), self.key, self.value, self.dtype)
        grid = {
            "rows": (rows, values),
            "chunks": (rows * self.chunks,),
            "values": (rows * self.chunks, values),
            "keys": (rows * self.chunks, keys),
        }[over]
        parts = self.blocks(triton_backward.gradients)[0], self.blocks(triton_backward.states_backward)[1]
        known = {"K": self.key, "V": self.value, "C": self.chunk, "BK": tile.keys, "BV": tile.values}
        known |= {"BC": 16, "NK": parts[0], "NV": parts[1]}
        constants = {name: value for name, value in known.items() if name in kernel.arg_names}
        self.run(Launch(kernel, grid, tile, {**given, "t": self.t, "h": self.h}, constants))


def _name(kernel: Any) -> str:
    return kernel.fn.__name__
