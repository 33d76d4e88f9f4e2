"""A short convolution equals torch's depthwise convolution and a SiLU, and continues from a previous state."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from qkflow.errors import UsageError
from qkflow.ops import short_conv as module
from qkflow.ops.csrc import build
from qkflow.ops.short_conv import next_conv_state, short_conv

PATIENT = settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["native", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "native" and build.load_error() is not None:
        pytest.skip("there is no native kernel here")
    if request.param == "plain":
        monkeypatch.setattr(module, "_has_kernel", lambda x, weight: False)
    return request.param


def make_inputs(n: int, t: int, c: int, taps: int, *, tail: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return x, weight and optionally a state, each a leaf."""
    generator = torch.Generator().manual_seed(n + 10 * t + 1000 * c + taps)
    shapes = [(n, t, c), (c, taps), *([(n, taps - 1, c)] if tail else [])]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def torch_conv(x: Tensor, weight: Tensor, tail: Tensor | None = None) -> Tensor:
    """Compute the convolution with torch, in its layout."""
    taps = weight.shape[1]
    before = x.new_zeros(len(x), taps - 1, x.shape[2]) if tail is None else tail
    window = torch.cat([before, x], 1).transpose(1, 2)
    return F.silu(F.conv1d(window, weight[:, None], groups=len(weight)).transpose(1, 2))


@PATIENT
@given(n=st.integers(1, 3), t=st.integers(1, 20), c=st.integers(1, 20), taps=st.integers(2, 6), tail=st.booleans())
def test_values_and_gradients_match_conv1d(form: str, n: int, t: int, c: int, taps: int, tail: bool) -> None:
    same_as_torch(*make_inputs(n, t, c, taps, tail=tail))


@pytest.mark.parametrize(
    ("t", "c", "taps"), [(127, 3, 4), (128, 5, 4), (131, 3, 4), (260, 2, 7), (5, 300, 4), (3, 257, 9)]
)
def test_values_and_gradients_match_across_task_boundaries(form: str, t: int, c: int, taps: int) -> None:
    same_as_torch(*make_inputs(2, t, c, taps, tail=True))


def same_as_torch(*inputs: Tensor) -> None:
    actual, expected = short_conv(*inputs), torch_conv(*inputs)
    assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(expected)
    assert_close(
        torch.autograd.grad(actual, inputs, weight),
        torch.autograd.grad(expected, inputs, weight),
        rtol=1e-11,
        atol=1e-11,
    )
    with torch.no_grad():
        assert torch.equal(short_conv(*inputs), actual)


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_16_bit_outputs_are_rounded_once(form: str, dtype: torch.dtype, within: float) -> None:
    inputs = make_inputs(2, 140, 33, 4, tail=True, dtype=dtype)
    actual, expected = short_conv(*inputs), torch_conv(*(x.detach().double() for x in inputs))
    assert actual.dtype == dtype
    assert float((actual.detach().double() - expected).abs().max() / expected.abs().max()) < within


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_state_of_another_dtype_is_cast(form: str, dtype: torch.dtype) -> None:
    x, weight, tail = make_inputs(2, 5, 3, 4, tail=True, dtype=torch.float32)
    tail = tail.detach().to(dtype)
    assert torch.equal(short_conv(x, weight, tail), short_conv(x, weight, tail.float()))
    assert next_conv_state(x[:, :1], 4, tail).dtype == x.dtype


def test_an_empty_batch_gives_zero_gradients(form: str) -> None:
    x, weight = make_inputs(0, 5, 4000, 4, tail=False)
    assert not torch.autograd.grad(short_conv(x, weight).sum(), weight)[0].any()


def test_wrong_shapes_raise(form: str) -> None:
    x, weight, tail = make_inputs(2, 5, 3, 4, tail=True)
    unchecked: Any = inspect.unwrap(short_conv)
    with pytest.raises(UsageError, match=r"got \[2, 5, 3\] and \[2, 4\]"):
        unchecked(x, weight[:2])
    for wrong in (tail[:1], tail[:, 1:], tail[..., 1:]):
        with pytest.raises(UsageError, match=r"the state must be \[n, taps - 1, channels\] = \[2, 3, 3\]"):
            unchecked(x, weight, wrong)


def test_second_derivatives_are_correct(form: str) -> None:
    inputs = make_inputs(1, 4, 2, 3, tail=True)
    assert torch.autograd.gradcheck(short_conv, inputs)
    assert torch.autograd.gradgradcheck(short_conv, inputs)


def test_the_number_of_threads_changes_no_result() -> None:
    x, weight = make_inputs(2, 600, 64, 4, tail=False, dtype=torch.float32)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            y = short_conv(x, weight)
            results.append((y, *torch.autograd.grad(y.square().sum(), [x, weight])))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_non_contiguous_inputs_are_supported(form: str) -> None:
    x, weight = make_inputs(2, 6, 4, 4, tail=False)
    strided, turned = x.detach()[:, ::2], weight.detach().t().contiguous().t()
    assert_close(short_conv(strided, turned), torch_conv(strided, turned), rtol=1e-12, atol=1e-12)
    y = short_conv(x, weight)
    (actual,) = torch.autograd.grad(y, x, torch.ones(1, dtype=x.dtype).expand_as(y))
    assert_close(actual, torch.autograd.grad(torch_conv(x, weight).sum(), x)[0], rtol=1e-12, atol=1e-12)


def test_a_nan_affects_only_the_tokens_that_read_it(form: str) -> None:
    x = torch.zeros(1, 9, 2)
    x[0, 2, 1] = torch.nan
    results = short_conv(x, torch.ones(2, 4)).isnan()
    assert results[0, :, 0].tolist() == [False] * 9
    assert results[0, :, 1].tolist() == [False] * 2 + [True] * 4 + [False] * 3


@PATIENT
@given(data=st.data())
def test_the_next_state_has_the_last_tokens_of_each_row(data: st.DataObject) -> None:
    taps, t, n = (data.draw(st.integers(low, high)) for low, high in ((2, 6), (1, 7), (1, 4)))
    lengths = data.draw(st.none() | st.lists(st.integers(0, t), min_size=n, max_size=n))
    tail = torch.arange(1.0, taps).expand(n, -1)[..., None] if data.draw(st.booleans()) else None
    x = 100 * torch.arange(1.0, n + 1)[:, None, None] + torch.arange(t)[:, None]
    actual = next_conv_state(x, taps, tail, None if lengths is None else torch.tensor(lengths))
    for row in range(n):
        before = [0.0] * (taps - 1) if tail is None else tail[row].flatten().tolist()
        tokens = x[row].flatten().tolist()[: t if lengths is None else lengths[row]]
        assert actual[row].flatten().tolist() == [*before, *tokens][-(taps - 1) :]


def test_the_next_state_is_not_a_view() -> None:
    tail = next_conv_state(torch.randn(1, 1000, 4), 4)
    assert tail.untyped_storage().nbytes() == tail.nbytes


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # torch.compile emits warnings
def test_it_compiles_for_any_length(form: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(short_conv, fullgraph=True, backend="aot_eager")
    for t in (4, 5, 9, 13):
        inputs = make_inputs(2, t, 3, 4, tail=True)
        actual, expected = compiled(*inputs), short_conv(*inputs)
        assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        grads = [torch.autograd.grad(y.square().sum(), inputs) for y in (actual, expected)]
        assert_close(*grads, rtol=1e-11, atol=1e-11)
