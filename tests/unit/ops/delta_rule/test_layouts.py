"""Padding and packing: every sequence is computed as if it were alone, whatever stands around it."""

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
    """One call of the reference for each sequence, with its tokens cut out and its outputs put back."""
    v, n = tokens["v"], len(layout.lengths)
    before = v.new_zeros(n, v.shape[2], v.shape[3], tokens["q"].shape[3]) if state is None else state
    o, finals = torch.zeros_like(v), []
    for i in range(n):
        here, final = layout.sequences == i, before[i : i + 1]
        if here.any():
            own = {name: x[here][None] for name, x in tokens.items()}
            part, final = delta_rule(**own, state=final, backend="naive")
            o = o.index_put(torch.where(here), part[0])
        finals.append(final)
    return o, torch.cat(finals)


def arguments(bench: Any, layout: Layout, without: tuple[str, ...] = ()) -> dict[str, Tensor]:
    rows, t = layout.valid.shape
    made = bench.case(t, rows=rows, rho=0.95, without=without)
    if "state" not in without:
        made["state"] = bench.case(1, rows=len(layout.lengths), seed=5)["state"]
    return made


def littered(layout: Layout, made: dict[str, Tensor], garbage: float) -> dict[str, Tensor]:
    """The same arguments with something else at padding."""
    hole = ~layout.valid
    return {
        name: x if name == "state" else x.masked_fill(hole.view(*hole.shape, *[1] * (x.ndim - 2)), garbage)
        for name, x in made.items()
    }


@pytest.fixture(scope="module")
def alone() -> dict[Any, Any]:
    """What comes of the sequences one by one: slow, and the same for every form."""
    return {}


@pytest.mark.parametrize(
    ("without", "garbage"),
    [((), math.nan), ((), math.inf), ((), -3e30), (("log_alpha", "lam"), math.nan), (("state",), math.nan)],
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_sequences_are_independent(
    bench: Any, alone: dict[Any, Any], backend: str, name: str, without: tuple[str, ...], garbage: float
) -> None:
    layout = LAYOUTS[name]
    made = arguments(bench, layout, without)
    if (name, without) not in alone:
        alone[name, without] = bench.outcome(made, partial(separately, layout))
    got = bench.outcome(littered(layout, made, garbage), layout=layout, backend=backend, chunk=4)
    bench.agree(got, alone[name, without])


@pytest.mark.parametrize("name", ["right", "left", "wide"])
def test_outputs_and_gradients_at_padding_are_zero(bench: Any, backend: str, name: str) -> None:
    layout = LAYOUTS[name]
    given = littered(layout, arguments(bench, layout), math.nan)
    got = bench.outcome(given, layout=layout, backend=backend)
    for part in ("o", "q", "k", "v", "beta", "log_alpha", "lam"):
        assert not got[part][~layout.valid].any(), part


def test_a_row_without_tokens_keeps_its_state(bench: Any, backend: str) -> None:
    layout = LAYOUTS["left"]
    given = arguments(bench, layout)
    _, final = delta_rule(**given, layout=layout, backend=backend)
    assert torch.equal(final[2], given["state"][2])


def test_a_layout_without_padding_changes_nothing(bench: Any, backend: str) -> None:
    given = bench.case(9)
    got = bench.outcome(given, layout=Layout.padded([9, 9], 9), backend=backend)
    bench.agree(got, bench.outcome(given, backend=backend), within=1e-14)
