"""What can be seen of tokens on a group is what they are and what a layer does to them."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from qkflow.mechanisms import mechanism
from qkflow.mechanisms.observed_phases import locking, order, phase_exhibits, pull, row_energy
from qkflow.mechanisms.synchrony import SynchronyMechanism
from qkflow.ops import kuramoto
from qkflow.ops.groups import SO3, SU2, TORUS, Group

GROUPS = (TORUS, SU2, SO3)
SPECS = (
    "kuramoto",
    "kuramoto:gate=static,temperature=fixed",
    "kuramoto:frustrated=True",
    "kuramoto:frustrated=True,harmonics=3",
    "kuramoto:values=projected",
    "group:group=su2,frustrated=True",
    "group:group=so3",
)


def layer(spec: str, *, step: float = 0.3) -> SynchronyMechanism:
    made = mechanism(spec)(72, 4, 0, 1).double()  # of which it takes half
    assert isinstance(made, SynchronyMechanism)
    for name, parameter in made.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        if name == "step":
            parameter.data.fill_(step)
    return made


def stream(made: SynchronyMechanism, t: int = 6) -> torch.Tensor:
    return made.group.random(1, t, 72 // made.group.size).double().flatten(2)


def elements(on: Group, t: int, generator: int) -> torch.Tensor:
    return on.points(on.random(t, 2, 3, generator=torch.Generator().manual_seed(generator)).double())


@given(on=st.sampled_from(GROUPS), t=st.integers(1, 8), seed=st.integers(0, 9999))
@settings(deadline=None, max_examples=10)
def test_locking_is_a_normalised_similarity_whose_mean_is_that_of_the_squared_order(
    on: Group, t: int, seed: int
) -> None:
    points = elements(on, t, seed)
    found = locking(points)
    alike = on.similarity(*torch.broadcast_tensors(points[:, None], points)) / on.similarity(points, points)
    assert_close(found, alike.mean(-1).movedim(2, 0), rtol=0, atol=1e-12)
    assert (found.abs() <= 1 + 1e-12).all()
    assert_close(found.mean((1, 2)), order(points).square().mean(1), rtol=0, atol=1e-12)


@given(on=st.sampled_from(GROUPS), seed=st.integers(0, 9999))
@settings(deadline=None, max_examples=10)
def test_a_common_translation_changes_neither_order_nor_locking(on: Group, seed: int) -> None:
    points = elements(on, 5, seed)
    by = on.points(on.random(1, 2, 3).double()).expand_as(points)
    moved = on.multiply(by, points)
    assert_close(order(moved), order(points), rtol=0, atol=1e-6)  # random elements are made in float32
    assert_close(locking(moved), locking(points), rtol=0, atol=1e-6)


def test_the_order_of_angles_is_that_of_the_operator() -> None:
    theta = 3 * torch.randn(7, 2, 3, dtype=torch.float64)
    assert_close(order(kuramoto.points(theta)), kuramoto.order_parameter(theta.transpose(0, 1)), rtol=0, atol=1e-12)
    assert_close(order(elements(SO3, 1, 0)), torch.ones(2, 3, dtype=torch.float64))


def test_the_energy_on_the_torus_is_that_of_the_operator_for_each_coordinate() -> None:
    made = layer("kuramoto")
    theta = stream(made)
    truth = kuramoto.energy(theta.unflatten(-1, (2, 36)), made.weights(theta))[0] / 36
    assert_close(pull(made, theta).energy.before, tuple(truth.mean(0).tolist()))


@pytest.mark.parametrize("spec", SPECS)
def test_what_draws_a_token_is_the_descent_of_its_energy(spec: str) -> None:
    made = layer(spec, step=1.0)
    on, x = made.group, stream(made)
    points = made.points(x).unflatten(-1, (-1, on.ambient))[0]
    gathered = torch.einsum("hts,shv->thv", made.weights(x)[0], made.values(x)[0])
    kernel = [None if part is None else part.detach() for part in (made.lag, made.amplitude)]
    here = x.clone().requires_grad_()
    moved = made.points(here).unflatten(-1, (-1, on.ambient))[0]
    (slope,) = torch.autograd.grad(row_energy(moved, gathered.detach(), on, *kernel).sum(), here)
    scale = made.elements * float(on.similarity(points[0, 0, 0], points[0, 0, 0]))
    assert_close(made(x)[0].detach(), -scale * slope, rtol=0, atol=1e-6)


@pytest.mark.parametrize("spec", ["kuramoto", "group:group=su2", "group:group=so3"])
def test_a_small_step_with_the_others_at_rest_lowers_the_energy_of_every_head(spec: str) -> None:
    made = layer(spec)
    seen = pull(made, stream(made)).energy
    assert all(low < high for low, high in zip(seen.pulled, seen.before, strict=True))


@pytest.mark.parametrize("spec", SPECS)
def test_a_pull_ends_where_the_layer_puts_the_tokens(spec: str) -> None:
    made = layer(spec)
    x = stream(made)
    ends = made.group.retract(*(each.unflatten(-1, (2, -1, made.group.size)) for each in (x, made(x)[0])))
    assert_close(pull(made, x).after, made.group.points(ends)[0].detach(), rtol=0, atol=1e-10)
    assert len(pull(made, x).energy.after) == 2


def test_looking_takes_the_first_sequence_and_changes_nothing() -> None:
    made = layer("kuramoto")
    x = torch.cat([stream(made), stream(made)])
    before = {name: part.clone() for name, part in made.state_dict().items()}
    assert repr(phase_exhibits(made, x)) == repr(phase_exhibits(made, x[:1]))
    assert_close(made.state_dict(), before, rtol=0, atol=0)


def test_exhibits_are_small_plain_data_and_wheels_need_a_circle() -> None:
    made = layer("kuramoto")
    shown = {item.title: item for item in made.exhibits(stream(made, t=9))}
    by_order, _, heat, wheels = shown.values()
    assert [item.kind for item in shown.values()] == ["lines", "lines", "heat", "wheel"]
    assert (by_order.x, by_order.series) == (("R",), ("head 1", "head 2"))
    assert all(math.isnan(heat.values[t][u]) == (u >= t) for t in range(9) for u in range(9))
    assert len(wheels.series) == 4  # two heads: the most, then the least
    assert [item.kind for item in layer("group").exhibits(stream(layer("group")))] == ["lines", "lines", "heat"]
    assert len(json.dumps([row[:t] for t, row in enumerate(heat.values)])) < 9 * 9 * 8


def test_wheels_show_the_most_and_the_least_ordered_coordinate() -> None:
    made = layer("kuramoto")
    theta = stream(made, t=8).unflatten(-1, (2, 36))
    theta[:, :, 1, 5] = 0.7  # all in one phase
    theta[0, :, 1, 9] = torch.arange(8) * math.pi / 4  # all around
    wheels = made.exhibits(theta.flatten(2))[-1]
    assert wheels.series[1] == "head 2, coordinate 6"
    assert wheels.values[1] == (0.7,) * 8
    assert wheels.series[3] == "head 2, coordinate 10"


def test_many_heads_show_a_few_and_one_coordinate_shows_once() -> None:
    many = mechanism("kuramoto")(24, 12, 0, 1)
    assert len(many.exhibits(torch.randn(1, 5, 24))[-1].series) == 8
    single = mechanism("kuramoto")(2, 2, 0, 1)
    assert len(single.exhibits(torch.randn(1, 1, 2))[-1].series) == 2
