"""Invalid inputs raise an error, and valid inputs of any kind give correct results."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.ops.delta_rule import MAX_KEY_WIDTH, delta_rule

unchecked: Any = inspect.unwrap(delta_rule)
"""Disable the shape checks of the tests, which would raise first."""


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("q", (2, 6, 2, 5), r"\[2, 6, 2, 5\], \[2, 6, 2, 4\] and \[2, 6, 2, 3\]"),
        ("k", (2, 6, 2, 5), r"\[2, 6, 2, 4\], \[2, 6, 2, 5\] and \[2, 6, 2, 3\]"),
        ("k", (2, 5, 2, 4), r"queries and keys must be"),
        ("k", (1, 6, 2, 4), r"queries and keys must be"),
        ("v", (2, 6, 3, 3), r"\[2, 6, 3, 3\]"),
        ("v", (2, 7, 2, 3), r"\[2, 7, 2, 3\]"),
        ("v", (2, 6, 2), r"\[2, 6, 2\]"),
        ("q", (6, 2, 4), r"\[6, 2, 4\]"),
        ("beta", (2, 6, 1), r"beta must be \[b, t, heads\] = \[2, 6, 2\], got \[2, 6, 1\]"),
        ("beta", (2, 6, 2, 1), r"beta must .* got \[2, 6, 2, 1\]"),
        ("log_alpha", (2, 5, 2), r"log_alpha must .* got \[2, 5, 2\]"),
        ("log_alpha", (2, 6, 2, 3), r"\[2, 6, 2, 4\] for a decay per key channel, got \[2, 6, 2, 3\]"),
        ("log_alpha", (2, 6, 2, 1), r"log_alpha must .* got \[2, 6, 2, 1\]"),
        ("erase", (2, 6, 1), r"erase must .* = \[2, 6, 2, 4\], or .*\[2, 6, 2\], got \[2, 6, 1\]"),
        ("erase", (2, 6, 2, 3), r"erase must .* got \[2, 6, 2, 3\]"),
        ("erase", (1, 6, 2, 4), r"erase must .* got \[1, 6, 2, 4\]"),
        ("state", (2, 2, 4, 3), r"\[rows, heads, v, k\] = \[2, 2, 3, 4\], got \[2, 2, 4, 3\]"),
        ("state", (1, 2, 3, 4), r"got \[1, 2, 3, 4\]"),
        ("state", (2, 3, 4), r"got \[2, 3, 4\]"),
    ],
)
def test_wrong_shapes_raise(helpers: Any, backend: str, name: str, shape: tuple[int, ...], words: str) -> None:
    inputs = {**helpers.make_inputs(6), name: torch.zeros(shape, dtype=torch.float64)}
    with pytest.raises(UsageError, match=words):
        unchecked(**inputs, backend=backend)


def test_zero_tokens_raise(helpers: Any, backend: str) -> None:
    with pytest.raises(UsageError, match="at least one token"):
        unchecked(**helpers.make_inputs(0), backend=backend)


@pytest.mark.parametrize(("key", "value"), [(MAX_KEY_WIDTH + 1, 3), (0, 3), (3, 0)], ids=["key", "no key", "no value"])
def test_widths_out_of_range_raise(helpers: Any, backend: str, key: int, value: int) -> None:
    with pytest.raises(UsageError, match=f"keys must be 1 to 256 wide and values at least 1, got {key} and {value}"):
        unchecked(**helpers.make_inputs(2, key=key, value=value), backend=backend)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("beta", -0.01, r"beta must be from 0 to 2, got values from -0.01 to"),
        ("beta", 2.01, r"beta must be from 0 to 2, got .* to 2.01"),
        ("beta", math.nan, r"beta must be from 0 to 2, got .*nan"),
        ("beta", math.inf, r"beta must be from 0 to 2, got .*inf"),
        ("log_alpha", 0.01, r"log_alpha must be finite and at most 0, got .* to 0.01"),
        ("log_alpha", math.nan, r"log_alpha must be finite and at most 0, got .*nan"),
        ("log_alpha", -math.inf, r"log_alpha must be finite and at most 0, got values from -inf"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("t", "vector"), [(70, False), (70, True), (1, True)])
def test_a_gate_out_of_range_raises(
    helpers: Any, backend: str, name: str, value: float, words: str, dtype: torch.dtype, t: int, vector: bool
) -> None:
    inputs = helpers.make_inputs(t, vector=vector, dtype=dtype)
    inputs[name][1, t - 1, 1].view(-1)[-1] = value
    with pytest.raises(UsageError, match=words if dtype == torch.float64 else f"{name} must be") as caught:
        delta_rule(**inputs, backend=backend)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("t", [1, 70])
def test_a_weight_of_the_query_that_is_not_finite_raises(helpers: Any, backend: str, value: float, t: int) -> None:
    inputs = helpers.make_inputs(t)
    inputs["erase"] = inputs["erase"][..., 0].clone()
    inputs["erase"][1, t - 1, 1] = value
    with pytest.raises(UsageError, match=r"erase must be finite, got .*(nan|inf)"):
        delta_rule(**inputs, backend=backend)


def test_gates_are_checked_outside_padding_only(helpers: Any, backend: str) -> None:
    inputs = helpers.make_inputs(6)
    inputs["beta"][0, 5] = 9.0
    delta_rule(**inputs, layout=Layout.padded([5, 6], 6), backend=backend)
    with pytest.raises(UsageError, match="beta must be"):
        delta_rule(**inputs, layout=Layout.padded([6, 5], 6), backend=backend)


@pytest.mark.parametrize("chunk", [-1, 0, 129])
def test_chunk_sizes_out_of_range_raise(helpers: Any, backend: str, chunk: int) -> None:
    with pytest.raises(UsageError, match=f"chunk must be from 1 to 128, got {chunk}"):
        delta_rule(**helpers.make_inputs(4), backend=backend, chunk=chunk)


def test_an_unknown_backend_raises(helpers: Any) -> None:
    with pytest.raises(UsageError, match="unknown backend 'chunks': did you mean 'chunked'"):
        delta_rule(**helpers.make_inputs(4), backend="chunks")


@pytest.mark.parametrize("name", ["k", "v", "beta", "log_alpha", "erase", "state"])
def test_tensors_on_different_devices_raise(helpers: Any, backend: str, name: str) -> None:
    inputs = helpers.make_inputs(4)
    inputs[name] = inputs[name].to("meta")
    with pytest.raises(UsageError, match=f"{name} is on meta and the queries are on cpu"):
        delta_rule(**inputs, backend=backend)


def test_a_layout_of_another_batch_raises(helpers: Any, backend: str) -> None:
    with pytest.raises(UsageError, match=r"a batch of \[2, 5\], got \[2, 6\]"):
        delta_rule(**helpers.make_inputs(6), layout=Layout.padded([5, 2], 5), backend=backend)


def test_a_packed_batch_needs_one_state_per_sequence(helpers: Any, backend: str) -> None:
    with pytest.raises(UsageError, match=r"= \[3, 2, 3, 4\], got \[1, 2, 3, 4\]"):
        delta_rule(**helpers.make_inputs(6, rows=1), layout=Layout.packed([0, 2, 3, 6]), backend=backend)


def test_integer_tensors_raise(helpers: Any, backend: str) -> None:
    inputs = {name: x.round().long() for name, x in helpers.make_inputs(4).items()}
    with pytest.raises(UsageError):
        unchecked(**inputs, backend=backend)


@pytest.mark.parametrize("empty", ["rows", "heads"])
def test_an_empty_batch_gives_empty_outputs(helpers: Any, backend: str, empty: str) -> None:
    inputs = helpers.make_inputs(5, **{empty: 0})
    actual = helpers.results(inputs, backend=backend)
    assert {name: x.shape for name, x in actual.items() if name in inputs} == {
        name: x.shape for name, x in inputs.items()
    }
    assert actual["o"].shape == inputs["v"].shape
    assert actual["final"].shape == inputs["state"].shape


DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])
DIGITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def _gradients(helpers: Any, inputs: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    return helpers.results(inputs, unchecked, **options)


def _values(helpers: Any, inputs: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    return dict(zip(("o", "final"), unchecked(**inputs, **options), strict=True))


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Random arguments, valid or not."""
    wild = draw(st.booleans())
    min_scale = 0 if wild else 1
    return {
        "rows": draw(st.integers(min_scale, 3)),
        "t": draw(st.sampled_from([min_scale, 1, 3, 4, 5, 8, 17, 31, 33, 64, 65, 70])),
        "heads": draw(st.integers(min_scale, 4)),
        "key": draw(st.integers(min_scale, 40)),
        "value": draw(st.integers(min_scale, 40)),
        "vector": draw(st.booleans()),
        "without": draw(st.sets(st.sampled_from(["log_alpha", "erase", "state"]))),
        "dtypes": draw(st.lists(DTYPES, min_size=7, max_size=7)) if wild else [draw(DTYPES)] * 7,
        "order": draw(st.permutations(range(4))),
        "chunk": draw(st.none() | st.integers(min_scale, 130 if wild else 128)),
        "bend": draw(st.sampled_from([None, "q", "k", "v", "beta", "log_alpha", "erase", "state"])) if wild else None,
        "axis": draw(st.integers(0, 2)),
        "ask": draw(st.sampled_from([_gradients, _values])),
    }


