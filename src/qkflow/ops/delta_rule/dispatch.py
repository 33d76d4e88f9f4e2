r"""`delta_rule`: choose a backend and run it as one PyTorch operator.

    S_t = S_{t-1} diag(\alpha_t) (I - \beta_t x_t k_t^\top) + \beta_t v_t k_t^\top,   o_t = \sigma S_t q_t

| backend   | runs on                          | implementation                                        |
|-----------|----------------------------------|-------------------------------------------------------|
| `triton`  | NVIDIA GPUs, compute capability 8.0 or newer | `triton_*.py`; no float64, no decay per channel |
| `cpu`     | CPUs, with a C compiler          | `cpu.py` and `csrc/delta_rule.c`                      |
| `chunked` | any device                       | matrix products in PyTorch (`chunked.py`)             |
| `naive`   | any device with float64          | the recurrence (`naive.py`), differentiable any number of times |

The first backend that can run is used. The `backend` argument, `use_backend(...)` and the environment variable
QKFLOW_DELTA override this, in that order. On a GPU where `triton` cannot run, a warning gives the reason. On CPU
tensors `triton` runs only on request and with TRITON_INTERPRET=1, which is slow and meant for tests.

NaN and infinity in q, k or v of a token make later outputs of its sequence and head NaN. All backends but `naive` also
return NaN for earlier tokens of the same chunk: they multiply whole chunks, where the weight of a later token is zero,
and zero times NaN is NaN. To select instead of multiplying would cost another pass over the products. Other chunks,
heads and sequences are unaffected, and no output is wrong and finite.

All backends but `naive` run inside the operator `qkflow::delta`, which torch.compile keeps as one node for any length.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from qkflow.errors import UsageError, unknown
from qkflow.layout import Layout
from qkflow.ops.csrc import build
from qkflow.ops.delta_rule import chunked, cpu
from qkflow.ops.delta_rule.inputs import DeltaInputs, check_gates, check_shapes
from qkflow.ops.delta_rule.naive import delta_rule_recurrent

BACKENDS = ("triton", "cpu", "chunked", "naive")
"""All backends, fastest first."""
MIN_CAPABILITY = (8, 0)
"""The first NVIDIA GPUs with tensor-core products in bfloat16 and tf32."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton kernels run in the interpreter, on CPU tensors."""
FLOP_CHUNK = chunked.CHUNK
"""Chunk size for counting FLOPs, whatever chunk size a backend uses."""
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_USE_NAIVE = (
    "use backend 'naive', by `with qkflow.ops.delta_rule.use_backend('naive')` or the environment variable"
    " QKFLOW_DELTA=naive"
)
_warned: set[str] = set()


def _environment_backend() -> str | None:
    return os.environ.get("QKFLOW_DELTA") or None


_requested: str | None = _environment_backend()


def delta_rule(
    q: Float[Tensor, "b t h k"],
    k: Float[Tensor, "b t h k"],
    v: Float[Tensor, "b t h v"],
    beta: Float[Tensor, "b t h"],
    log_alpha: Float[Tensor, "b t h"] | Float[Tensor, "b t h k"] | None = None,
    erase: Float[Tensor, "b t h k"] | Float[Tensor, "b t h"] | None = None,
    state: Float[Tensor, "n h v k"] | None = None,
    layout: Layout | None = None,
    scale: float | None = None,
    *,
    backend: str | None = None,
    chunk: int | None = None,
) -> tuple[Float[Tensor, "b t h v"], Float[Tensor, "n h v k"]]:
    """Outputs, and the state after the last token of each sequence.

    `erase` is the direction x, by default k. One number lambda per head stands for x = k + lambda q, which is faster
    than passing this x. `log_alpha` holds one decay per head or one per key channel; without it nothing decays. The
    state has at least float32 precision whatever the dtype of the inputs. On a GPU, queries, keys and `erase` are cast
    to the dtype of the values. The scale defaults to 1 / sqrt(k). `chunk` affects speed only.

    >>> q, k, v, beta = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 3), torch.rand(1, 5, 2)
    >>> o, state = delta_rule(q[:, :4], k[:, :4], v[:, :4], beta[:, :4])
    >>> last, state = delta_rule(q[:, 4:], k[:, 4:], v[:, 4:], beta[:, 4:], state=state)
    >>> o, final = delta_rule(q, k, v, beta)
    >>> torch.allclose(o[:, 4:], last, atol=1e-5), torch.allclose(final, state, atol=1e-5)
    (True, True)
    """
    inputs = DeltaInputs(q, k, v, beta, log_alpha, erase)
    check_shapes(inputs, state, q.shape[0] if layout is None else len(layout.lengths), chunk)
    backend = choose_backend(q.device, backend, q.dtype, has_vector_decay=inputs.has_vector_decay)
    if layout is not None:
        layout.check(q)
        inputs = inputs.map(lambda x: layout.to_rows(layout.zero_padding(x)))
    if backend != "cpu" and not torch.compiler.is_compiling():  # the C kernel checks the gates itself
        check_gates(inputs.beta, inputs.log_alpha, inputs.erase)
    if erase is not None and backend != "cpu":
        inputs = inputs._replace(erase=inputs.direction)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    state_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if backend == "naive":
        o, final = delta_rule_recurrent(*inputs, state, factor)
    else:
        state = None if state is None else state.to(state_dtype)
        o, final = _run(_cast(inputs, state_dtype, backend), state, factor, chunk or 0, backend)
    o = o.to(v.dtype)
    return (o if layout is None else layout.to_batch(o)), final.to(state_dtype)


