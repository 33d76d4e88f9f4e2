"""Padding and packing: every sequence is computed independently of the others and of padding."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from qkflow.layout import Layout
from qkflow.ops.delta_rule import delta_rule

LENGTHS = [5, 9, 0, 1, 8]
LAYOUTS = {
    "right": Layout.padded(LENGTHS, 9),
    "left": Layout.padded(LENGTHS, 9, side="left"),
    "wide": Layout.padded(LENGTHS, 12),
    "packed": Layout.packed([0, 5, 14, 14, 15, 23]),
    "segmented": Layout.segmented(torch.tensor([[0, 0, 1, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0, 0]], dtype=torch.bool)),
}


def separately(layout: Layout, state: Tensor | None = None, **tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Call the reference for each sequence separately, and put the outputs in their positions."""
    v, n = tokens["v"], len(layout.lengths)
    before = v.new_zeros(n, v.shape[2], v.shape[3], tokens["q"].shape[3]) if state is None else state
    o, finals = torch.zeros_like(v), []
    for i in range(n):
        is_in_sequence, final = layout.sequences == i, before[i : i + 1]
        if is_in_sequence.any():
            sequence = {name: x[is_in_sequence][None] for name, x in tokens.items()}
            part, final = delta_rule(**sequence, state=final, backend="naive")
            o = o.index_put(torch.where(is_in_sequence), part[0])
        finals.append(final)
    return o, torch.cat(finals)


def arguments(helpers: Any, layout: Layout, without: tuple[str, ...] = ()) -> dict[str, Tensor]:
    rows, t = layout.valid.shape
    inputs = helpers.make_inputs(t, rows=rows, rho=0.95, vector="head decay" in without, without=without)
    if "state" not in without:
        inputs["state"] = helpers.make_inputs(1, rows=len(layout.lengths), seed=5)["state"]
    return inputs


def with_garbage(layout: Layout, inputs: dict[str, Tensor], garbage: float) -> dict[str, Tensor]:
    """The same arguments with other values at padding."""
    hole = ~layout.valid
    return {
        name: x if name == "state" else x.masked_fill(hole.view(*hole.shape, *[1] * (x.ndim - 2)), garbage)
        for name, x in inputs.items()
    }


@pytest.fixture(scope="module")
def single_results() -> dict[Any, Any]:
    """The results of the sequences one at a time, shared by all backends because they are slow."""
    return {}


@pytest.mark.parametrize(
    ("without", "garbage"),
    [
        ((), math.nan),
        ((), math.inf),
        ((), -3e30),
        (("log_alpha", "erase"), math.nan),
        (("state",), math.nan),
        (("head decay",), math.nan),
    ],
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_sequences_are_independent(
    helpers: Any, single_results: dict[Any, Any], backend: str, name: str, without: tuple[str, ...], garbage: float
) -> None:
    layout = LAYOUTS[name]
    inputs = arguments(helpers, layout, without)
    if (name, without) not in single_results:
        single_results[name, without] = helpers.results(inputs, partial(separately, layout))
    actual = helpers.results(with_garbage(layout, inputs, garbage), layout=layout, backend=backend, chunk=4)
    helpers.assert_agree(actual, single_results[name, without])


@pytest.mark.parametrize("name", ["right", "left", "wide"])
def test_outputs_and_gradients_at_padding_are_zero(helpers: Any, backend: str, name: str) -> None:
    layout = LAYOUTS[name]
    inputs = with_garbage(layout, arguments(helpers, layout), math.nan)
    actual = helpers.results(inputs, layout=layout, backend=backend)
    for part in ("o", "q", "k", "v", "beta", "log_alpha", "erase"):
        assert not actual[part][~layout.valid].any(), part


def test_a_row_without_tokens_keeps_its_state(helpers: Any, backend: str) -> None:
    layout = LAYOUTS["left"]
    inputs = arguments(helpers, layout)
    _, final = delta_rule(**inputs, layout=layout, backend=backend)
    assert torch.equal(final[2], inputs["state"][2])


def test_a_layout_without_padding_changes_nothing(helpers: Any, backend: str) -> None:
    inputs = helpers.make_inputs(9)
    actual = helpers.results(inputs, layout=Layout.padded([9, 9], 9), backend=backend)
    helpers.assert_agree(actual, helpers.results(inputs, backend=backend), tolerance=1e-14)
