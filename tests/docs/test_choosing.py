"""docs/choosing.md has every mechanism, with the state and the FLOPs that its layer declares."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qkflow.mechanisms import mechanism, mechanisms

PAGE = (Path(__file__).parents[2] / "docs/choosing.md").read_text()
ROWS = {
    spec: cells
    for spec, *cells in re.findall(r"^\| \[?`([^`]+)`[^|]*\| ([\d., ]+) \| ([\d., ]+) \|", PAGE, re.MULTILINE)
}


def test_every_mechanism_has_a_row() -> None:
    listed = re.findall(r"^\| \[?`([^`]+)`", PAGE, re.MULTILINE)
    assert {*mechanisms()} <= {*listed}
    assert len(listed) == len({*listed})
    assert len(ROWS) >= 10


@pytest.mark.parametrize("spec", ROWS)
def test_numbers_are_those_of_the_layer(spec: str) -> None:
    layer = mechanism(spec)(128, 4, layer=0, layers=5)
    costs = [layer.cost(t) for t in (256, 4096)]
    state, flops = ([float(number.replace(",", "")) for number in cell.split(", ")] for cell in ROWS[spec])
    assert state == [round(cost.state_bytes / 1024, 1) for cost in costs]
    assert flops == [round(cost.flops / t / 1000) for cost, t in zip(costs, (256, 4096), strict=True)]


@pytest.mark.parametrize(("spec", "kib"), [("standard:conv=4", 4.5), ("standard:key_shift=True", 0.25)])
def test_controls_add_little_state(spec: str, kib: float) -> None:
    control, plain = (mechanism(name)(128, 4, layer=0, layers=5).cost(256) for name in (spec, "standard"))
    assert control.state_bytes - plain.state_bytes == kib * 1024
    assert control.flops == plain.flops
    assert f"| {kib} more | the same |" in PAGE