def _cast(inputs: DeltaInputs, state_dtype: torch.dtype, backend: str) -> DeltaInputs:
    """Everything in the state's dtype, except that Triton takes vectors in the dtype of the values."""
    if backend != "triton":
        return inputs.map(lambda x: x.to(state_dtype))
    dtype = inputs.v.dtype if inputs.v.dtype in (torch.bfloat16, torch.float16) else state_dtype
    vectors = ("q", "k", "v", "erase")
    tensors = {
        name: x if x is None else x.to(dtype if name in vectors else state_dtype)
        for name, x in inputs._asdict().items()
    }
    return DeltaInputs(**tensors)  # pyright: ignore[reportArgumentType]


# ---- choice of the backend


@contextmanager
def use_backend(backend: str | None) -> Iterator[None]:
    """Use this backend inside the `with` block; None restores the automatic choice.

    >>> with use_backend("naive"):
    ...     choose_backend(torch.device("cpu"))
    'naive'
    """
    global _requested
    if backend is not None and backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    previous, _requested = _requested, backend
    try:
        yield
    finally:
        _requested = previous


def choose_backend(
    device: torch.device,
    backend: str | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    has_vector_decay: bool = False,
) -> str:
    """The backend for queries of this device and dtype; an explicit `backend` is checked and returned.

    For a decay per key channel, `chunked` replaces `triton`, with a warning.

    >>> choose_backend(torch.device("cpu"), "chunked")
    'chunked'
    """
    requested = backend or _requested
    if requested is not None and requested not in BACKENDS:
        raise unknown("backend", requested, BACKENDS)
    if requested in ("chunked", "naive"):
        return requested
    if requested == "triton" or (requested is None and device.type == "cuda"):
        chosen = _triton_or_chunked(device, dtype, is_explicit=requested is not None)
        return _without_vector_decay() if chosen == "triton" and has_vector_decay else chosen
    if not torch.compiler.is_compiling():
        build.load()
    if device.type == "cpu" and build.is_loaded():
        return "cpu"
    if requested == "cpu":
        reason = f"the tensors are on {device.type}" if device.type != "cpu" else build.load_error()
        raise UsageError(f"backend 'cpu' of the delta rule cannot run: {reason}; use backend 'chunked'")
    return "chunked"