def _laid(x: Tensor, order: list[int]) -> Tensor:
    """The same numbers in another memory layout."""
    order = [axis for axis in order if axis < x.ndim]
    back = sorted(range(x.ndim), key=order.__getitem__)
    return x.permute(order).contiguous().permute(back)


def _bent(x: Tensor, axis: int) -> Tensor:
    """One more index along an axis."""
    return x.new_zeros([size + (i == axis) for i, size in enumerate(x.shape)])


@given(call=calls())
@settings(deadline=None, max_examples=40)
def test_arbitrary_calls_raise_or_are_correct(helpers: Any, fast: str, call: dict[str, Any]) -> None:
    shape = {name: call[name] for name in ("rows", "heads", "key", "value", "vector")}
    inputs = helpers.make_inputs(call["t"], **shape, without=call["without"])
    kinds = dict(zip(("q", "k", "v", "beta", "log_alpha", "erase", "state"), call["dtypes"], strict=True))
    inputs = {name: _laid(x.to(kinds[name]), call["order"]) for name, x in inputs.items()}
    wrong = call["bend"] in inputs or 0 in (call["t"], call["key"], call["value"]) or call["chunk"] in (0, 129, 130)
    if call["bend"] in inputs:
        inputs[call["bend"]] = _bent(inputs[call["bend"]], call["axis"])
    try:
        actual = call["ask"](helpers, inputs, backend=fast, chunk=call["chunk"])
    except UsageError:
        assert wrong
        return
    assert not wrong
    expected = call["ask"](helpers, inputs, backend="naive")
    inner = 1e-9 if kinds["q"] == torch.float64 else 1e-4
    for name, x in actual.items():
        helpers.assert_agree({name: x}, {name: expected[name]}, tolerance=max(inner, DIGITS[x.dtype]), min_scale=1.0)
