"""The delta rule on CPUs, by the C kernel `csrc/delta_rule.c`."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkflow.ops import few_rows
from qkflow.ops.csrc import build
from qkflow.ops.delta_rule.chunked import Forward, Saved
from qkflow.ops.delta_rule.inputs import MAX_CHUNK, MAX_KEY_WIDTH, DeltaInputs, check_gates

CHUNK = 32
"""Default chunk size. Compared with 64 it halves the products between pairs of tokens and is better conditioned."""
_CHECKPOINT_CHUNKS = 16
"""Chunks between two saved states; CHECKPOINT_CHUNKS in the C code."""
_MAX_RECURRENT = 4
"""Number of tokens up to which the recurrence is faster than a chunk."""
_BAD_GATES = 2
"""Status code of the kernel for gates out of range."""
_Step, _StepArrays = ctypes.c_long * 10, ctypes.c_void_p * 36
_HUGE_PAGES_FROM, _PAGE, _MADV_HUGEPAGE = 2**22, 2**12, 14


def checkpoint_interval(chunk: int) -> int:
    """Tokens between two saved states."""
    return _chunk_size(chunk) * _CHECKPOINT_CHUNKS


def _channels(inputs: DeltaInputs) -> tuple[bool, bool]:
    """Whether the decay and the erase direction have one number per key channel."""
    return inputs.has_vector_decay, inputs.erase is not None and inputs.erase.ndim == 4


def _chunk_size(chunk: int) -> int:
    return min(max(chunk, 0) or CHUNK, MAX_CHUNK)


def forward(inputs: DeltaInputs, state: Tensor | None, scale: float, chunk: int, save: bool) -> Forward:
    """Outputs and the final state; `chunk` 0 selects the default size."""
    q, v = inputs.q, inputs.v
    (n, t, h, width), value_width = q.shape, v.shape[3]
    o, final = _empty(v, v.shape), _empty(q, (n, h, value_width, width))
    if t <= _MAX_RECURRENT and not save and width <= MAX_KEY_WIDTH:
        settings = (*_channels(inputs), scale)
        _call("delta_recurrent", "iid", (n, t, h, width, value_width), settings, (*inputs, state, o, final))
        return Forward(o, final, q.new_empty(0), q.new_empty(0))
    errors = checkpoints = None
    if save:
        interval = checkpoint_interval(chunk)
        errors = _empty(v, v.shape)
        checkpoints = _empty(q, (n, h, (t + interval - 1) // interval, width, value_width))
    settings = (_chunk_size(chunk), *_channels(inputs), scale, torch.get_num_threads())
    tensors = (*inputs, state, o, final, errors, checkpoints)
    _call("delta_forward", "iiidi", (n, t, h, width, value_width), settings, tensors)
    return Forward(o, final, *(q.new_empty(0) if x is None else x for x in (errors, checkpoints)))


def backward(
    go: Tensor | None, gfinal: Tensor | None, inputs: DeltaInputs, saved: Saved, scale: float, chunk: int
) -> tuple[Tensor, ...]:
    """Gradients of the inputs and of the initial state."""
    (n, t, h, width), value_width = inputs.q.shape, inputs.v.shape[3]
    grads = [None if x is None else _empty(x, x.shape) for x in inputs]
    gstate = _empty(inputs.q, (n, h, value_width, width))
    settings = (_chunk_size(chunk), *_channels(inputs), scale, torch.get_num_threads())
    tensors = (*inputs, go, gfinal, *saved, *grads, gstate)
    _call("delta_backward", "iiidi", (n, t, h, width, value_width), settings, tensors)
    return *(gstate.new_empty(0) if x is None else x for x in grads), gstate


class StepWeights(NamedTuple):
    """The weights of a layer in the order of the kernel; None for what it does not have."""

    projections: tuple[Tensor | None, ...]
    """Of queries, keys, values, own directions, beta, the rate of the decay, lambda (or gamma) and the gate."""
    convs: tuple[Tensor | None, ...]
    """Of queries, keys, values and own directions."""
    decay: tuple[Tensor | None, Tensor | None, Tensor | None]
    """The second projection of the rate, if there is one per key channel; A_log and dt_bias."""
    feedback: tuple[Tensor | None, Tensor | None]
    """The numbers b and d of each head, with which the erase direction is sigmoid(b) k and the query is corrected."""
    head_norm: Tensor
    output: Tensor


def layer_step(
    x: Tensor,
    weights: StepWeights,
    memory: Tensor,
    conv_state: tuple[Tensor, ...],
    lam: float,
    lam_bias: float,
    erase_first: bool,
    coupling: few_rows.CouplingStep,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]] | None:
    """One token of a layer in one native call: the output, the next memory and the next convolution states.

    `lam` is the constant lambda of a layer that does not project it. With `erase_first`, a step that erases along the
    own direction, with its gate in the place of lambda, precedes the write. None if the gates are not finite.
    """
    (rows, _, width), (_, heads, value, key), taps = x.shape, memory.shape, conv_state[0].shape[1] + 1
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    final, tails = torch.empty_like(memory), tuple([torch.empty_like(state) for state in conv_state])
    coupling_sizes, coupling_pointers = few_rows.coupling_arguments(coupling)
    own = (None,) * (4 - len(conv_state))
    tensors = (x, *weights.projections, *weights.convs, *conv_state, *own, memory, *weights.decay, *weights.feedback)
    tensors += weights.head_norm, weights.output
    pointers = [None if w is None else w.data_ptr() for w in tensors]
    outputs = [None if w is None else w.data_ptr() for w in (*tails, *own, final, y)]
    threads = 1 if weights.output.numel() <= few_rows.SINGLE_THREAD else torch.get_num_threads()
    sizes = _Step(rows, width, heads, key, value, taps, erase_first, *coupling_sizes)
    arrays = _StepArrays(*pointers, *coupling_pointers, *outputs)
    status = build.call("delta_layer_few", "dddipp", (coupling.dt, lam, lam_bias, threads, sizes, arrays), (), x.dtype)
    if status & _BAD_GATES:
        return None
    if status:
        raise MemoryError("the C kernel of the delta rule could not allocate its buffers")
    return y, final, tails


def _call(
    name: str, signature: str, shape: tuple[int, ...], settings: tuple[Any, ...], tensors: tuple[Tensor | None, ...]
) -> None:
    if 0 in shape:
        return
    status = build.call(name, "lliii" + signature, (*shape, *settings), tensors)
    if status == _BAD_GATES:
        check_gates(*tensors[3:6])  # pyright: ignore[reportArgumentType]
    if status:
        raise MemoryError("the C kernel of the delta rule could not allocate its buffers")


def _empty(like: Tensor, shape: Any) -> Tensor:
    """An empty tensor, on huge pages if it is large: page faults on small ones cost as much as the kernel itself."""
    result = torch.empty(shape, dtype=like.dtype, device=like.device)
    if result.nbytes >= _HUGE_PAGES_FROM and (madvise := _madvise()) is not None:
        start = -result.data_ptr() % _PAGE + result.data_ptr()
        madvise(start, (result.data_ptr() + result.nbytes - start) // _PAGE * _PAGE, _MADV_HUGEPAGE)
    return result


@cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