def triton_error(device: torch.device, dtype: torch.dtype = torch.float32) -> str | None:
    """The reason why the Triton kernels cannot run on a device; None if they can."""
    if not _HAS_TRITON:
        return "triton is not installed (pip install triton)"
    if dtype == torch.float64:
        return "the kernels have no float64: cast the tensors to float32, bfloat16 or float16"
    if device.type == "cpu":
        return None if INTERPRETED else "the tensors are on a CPU, which requires TRITON_INTERPRET=1 (slow)"
    if device.type != "cuda" or torch.version.cuda is None:
        return f"the kernels require an NVIDIA GPU, and the tensors are on {device.type}"
    if torch.compiler.is_compiling():
        return None  # a graph cannot query the device
    if (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        required, actual = (".".join(map(str, version)) for version in (MIN_CAPABILITY, capability))
        return f"the kernels require compute capability {required}, and {device} has {actual}"
    return None


def _triton_or_chunked(device: torch.device, dtype: torch.dtype, is_explicit: bool) -> str:
    reason = triton_error(device, dtype)
    if reason is None:
        return "triton"
    if is_explicit:
        raise UsageError(f"backend 'triton' of the delta rule cannot run: {reason}; or use backend 'chunked'")
    _warn_once(f"the Triton kernels of the delta rule cannot run: {reason}")
    return "chunked"


def _without_vector_decay() -> str:
    _warn_once("the Triton kernels of the delta rule have one decay per head, not one per key channel")
    return "chunked"


def _warn_once(reason: str) -> None:
    is_child = multiprocessing.parent_process() is not None  # the parent has warned already
    if not torch.compiler.is_compiling() and reason not in _warned and not is_child:
        _warned.add(reason)
        warnings.warn(
            f"{reason}; falling back to PyTorch, which is slower (set QKFLOW_DELTA=chunked to silence this warning)",
            RuntimeWarning,
            stacklevel=5,
        )


# ---- the operator qkflow::delta and its backward

_OPS = torch.library.Library("qkflow", "FRAGMENT")
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? log_alpha, Tensor? erase"
_OPS.define(f"delta({_INPUTS}, Tensor? state, float scale, int chunk, bool save, str backend) -> Tensor[]")
_OPS.define(
    f"delta_backward(Tensor? go, Tensor? gfinal, {_INPUTS}, Tensor o, Tensor errors, Tensor checkpoints,"
    " float scale, int chunk, str backend) -> Tensor[]"
)


def _run(inputs: DeltaInputs, state: Tensor | None, scale: float, chunk: int, backend: str) -> tuple[Tensor, Tensor]:
    if not torch.compiler.is_compiling() and peek_interpreter_stack() is not None:
        raise NotImplementedError(f"the fast delta rule has no rule for torch.func: {_USE_NAIVE}")
    has_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, state))
    if has_gradient and not torch.compiler.is_exporting():  # exported graphs have no backward pass
        return _DeltaRule.apply(*inputs, state, scale, chunk, backend)  # pyright: ignore[reportReturnType]
    o, final, *_ = _call_forward(*inputs, state, scale, chunk, False, backend)
    return o, final


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *tensors, scale, chunk, backend = args
        o, final, errors, checkpoints = _call_forward(*tensors, scale, chunk, True, backend)
        ctx.settings, ctx.has_state = (scale, chunk, backend), tensors[6] is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[:6], o, errors, checkpoints)
        return o, final

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                f"the fast delta rule can be differentiated only once: for higher derivatives, {_USE_NAIVE}"
            )
        saved, (go, gfinal) = ctx.saved_tensors, grads
        if go is None and gfinal is None:
            return (None,) * 10
        gradients = torch.ops.qkflow.delta_backward(go, gfinal, *saved, *ctx.settings)
        ginputs = [None if x is None else gradient for x, gradient in zip(saved[:6], gradients[:6], strict=True)]
        return (*ginputs, gradients[6] if ctx.has_state else None, None, None, None)


def _call_forward(*args: Any) -> list[Tensor]:
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return torch.ops.qkflow.delta(*args)
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in args[:7] if x is not None
    ):
        raise NotImplementedError(f"the fast delta rule has no forward-mode derivative: {_USE_NAIVE}")
    return _forward(*args)  # bypasses the dispatcher, whose overhead matters in decoding


def _forward(*args: Any) -> list[Tensor]:
    inputs, (*settings, backend) = DeltaInputs(*args[:6]), args[6:]
    if backend == "cpu":
        return [*cpu.forward(inputs, *settings)]
    with _no_autocast(inputs.q.device.type), torch.cuda.device_of(inputs.q):
        return [*_module(backend).forward(inputs, *settings)]


def _checked_forward(*args: Any) -> list[Tensor]:
    _check_operands(DeltaInputs(*args[:6]), args[6], *args[-3::2])
    return _forward(*args)


def _checked_backward(*args: Any) -> list[Tensor]:
    _check_saved(*args)
    return _backward(*args)


def _check_operands(inputs: DeltaInputs, state: Tensor | None, chunk: int, backend: str) -> None:
    """Raise if the operators cannot run on these tensors."""
    check_shapes(inputs, state, inputs.q.shape[0], chunk or None)
    if backend not in BACKENDS[:-1]:
        raise UsageError(f"the operator qkflow::delta has no backend {backend!r}: expected one of {BACKENDS[:-1]}")
    if backend == "cpu" and inputs.q.device.type not in ("cpu", "meta"):
        raise UsageError(f"backend 'cpu' of the delta rule cannot run: the tensors are on {inputs.q.device.type}")
    if backend != "triton" and any(x is not None and x.dtype != inputs.q.dtype for x in (*inputs, state)):
        raise UsageError(f"the operands of qkflow::delta have several dtypes: expected {inputs.q.dtype} for all")


