"""Groups: invariance to translations, means and retractions on the group, and tangents as gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from qkflow.errors import NotFiniteError, UsageError
from qkflow.ops.groups import SO3, SU2, TORUS, Group, Rotations, check_axioms, find_group, near_identity

GROUPS = [TORUS, SU2, SO3, Rotations(2), Rotations(4)]
every_group = pytest.mark.parametrize("on", GROUPS, ids=lambda on: on.name)
ANGLES = st.floats(-20, 20)


def coordinates(on: Group, *shape: int, seed: int = 0) -> Tensor:
    """Random elements in float64."""
    x = on.random(*shape, generator=torch.Generator().manual_seed(seed)).double()
    return x if on == TORUS else on.points(x)


def elements(on: Group, *shape: int, seed: int = 0) -> Tensor:
    return on.points(coordinates(on, *shape, seed=seed))


def close(actual: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    assert_close(actual, expected, rtol=0, atol=atol)


def assert_elements(on: Group, g: Tensor) -> None:
    """Check that the points are on the group, to 1e-12."""
    if isinstance(on, Rotations):
        m = g.unflatten(-1, (on.n, on.n))
        close(m @ m.mT, torch.eye(on.n, dtype=g.dtype).expand_as(m))
        close(torch.linalg.det(m), torch.ones_like(m[..., 0, 0]))
    else:
        close(g.norm(dim=-1), torch.ones_like(g[..., 0]))


def inverse(on: Group, g: Tensor) -> Tensor:
    if isinstance(on, Rotations):
        return g.unflatten(-1, (on.n, on.n)).mT.flatten(-2)
    return g * torch.tensor([1.0] + [-1.0] * (on.ambient - 1), dtype=g.dtype)


@every_group
def test_the_built_in_groups_satisfy_the_axioms(on: Group) -> None:
    check_axioms(on)


@every_group
def test_products_are_associative_and_invertible(on: Group) -> None:
    g, h, c = (elements(on, 6, seed=i) for i in range(3))
    identity = on.points(on.identity().double()).expand_as(g)
    assert_elements(on, on.multiply(g, h))
    close(on.multiply(on.multiply(g, h), c), on.multiply(g, on.multiply(h, c)))
    close(on.multiply(g, identity), g)
    close(on.multiply(identity, g), g)
    close(on.multiply(g, inverse(on, g)), identity)


@every_group
def test_random_elements_cover_the_group(on: Group) -> None:
    assert_elements(on, elements(on, 40))
    close(elements(on, 4000).mean(0), torch.zeros(on.ambient, dtype=torch.float64), atol=0.06)
    assert on.random(2, 3).shape == (2, 3, on.size)


@every_group
def test_similarity_and_distance_are_invariant_under_translation(on: Group) -> None:
    g, h, c = (elements(on, 6, seed=i) for i in range(3))
    for measure in (on.similarity, on.distance):
        close(measure(on.multiply(c, g), on.multiply(c, h)), measure(g, h))
        close(measure(on.multiply(g, c), on.multiply(h, c)), measure(g, h))
        close(measure(g, h), measure(h, g))


@every_group
def test_distance_is_a_metric(on: Group) -> None:
    g, h, c = (elements(on, 50, seed=i) for i in range(3))
    close(on.distance(g, g), torch.zeros(50, dtype=torch.float64))
    assert bool((on.distance(g, h) > 1e-3).all())
    assert bool((on.distance(g, h) <= on.distance(g, c) + on.distance(c, h) + 1e-12).all())


@pytest.mark.parametrize(("on", "planes"), [(TORUS, 1), (SU2, 1), (SO3, 1), (Rotations(2), 1), (Rotations(4), 2)])
@given(angle=st.floats(-math.pi, math.pi), seed=st.integers(0, 3))
@settings(deadline=None, max_examples=25)
def test_the_distance_of_a_turn_is_its_angle(on: Group, planes: int, angle: float, seed: int) -> None:
    g = elements(on, seed=seed)
    turn = on.turn(torch.tensor(angle, dtype=torch.float64))
    assert float(on.distance(g, on.multiply(turn, g))) == pytest.approx(math.sqrt(planes) * abs(angle), abs=1e-10)


def test_distance_on_the_torus_is_the_angle() -> None:
    theta = torch.tensor([0.0, 3.0, -3.0, 1e-9], dtype=torch.float64)[:, None]
    g = TORUS.points(theta)
    expected = torch.tensor([3.0, 2 * math.pi - 6, 3 + 1e-9], dtype=torch.float64)
    close(TORUS.distance(g[:-1], g[1:]), expected)


def test_distance_of_rotations_is_the_relative_angle() -> None:
    g, h = elements(SO3, 20), elements(SO3, 20, seed=1)
    trace = SO3.similarity(g, h)
    close(SO3.distance(g, h), ((trace - 1) / 2).acos())


@every_group
@given(a=ANGLES, b=ANGLES)
@settings(deadline=None, max_examples=15)
def test_turns_add_and_are_elements(on: Group, a: float, b: float) -> None:
    first, second, both = (on.turn(torch.tensor(x, dtype=torch.float64)) for x in (a, b, a + b))
    close(on.multiply(first, second), both)
    assert_elements(on, both)


@every_group
def test_a_mean_maximizes_similarity(on: Group) -> None:
    g, weights = elements(on, 7, 3), torch.rand(7, 3, dtype=torch.float64)
    mean = on.mean(g, weights)
    assert_elements(on, mean)
    total = (weights.unsqueeze(-1) * g).sum(-2)
    close(on.tangent(mean, total), torch.zeros(7, on.size, dtype=torch.float64))
    for other in elements(on, 200, 7, seed=5):
        assert bool((on.similarity(other, total) <= on.similarity(mean, total) + 1e-12).all())


@every_group
def test_means_are_equivariant_under_translation(on: Group) -> None:
    g, weights, c = elements(on, 7, 3), torch.rand(7, 3, dtype=torch.float64), elements(on, 7, 1, seed=1)
    for moved, at in ((on.multiply(c.expand_as(g), g), 0), (on.multiply(g, c.expand_as(g)), 1)):
        mean = on.mean(g, weights)
        pair = (c.squeeze(-2), mean) if at == 0 else (mean, c.squeeze(-2))
        close(on.mean(moved, weights), on.multiply(*pair), atol=1e-11)
    close(on.mean(g[:, :1], weights[:, :1]), g[:, 0])


@every_group
@pytest.mark.parametrize("scale", [1e-100, 1e-6, 1.0, 1e100])
def test_a_mean_is_an_element_for_any_weights(on: Group, scale: float) -> None:
    g = elements(on, 7, 3)
    mean = on.mean(g, torch.full((7, 3), scale, dtype=torch.float64))
    assert_elements(on, mean)
    close(mean, on.mean(g, torch.ones(7, 3, dtype=torch.float64)), atol=1e-10)


@every_group
def test_a_mean_with_zero_weights_has_finite_values_and_gradients(on: Group) -> None:
    """Elements that cancel have no mean: it is zero on the torus and in SU(2), and attracts no element."""
    g = elements(on, 4, 2).requires_grad_()
    opposite = torch.stack([g[:, 0], -g[:, 0]], -2)
    mean = on.mean(opposite, torch.full((4, 2), 0.5, dtype=torch.float64))
    assert bool(mean.isfinite().all())
    drawn = on.tangent(g[:, 0], torch.zeros_like(mean))
    assert bool((drawn == 0).all())


@every_group
@pytest.mark.parametrize("length", [0.0, 1e-3, 1.0, 30.0])
def test_retracted_elements_lie_on_the_group(on: Group, length: float) -> None:
    x = coordinates(on, 9)
    change = length * torch.randn(9, on.size, dtype=torch.float64)
    after = on.retract(x, change)
    assert after.shape == x.shape
    assert_elements(on, on.points(after))
    if on != TORUS:
        close(on.points(after), after)
    if length == 0:
        close(on.points(after), on.points(x))


@every_group
def test_tangent_is_the_gradient_of_similarity_on_the_group(on: Group) -> None:
    x, m = coordinates(on, 5), torch.randn(5, on.ambient, dtype=torch.float64)
    a = torch.zeros(5, on.dim, dtype=torch.float64, requires_grad=True)
    moved = on.points(on.retract(x, on.push(on.points(x), a)))
    (slope,) = torch.autograd.grad((moved * m).sum(), a)
    pull = on.tangent(on.points(x), m)
    for i, direction in enumerate(torch.eye(on.dim, dtype=torch.float64)):
        along = on.push(on.points(x), direction.expand(5, -1))
        close((pull * along).sum(-1), slope[:, i], atol=1e-11)


@every_group
def test_tangent_is_the_projection_on_the_tangent_space(on: Group) -> None:
    """The remainder is orthogonal to every tangent, and a second projection changes nothing."""
    x, m = coordinates(on, 5), torch.randn(5, on.ambient, dtype=torch.float64)
    g = on.points(x)

    def moved(change: Tensor) -> Tensor:
        """The derivative of the point with respect to its coordinates."""
        return torch.autograd.functional.jvp(lambda s: on.points(on.retract(x, s)), torch.zeros_like(x), change)[1]

    pulled = moved(on.tangent(g, m))
    for direction in torch.eye(on.dim, dtype=torch.float64):
        close((moved(on.push(g, direction.expand(5, -1))) * (m - pulled)).sum(-1), torch.zeros(5).double(), atol=1e-11)
    close(on.tangent(g, pulled), on.tangent(g, m), atol=1e-11)


@every_group
def test_tangents_are_equivariant_under_translation(on: Group) -> None:
    g, m, c = elements(on, 5), torch.randn(5, on.ambient, dtype=torch.float64), elements(on, 5, seed=3)
    pull = on.tangent(g, m)
    if on == TORUS:  # its coordinates are angles, not points
        close(on.tangent(on.multiply(c, g), on.multiply(c, m)), pull)
        return
    close(on.tangent(on.multiply(c, g), on.multiply(c, m)), on.multiply(c, pull))
    close(on.tangent(on.multiply(g, c), on.multiply(m, c)), on.multiply(pull, c))


@every_group
def test_gradients_match_finite_differences(on: Group) -> None:
    x = coordinates(on, 2).requires_grad_()
    off = (x.detach() + 0.3 * torch.randn_like(x)).requires_grad_()
    m = torch.randn(2, on.ambient, dtype=torch.float64, requires_grad=True)
    a = torch.randn(2, on.dim, dtype=torch.float64, requires_grad=True)
    # `x` is on the group, where derivatives of singular vectors are not finite; `off` is not
    assert gradcheck(on.points, x, fast_mode=True)
    assert gradcheck(on.points, off, fast_mode=True)
    assert gradcheck(lambda x, m: on.tangent(on.points(x), m), (off, m), fast_mode=True)
    assert gradcheck(lambda x, a: on.retract(x, on.push(on.points(x), a)), (x, a), fast_mode=True)
    assert gradcheck(on.turn, a, fast_mode=True)


def test_the_nearest_rotation_has_a_gradient_at_the_identity_and_at_reflections() -> None:
    for start in (torch.eye(3), torch.diag(torch.tensor([3.0, 2.0, -1.0])), torch.diag(torch.tensor([2.0, 1.0, 0.0]))):
        m = start.double().flatten().requires_grad_()
        g = SO3.points(m)
        assert_elements(SO3, g.detach())
        assert gradcheck(SO3.points, m) if float(start.diagonal().prod()) else True
        (slope,) = torch.autograd.grad((g * torch.randn(9, dtype=torch.float64)).sum(), m)
        assert bool(slope.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("on", [TORUS, SU2], ids=lambda on: on.name)
def test_a_tiny_sum_is_never_longer_than_an_element(on: Group, dtype: torch.dtype) -> None:
    g = elements(on, 5, 1).to(dtype)
    for exponent in range(-320, -10, 7):
        mean = on.mean(g, torch.full((5, 1), 10.0**exponent, dtype=dtype))
        assert float(mean.norm(dim=-1).max()) < 1.01


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_rotations_raise(bad: float) -> None:
    with pytest.raises(NotFiniteError, match="rotations must be finite"):
        SO3.points(torch.full((9,), bad))


@pytest.mark.parametrize("on", [SU2, SO3], ids=lambda on: on.name)
def test_16_bit_elements_are_accurate_and_keep_their_dtype(on: Group) -> None:
    x = on.random(20)
    assert on.points(x.bfloat16()).dtype == torch.bfloat16
    assert_close(on.points(x.bfloat16()).float(), on.points(x), rtol=0, atol=0.02)


@every_group
def test_elements_near_the_identity_have_the_given_spread(on: Group) -> None:
    near = on.points(near_identity(on, 500, spread=0.1).double())
    assert_elements(on, near)
    identity = on.points(on.identity().double()).expand_as(near)
    distance = on.distance(identity, near)
    assert float((distance.square().mean() / on.dim).sqrt()) == pytest.approx(0.1, rel=0.15)


def test_so2_is_the_torus() -> None:
    theta, plane = coordinates(TORUS, 6), Rotations(2)
    g = plane.turn(theta.squeeze(-1))
    close(plane.distance(g[:3], g[3:]), TORUS.distance(*TORUS.points(theta).split(3)))
    close(plane.similarity(g[:3], g[3:]), 2 * TORUS.similarity(*TORUS.points(theta).split(3)))


def test_groups_are_found_by_name() -> None:
    assert [find_group(on.name) for on in GROUPS] == GROUPS
    with pytest.raises(UsageError, match="unknown group 'su3': did you mean 'su2'"):
        find_group("su3")
    with pytest.raises(UsageError, match="at least 2 dimensions, got 1"):
        find_group("so1")
    assert isinstance(SU2, Group)


class Modified:
    """Unit quaternions with one method replaced."""

    def __init__(self, method: str, replacement: Callable[..., Any] | None) -> None:
        self.name, self.method, self.replacement = "odd", method, replacement

    def __getattr__(self, name: str) -> Any:
        if name != self.method:
            return getattr(SU2, name)
        if self.replacement is None:
            raise AttributeError(name)
        return self.replacement


def _explode(*given: Tensor) -> Tensor:
    raise ZeroDivisionError("custom error\nwith a second line")


BREACHES: dict[str, tuple[str, Callable[..., Any], str]] = {
    "random of another shape": ("random", lambda *s, generator: torch.ones(*s, 5), r"random\(3\) must be \[3, 4\]"),
    "points of another shape": (
        "points",
        lambda x: torch.ones(3, 2, 4),
        r"points\(x\) must be .* \[3, 4\], got \[3, 2, 4\]",
    ),
    "similarity of another shape": ("similarity", lambda g, h: g * h, r"similarity\(g, h\) must be .* \[3\]"),
    "a mean that is no number": ("mean", lambda g, weights: 0 * g[..., 0, :] / 0, r"mean\(g, weights\) must be finite"),
    "a pull of another shape": ("tangent", lambda g, m: m[..., :1], r"tangent\(g, m\) must be"),
    "a motion of another shape": ("push", lambda g, a: a[..., :1], r"push\(g, a\) must be"),
    "a change of another shape": ("retract", lambda x, v: x[..., :2], r"retract\(x, v\) must be"),
    "a product of another shape": ("multiply", lambda g, h: g[..., :2], r"multiply\(g, h\) must be"),
    "a turn of another shape": ("turn", lambda angle: angle, r"turn\(angle\) must be"),
    "a distance of another shape": ("distance", lambda g, h: g - h, r"distance\(g, h\) must be"),
    "similarity that sees where": ("similarity", lambda g, h: (g * h)[..., :2].sum(-1), "invariant under translation"),
    "similarity of its own": ("similarity", lambda g, h: (g * h).sum(-1) ** 3, "the dot product of points"),
    "a mean that leaves": ("mean", lambda g, weights: (weights.unsqueeze(-1) * g).sum(-2), "a mean must be an element"),
    "a pull towards itself": ("tangent", lambda g, m: m, r"tangent\(g, g\) must be zero"),
    "a pull of nothing": ("tangent", lambda g, m: 0 * m, "the component of m along the group"),
    "a pull twice as long": ("tangent", lambda g, m: 2 * SU2.tangent(g, m), "the component of m along the group"),
    "a change by nothing": ("retract", lambda x, v: -x - v, r"retract\(x, 0\) must be x"),
    "an identity that changes": ("identity", lambda: torch.eye(4)[1], "the identity times g must be g"),
    "turns that do not add up": ("turn", lambda angle: SU2.turn(angle**2), r"must be turn\(a \+ b\)"),
    "far from itself": ("distance", lambda g, h: 1 + 0 * g.sum(-1), "to itself must be zero"),
    "one that throws": ("multiply", _explode, "fails: ZeroDivisionError: custom error"),
}


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Disable type checks, which would reject the group first."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.mark.parametrize("breach", BREACHES)
def test_a_group_that_violates_an_axiom_is_refused(breach: str, unchecked: None) -> None:
    method, replacement, message = BREACHES[breach]
    with pytest.raises(UsageError, match=message) as raised:
        check_axioms(Modified(method, replacement))
    assert "'odd'" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_method_is_reported(unchecked: None) -> None:
    check_axioms(Modified("", None))
    with pytest.raises(UsageError, match="is not a group: it has no multiply"):
        check_axioms(Modified("multiply", None))


@pytest.mark.parametrize("on_the_group", [False, True])
def test_rotations_have_second_derivatives(on_the_group: bool) -> None:
    x = torch.randn(2, 9, dtype=torch.float64)
    x = SO3.points(x) if on_the_group else x
    assert torch.autograd.gradgradcheck(SO3.points, x.requires_grad_())


def test_padding_on_rotations_has_a_second_derivative() -> None:
    x = SO3.random(2).double()
    x[1] = 0
    x.requires_grad_()
    points = SO3.points(x) * torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    (first,) = torch.autograd.grad(points.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert bool(second.isfinite().all())
    assert not bool(second[1].any())
