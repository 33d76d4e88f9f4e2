"""What cannot be computed is refused in words, and whatever is not refused is right."""

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
"""As users have it: the shape checks of the tests would be first to speak."""


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
        ("lam", (1, 6, 2), r"lam must .* got \[1, 6, 2\]"),
        ("state", (2, 2, 4, 3), r"\[rows, heads, v, k\] = \[2, 2, 3, 4\], got \[2, 2, 4, 3\]"),
        ("state", (1, 2, 3, 4), r"got \[1, 2, 3, 4\]"),
        ("state", (2, 3, 4), r"got \[2, 3, 4\]"),
    ],
)
def test_wrong_shapes_raise(bench: Any, backend: str, name: str, shape: tuple[int, ...], words: str) -> None:
    made = {**bench.case(6), name: torch.zeros(shape, dtype=torch.float64)}
    with pytest.raises(UsageError, match=words):
        unchecked(**made, backend=backend)


def test_zero_tokens_raise(bench: Any, backend: str) -> None:
    with pytest.raises(UsageError, match="at least one token"):
        unchecked(**bench.case(0), backend=backend)


@pytest.mark.parametrize(("key", "value"), [(MAX_KEY_WIDTH + 1, 3), (0, 3), (3, 0)], ids=["key", "no key", "no value"])
def test_widths_out_of_range_raise(bench: Any, backend: str, key: int, value: int) -> None:
    with pytest.raises(UsageError, match=f"keys must be 1 to 256 wide and values at least 1, got {key} and {value}"):
        unchecked(**bench.case(2, key=key, value=value), backend=backend)


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
        ("lam", math.nan, r"lam must be finite, got .*nan"),
        ("lam", math.inf, r"lam must be finite, got .*inf"),
        ("lam", -math.inf, r"lam must be finite, got .*inf"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_gate_out_of_range_raises(
    bench: Any, backend: str, name: str, value: float, words: str, dtype: torch.dtype
) -> None:
    made = bench.case(70, dtype=dtype)
    made[name][1, 69, 1] = value
    with pytest.raises(UsageError, match=words if dtype == torch.float64 else f"{name} must be") as caught:
        delta_rule(**made, backend=backend)
    assert "\n" not in str(caught.value)


def test_gates_are_checked_outside_padding_only(bench: Any, backend: str) -> None:
    made = bench.case(6)
    made["beta"][0, 5] = 9.0
    delta_rule(**made, layout=Layout.padded([5, 6], 6), backend=backend)
    with pytest.raises(UsageError, match="beta must be"):
        delta_rule(**made, layout=Layout.padded([6, 5], 6), backend=backend)


@pytest.mark.parametrize("chunk", [-1, 0, 129])
def test_chunk_sizes_out_of_range_raise(bench: Any, backend: str, chunk: int) -> None:
    with pytest.raises(UsageError, match=f"chunk must be from 1 to 128, got {chunk}"):
        delta_rule(**bench.case(4), backend=backend, chunk=chunk)


def test_an_unknown_backend_raises(bench: Any) -> None:
    with pytest.raises(UsageError, match="unknown backend 'chunks': did you mean 'chunked'"):
        delta_rule(**bench.case(4), backend="chunks")


@pytest.mark.parametrize("name", ["k", "v", "beta", "log_alpha", "lam", "state"])
def test_tensors_on_different_devices_raise(bench: Any, backend: str, name: str) -> None:
    made = bench.case(4)
    made[name] = made[name].to("meta")
    with pytest.raises(UsageError, match=f"{name} is on meta and the queries are on cpu"):
        delta_rule(**made, backend=backend)


def test_a_layout_of_another_batch_raises(bench: Any, backend: str) -> None:
    with pytest.raises(UsageError, match=r"a batch of \[2, 5\], got \[2, 6\]"):
        delta_rule(**bench.case(6), layout=Layout.padded([5, 2], 5), backend=backend)


def test_a_packed_batch_needs_one_state_per_sequence(bench: Any, backend: str) -> None:
    with pytest.raises(UsageError, match=r"= \[3, 2, 3, 4\], got \[1, 2, 3, 4\]"):
        delta_rule(**bench.case(6, rows=1), layout=Layout.packed([0, 2, 3, 6]), backend=backend)


def test_integer_tensors_raise(bench: Any, backend: str) -> None:
    made = {name: x.round().long() for name, x in bench.case(4).items()}
    with pytest.raises(UsageError):
        unchecked(**made, backend=backend)


@pytest.mark.parametrize("empty", ["rows", "heads"])
def test_an_empty_batch_gives_empty_outputs(bench: Any, backend: str, empty: str) -> None:
    made = bench.case(5, **{empty: 0})
    got = bench.outcome(made, backend=backend)
    assert {name: x.shape for name, x in got.items() if name in made} == {name: x.shape for name, x in made.items()}
    assert got["o"].shape == made["v"].shape
    assert got["final"].shape == made["state"].shape


DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])
DIGITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def _gradients(bench: Any, made: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    return bench.outcome(made, unchecked, **options)


def _values(bench: Any, made: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    return dict(zip(("o", "final"), unchecked(**made, **options), strict=True))


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """What may be said in a call, sensible or not."""
    wild = draw(st.booleans())
    least = 0 if wild else 1
    return {
        "rows": draw(st.integers(least, 3)),
        "t": draw(st.sampled_from([least, 1, 3, 4, 5, 8, 17, 31, 33, 64, 65, 70])),
        "heads": draw(st.integers(least, 4)),
        "key": draw(st.integers(least, 40)),
        "value": draw(st.integers(least, 40)),
        "without": draw(st.sets(st.sampled_from(["log_alpha", "lam", "state"]))),
        "dtypes": draw(st.lists(DTYPES, min_size=7, max_size=7)) if wild else [draw(DTYPES)] * 7,
        "order": draw(st.permutations(range(4))),
        "chunk": draw(st.none() | st.integers(least, 130 if wild else 128)),
        "bend": draw(st.sampled_from([None, "q", "k", "v", "beta", "log_alpha", "lam", "state"])) if wild else None,
        "axis": draw(st.integers(0, 2)),
        "ask": draw(st.sampled_from([_gradients, _values])),
    }


def _laid(x: Tensor, order: list[int]) -> Tensor:
    """The same numbers in memory of another order."""
    order = [axis for axis in order if axis < x.ndim]
    back = sorted(range(x.ndim), key=order.__getitem__)
    return x.permute(order).contiguous().permute(back)


def _bent(x: Tensor, axis: int) -> Tensor:
    """One place more along an axis."""
    return x.new_zeros([size + (i == axis) for i, size in enumerate(x.shape)])


@given(call=calls())
@settings(deadline=None, max_examples=40)
def test_arbitrary_calls_raise_or_are_correct(bench: Any, fast: str, call: dict[str, Any]) -> None:
    shape = {name: call[name] for name in ("rows", "heads", "key", "value")}
    made = bench.case(call["t"], **shape, without=call["without"])
    kinds = dict(zip(("q", "k", "v", "beta", "log_alpha", "lam", "state"), call["dtypes"], strict=True))
    made = {name: _laid(x.to(kinds[name]), call["order"]) for name, x in made.items()}
    wrong = call["bend"] in made or 0 in (call["t"], call["key"], call["value"]) or call["chunk"] in (0, 129, 130)
    if call["bend"] in made:
        made[call["bend"]] = _bent(made[call["bend"]], call["axis"])
    try:
        got = call["ask"](bench, made, backend=fast, chunk=call["chunk"])
    except UsageError:
        assert wrong
        return
    assert not wrong
    want = call["ask"](bench, made, backend="naive")
    inner = 1e-9 if kinds["q"] == torch.float64 else 1e-4
    for name, x in got.items():
        bench.agree({name: x}, {name: want[name]}, within=max(inner, DIGITS[x.dtype]), least=1.0)
