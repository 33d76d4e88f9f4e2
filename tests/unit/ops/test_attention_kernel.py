"""The C kernel of attention: equal to the definition in values and gradients, deterministic, and safe to misuse."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from qkflow.errors import UsageError
from qkflow.ops.attention import attention, attention_naive, choose_backend, use_backend
from qkflow.ops.csrc import build

pytestmark = pytest.mark.skipif(build.load_error() is not None, reason=f"no C kernels: {build.load_error()}")


def inputs(
    t: int,
    s: int,
    *,
    rows: int = 2,
    heads: int = 2,
    groups: int = 1,
    width: int = 16,
    values: int = 16,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = (rows, t, heads, width), (rows, s, groups, width), (rows, s, groups, values)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def values_and_gradients(function: Callable[..., Tensor], args: list[Tensor], **options: Any) -> list[Tensor]:
    o = function(*args, **options)
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(o.dtype)
    return [o, *torch.autograd.grad(o, args, weight)]


def require_parity(args: list[Tensor], **options: Any) -> None:
    actual = values_and_gradients(attention, args, backend="cpu", **options)
    doubles = [x.detach().double().requires_grad_() for x in args]
    expected = values_and_gradients(attention_naive, doubles, **options)
    tolerance = 1e-10 if args[0].dtype == torch.float64 else 1e-4
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == args[0].dtype
        assert float((a.detach().double() - b.detach()).abs().max() / b.detach().abs().max().clamp(min=0.1)) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [16, 24, 32, 64, 128])
@pytest.mark.parametrize("t", [5, 64, 150])
def test_causal_attention_equals_the_definition(t: int, width: int, dtype: torch.dtype) -> None:
    require_parity(inputs(t, t, width=width, values=width, dtype=dtype), causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("t", "s"), [(1, 1), (1, 200), (3, 130), (70, 70), (130, 67)])
def test_without_causality_every_key_is_visible(t: int, s: int, dtype: torch.dtype) -> None:
    require_parity(inputs(t, s, dtype=dtype), scale=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cached", [1, 3, 64, 101])
@pytest.mark.parametrize("t", [1, 2, 65])
def test_queries_are_the_last_of_the_keys(t: int, cached: int, dtype: torch.dtype) -> None:
    require_parity(inputs(t, cached + t, dtype=dtype), causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cached", [0, 7, 90])
@pytest.mark.parametrize("window", [1, 2, 17, 64, 100, 1000])
def test_windows(window: int, cached: int, dtype: torch.dtype) -> None:
    require_parity(inputs(140, 140 + cached, dtype=dtype), causal=True, window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("heads", "groups"), [(3, 3), (6, 2), (8, 1)])
def test_grouped_queries(heads: int, groups: int, dtype: torch.dtype) -> None:
    require_parity(inputs(70, 70, heads=heads, groups=groups, dtype=dtype), causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("width", "values"), [(16, 32), (32, 16), (1, 3), (33, 7), (256, 130)])
def test_values_may_have_another_width(width: int, values: int, dtype: torch.dtype) -> None:
    require_parity(inputs(66, 66, width=width, values=values, dtype=dtype), causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_strided_inputs_are_read_in_place(dtype: torch.dtype) -> None:
    joint = torch.randn(2, 70, 3, 4, 2, 16, dtype=dtype).requires_grad_()  # [b t qkv h two k]

    def strided(joint: Tensor, function: Callable[..., Tensor], **options: Any) -> Tensor:
        q, k, v = joint.unbind(2)
        return function(q[:, :, :, 0], k[:, :, :, 1].flip(1), v.transpose(-1, -2)[..., 1], causal=True, **options)

    actual = strided(joint, attention, backend="cpu")
    weight = torch.randn(actual.shape[2:], dtype=dtype).expand_as(actual)
    expected = strided(joint.double(), attention_naive)
    tolerance = {"rtol": 0, "atol": 1e-10 if dtype == torch.float64 else 1e-4}
    assert_close(actual.double(), expected, **tolerance)
    gradients = [torch.autograd.grad(y, joint, weight.to(y.dtype))[0] for y in (actual, expected)]
    assert_close(*gradients, **tolerance)


def test_gradients_pass_gradcheck() -> None:
    args = inputs(5, 9, rows=1, heads=4, groups=2, width=3, values=5)

    def function(*args: Tensor) -> Tensor:
        return attention(*args, causal=True, window=4, backend="cpu")

    assert torch.autograd.gradcheck(function, args)
    assert torch.autograd.gradgradcheck(function, args)
    for frozen in range(3):
        assert torch.autograd.gradgradcheck(function, [x.detach() if i == frozen else x for i, x in enumerate(args)])


@pytest.mark.parametrize("causal", [False, True])
def test_keys_may_be_permuted_without_causality(causal: bool) -> None:
    q, k, v = inputs(90, 90)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0))
    y = attention(q, k, v, causal=causal, backend="cpu")
    permuted = attention(q, k[:, order], v[:, order], causal=causal, backend="cpu")
    assert torch.allclose(y, permuted, rtol=0, atol=1e-12) != causal


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hidden_keys_change_no_bit(dtype: torch.dtype) -> None:
    args = inputs(150, 150, dtype=dtype)
    changed = [torch.cat([x[:, :77], 1e4 * x[:, 77:]], 1).detach().requires_grad_() for x in args]
    y, *gradients = values_and_gradients(lambda *x: attention(*x, causal=True, backend="cpu")[:, :77], args)
    z, *others = values_and_gradients(lambda *x: attention(*x, causal=True, backend="cpu")[:, :77], changed)
    assert torch.equal(y, z)
    for a, b in zip(gradients, others, strict=True):
        assert torch.equal(a[:, :77], b[:, :77])
        assert not a[:, 77:].any()


@pytest.mark.parametrize("causal", [False, True])
def test_results_do_not_depend_on_threads(causal: bool) -> None:
    args, n_threads = inputs(200, 300, heads=4, groups=2, dtype=torch.float32), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(values_and_gradients(attention, args, causal=causal, backend="cpu"))
    finally:
        torch.set_num_threads(n_threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-3, 1e2, 1e6])
def test_scores_of_any_size(size: float, dtype: torch.dtype) -> None:
    q, k, v = (x.detach() for x in inputs(70, 70, dtype=dtype))
    y = attention(size * q, k, v, causal=True, backend="cpu")
    expected = attention_naive((size * q).double(), k.double(), v.double(), causal=True)
    assert_close(y.double(), expected, rtol=0, atol=1e-10 if dtype == torch.float64 else max(1e-4, 1e-7 * size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_is_passed_on(which: int, dtype: torch.dtype) -> None:
    args = inputs(70, 70, dtype=dtype)
    with torch.no_grad():
        args[which][0, 40, 0, 3] = math.nan
    y, *gradients = values_and_gradients(attention, args, causal=True, backend="cpu")
    assert y[0, 40, 0].isnan().any()
    assert all(x[0].isnan().any() for x in gradients[:2])
    assert all(x[1].isfinite().all() for x in (y, *gradients))


@pytest.mark.parametrize(("t", "s"), [(0, 5), (0, 0), (5, 0)])
@pytest.mark.parametrize("rows", [0, 2])
def test_no_tokens_have_zero_gradients(t: int, s: int, rows: int) -> None:
    args = inputs(t, s, rows=rows)
    y, *gradients = values_and_gradients(attention, args, backend="cpu")
    assert y.shape == (rows, t, 2, 16)
    assert not y.any()
    assert not any(x.any() for x in gradients)


def call(*shapes: tuple[int, ...], dtype: tuple[torch.dtype, ...] = (torch.float32,) * 3, **options: Any) -> Tensor:
    unchecked: Any = inspect.unwrap(attention)
    return unchecked(*(torch.zeros(s, dtype=d) for s, d in zip(shapes, dtype, strict=True)), **options)


Q, K = (2, 5, 4, 16), (2, 5, 2, 16)


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ((Q[1:], K, K), {}, "expected"),
        ((Q, (3, *K[1:]), K), {}, "do not fit"),
        ((Q, K, (3, *K[1:])), {}, "do not fit"),
        ((Q, K, (2, 6, 2, 16)), {}, "do not fit"),
        ((Q, (2, 5, 2, 8), K), {}, "do not fit"),
        ((Q, (2, 5, 3, 16), (2, 5, 3, 16)), {}, "heads"),
        ((Q, K, (2, 5, 4, 16)), {}, "heads"),
        ((Q, K, K), {"dtype": (torch.float32, torch.float64, torch.float32)}, "one dtype"),
        ((Q, (2, 4, 2, 16), (2, 4, 2, 16)), {"causal": True}, "at least as many"),
        ((Q, K, K), {"window": 3}, "causal"),
        ((Q, K, K), {"window": 0, "causal": True}, "window"),
        ((Q, K, K), {"mask": torch.ones(5, 5, dtype=torch.bool)}, "no mask"),
        (((2, 5, 4, 300), (2, 5, 2, 300), K), {}, "wider"),
        ((Q, K, K), {"dtype": (torch.bfloat16,) * 3}, "bfloat16"),
        ((Q, K, K), {"dtype": (torch.int64,) * 3}, "int64"),
    ],
)
def test_invalid_calls_raise(shapes: tuple[tuple[int, ...], ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(*shapes, **options, backend="cpu")
    if not {"mask", "window"} & set(options):  # the operator itself
        dtypes = options.get("dtype", (torch.float32,) * 3)
        x = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        with pytest.raises(UsageError):
            torch.ops.qkflow.attention(*x, 100 if options.get("causal") else 0, 1.0, True)


@pytest.mark.parametrize("wrong", range(3))
def test_invalid_saved_tensors_raise(wrong: int) -> None:
    q, k, v = (x.detach() for x in inputs(6, 6, heads=4, groups=2))
    saved = [torch.zeros(2, 6, 4, 16).double(), torch.zeros(2, 6, 4, 16).double(), torch.zeros(2, 4, 6).double()]
    torch.ops.qkflow.attention_backward(saved[0], q, k, v, *saved[1:], 0, 1.0)
    for bad in (saved[wrong][:, :3], saved[wrong].float()):
        with pytest.raises(UsageError, match="must be"):
            torch.ops.qkflow.attention_backward(
                *(bad if wrong == 0 else saved[0],), q, k, v, *(bad if wrong == i else saved[i] for i in (1, 2)), 0, 1.0
            )


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_what_the_kernel_cannot_do_runs_in_pytorch() -> None:
    q, k, v = (x.detach() for x in inputs(6, 6))
    with use_backend(None):
        assert choose_backend(q, k, v) == "cpu"
        assert choose_backend(q, k, v, mask=torch.ones(6, 6, dtype=torch.bool)) == "torch"
        assert choose_backend(*(x.bfloat16() for x in (q, k, v))) == "torch"
        assert choose_backend(*(x.to("meta") for x in (q, k, v))) == "torch"
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert choose_backend(q, k, v) == "torch"
        with use_backend("torch"):
            assert choose_backend(q, k, v) == "torch"
        expected = attention(q, k, v, causal=True)
        rows = torch.vmap(lambda *row: attention(*(x[None] for x in row), causal=True)[0])(q, k, v)
        assert_close(rows, expected, rtol=0, atol=1e-10)
    with pytest.raises(UsageError, match="unknown backend"), use_backend("fast"):
        pass


@pytest.mark.parametrize(("t", "s", "window"), [(9, 9, None), (9, 9, 4), (3, 9, None), (3, 9, 4), (1, 9, 4)])
def test_both_backends_see_the_same_keys(t: int, s: int, window: int | None) -> None:
    args = inputs(t, s, groups=2)
    results = [values_and_gradients(attention, args, causal=True, window=window, backend=b) for b in ("cpu", "torch")]
    assert_close(*results, rtol=0, atol=1e-12)


def test_every_pair_counts_in_flops() -> None:
    args = inputs(8, 12, rows=3, heads=4, groups=2, width=16, values=24)
    with FlopCounterMode(display=False) as counter:
        y = attention(*args, causal=True, backend="cpu")
    assert counter.get_total_flops() == 2 * 3 * 4 * 8 * 12 * (16 + 24)
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 2 * 3 * 4 * 8 * 12 * (3 * 16 + 2 * 24)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # torch.compile emits warnings
def test_the_compiled_kernel_is_one_node() -> None:
    def function(*args: Tensor) -> Tensor:
        return attention(*args, causal=True, backend="cpu") * 2

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for t in (5, 70):
        args = inputs(t, t)
        assert_close(values_and_gradients(compiled, args), values_and_gradients(function, args), rtol=0, atol=1e-12)