def _check_saved(go: Tensor | None, gfinal: Tensor | None, *args: Any) -> None:
    inputs, saved, (_, chunk, backend) = DeltaInputs(*args[:6]), args[6:9], args[9:]
    _check_operands(inputs, None, chunk, backend)
    if any(x is None for x in saved):
        raise UsageError("the backward pass of the delta rule requires o, errors and checkpoints, got None")
    q, v, state_shape = inputs.q, inputs.v, (inputs.q.shape[0], inputs.q.shape[2], inputs.v.shape[3], inputs.q.shape[3])
    shapes = (v.shape, state_shape, v.shape, *_saved_shapes(inputs, chunk, backend))
    for x, shape in zip((go, gfinal, *saved), shapes, strict=True):
        if x is not None and (x.shape != shape or x.device != q.device or (x.dtype != q.dtype and backend != "triton")):
            raise UsageError(
                f"the backward pass of the delta rule expected {q.dtype} {[*shape]} on {q.device}, got {x.dtype}"
                f" {[*x.shape]} on {x.device}"
            )


def _backward(*args: Any) -> list[Tensor]:
    inputs, saved, (scale, chunk, backend) = DeltaInputs(*args[2:8]), chunked.Saved(*args[8:11]), args[11:]
    with _no_autocast(inputs.q.device.type), torch.cuda.device_of(inputs.q):
        return [*_module(backend).backward(*args[:2], inputs, saved, scale, chunk)]


def _module(backend: str) -> Any:
    if backend == "triton":
        from qkflow.ops.delta_rule import triton_launch  # imports triton

        return triton_launch
    return cpu if backend == "cpu" else chunked


def _no_autocast(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def _forward_shapes(*args: Any) -> list[Tensor]:
    inputs, (state, _, chunk, save, backend) = DeltaInputs(*args[:6]), args[6:]
    _check_operands(inputs, state, chunk, backend)
    q, v = inputs.q, inputs.v
    n, _, h, width = q.shape
    like_state = q if backend != "triton" else q.new_empty(0, dtype=torch.float32)
    o, final = v.new_empty(v.shape), like_state.new_empty(n, h, v.shape[3], width)
    if not save:
        return [o, final, v.new_empty(0), v.new_empty(0)]
    errors, checkpoints = _saved_shapes(inputs, chunk, backend)
    return [o, final, like_state.new_empty(errors), v.new_empty(checkpoints)]


def _saved_shapes(inputs: DeltaInputs, chunk: int, backend: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the errors and checkpoints that the forward pass saves."""
    v, (n, t, h, width), value_width = inputs.v, inputs.q.shape, inputs.v.shape[3]
    if backend == "triton":
        n_checkpoints = _ceil_div(t, _module(backend).chunk_size(chunk, width, v.dtype)) + 1
        return v.shape, (n, h, n_checkpoints, width, value_width)
    if backend == "cpu":
        return v.shape, (n, h, _ceil_div(t, cpu.checkpoint_interval(chunk)), width, value_width)
    size = chunked.chunk_size(chunk, inputs.has_vector_decay)
    n_chunks = _ceil_div(t, size)
    return (n_chunks, n * h, size, value_width), (n_chunks + 1, n * h, width, value_width)


def _ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


def _backward_shapes(go: Any, gfinal: Any, *args: Any) -> list[Tensor]:
    _check_saved(go, gfinal, *args)
    q, k, v, beta, log_alpha, erase, *_ = args
    n, _, h, width = q.shape
    optional = [beta.new_empty(0) if x is None else x.new_empty(x.shape) for x in (log_alpha, erase)]
    return [*(x.new_empty(x.shape) for x in (q, k, v, beta)), *optional, beta.new_empty(n, h, v.shape[3], width)]


_OPS.impl("delta", _checked_forward, "CompositeExplicitAutograd")
_OPS.impl("delta_backward", _checked_backward, "CompositeExplicitAutograd")
_OPS.impl("delta", _forward_shapes, "Meta")
_OPS.impl("delta_backward", _backward_shapes, "Meta")


# ---- FLOPs


def delta_rule_flops(t: int, heads: int, key_width: int, value_width: int) -> int:
    """FLOPs of one sequence: two scores, a solve and a read-out per pair of a chunk, three products with the state.

    >>> delta_rule_flops(64, 1, 64, 64) == 10 * 64**3
    True
    """
    return heads * (2 * _pairs(t) * (key_width + value_width) + 6 * t * key_width * value_width)


def _pairs(t: int) -> int:
    """Ordered pairs of tokens in the same chunk."""
    n_chunks, remainder = divmod(t, FLOP_CHUNK)
    return n_chunks * FLOP_CHUNK**2 + remainder**2


@register_flop_formula(torch.ops.qkflow.delta)
def _forward_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:  # arguments are shapes
    return q[0] * delta_rule_flops(q[1], q[2], q[3], v[3])


@register_flop_formula(torch.ops.qkflow.delta_backward)
def _backward_flops(go: Any, gfinal: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """The scores again, their gradients and the gradients through them; twice the products with the state."""
    n, t, h, width = q
    return n * h * (_pairs(t) * (6 * width + 4 * v[3]) + 12 * t * width * v[3])
