"""Attention on groups: equations written out pair by pair, symmetries, states and errors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.testing import assert_close

from qkflow.errors import NotFiniteError, UsageError
from qkflow.layout import Layout
from qkflow.mechanisms import mechanism
from qkflow.mechanisms.kuramoto import GroupAttention, GroupConfig, KuramotoAttention, KuramotoConfig
from qkflow.ops import kuramoto
from qkflow.ops.groups import SO3, SU2, Group, find_group
from qkflow.state import KVCache, ShiftedKVCache

GATES = ["static", "content", "complex", "off"]
TURN = 2 * math.pi
B, T, H, J = 2, 5, 2, 3


def layer(**options: Any) -> KuramotoAttention:
    return generic(KuramotoAttention(H * J, H, config=KuramotoConfig(**options)))


def on_group(width: int, heads: int, **options: Any) -> GroupAttention:
    return generic(GroupAttention(width, heads, config=GroupConfig(**options)))


def generic(module: Any) -> Any:
    """Perturb the parameters: lags and harmonics are zero at initialization, gates are one."""
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def angles(t: int = T) -> Tensor:
    return (3 * torch.randn(B, t, H * J, dtype=torch.float64)).requires_grad_()


def same(actual: Tensor, expected: Tensor, *leaves: Tensor, atol: float = 1e-12) -> None:
    """Compare values, and the gradients of a random weighted sum."""
    assert_close(actual, expected, rtol=0, atol=atol)
    if leaves:
        weight = torch.randn_like(expected)
        each = (
            torch.autograd.grad(y, leaves, weight, retain_graph=True, materialize_grads=True)
            for y in (actual, expected)
        )
        for a, b in zip(*each, strict=True):
            assert_close(a, b, rtol=0, atol=10 * atol)


def reference_query(module: KuramotoAttention, theta: Tensor) -> Tensor:
    r"""The query of each token and coordinate as a complex number  \gamma_{tj} e^{i \theta_{tj}}."""
    points = torch.stack([theta.cos(), theta.sin()], -1).flatten(2)  # [b t (h j 2)]
    z = torch.polar(torch.ones_like(theta), theta).view(*theta.shape[:2], H, J)
    match module.config.gate:
        case "off":
            return z
        case "static":
            assert module.gate is not None
            return z * F.softplus(module.gate)
        case "content":
            assert module.gate_map is not None
            assert module.gate is not None
            return z * F.softplus((points @ module.gate_map.weight.T).view_as(z) + module.gate)
        case "complex":
            assert module.query is not None
            query = (points @ module.query.weight.T).view(*theta.shape[:2], H, J, 2)
            return torch.complex(query[..., 0], query[..., 1])


def score(module: KuramotoAttention, theta: Tensor, t: int, u: int) -> Tensor:
    r"""s_{tu} = \tau \sum_j Re(\gamma_{tj} e^{i \theta_{tj}} e^{-i \theta_{uj}} e^{i \omega_j (t - u)}),  for [b h]."""
    base = module.config.rotary_base
    omega = torch.zeros(J).double() if base is None else base ** -(torch.arange(J).double() / J)
    recorded = theta[:, u].view(-1, H, J) - omega * (t - u)
    return module.temperature.exp() * (
        reference_query(module, theta)[:, t] * torch.polar(torch.ones_like(recorded), -recorded)
    ).real.sum(-1)


def reference_weights(module: KuramotoAttention, theta: Tensor) -> list[Tensor]:
    """Return the weights of each token [b h t + 1]: of the zero key, whose score is 0, and of every earlier token."""
    zero = theta.new_zeros(len(theta), H)
    rows = [[zero, *(score(module, theta, t, u) for u in range(t))] for t in range(theta.shape[1])]
    return [torch.stack(row, -1).softmax(-1) for row in rows]


def as_map(rows: list[Tensor], *, successors: bool) -> Tensor:
    """Return the weights by value: of the token of a key, or of its successor, which is the first for the zero key."""
    first = 0 if successors else 1
    return torch.stack([F.pad(row[..., first:], (0, len(rows) - row.shape[-1] + first)) for row in rows], 2)


def reference_update(module: KuramotoAttention, theta: Tensor, map: Tensor) -> Tensor:
    r"""\eta_j \sum_m a_{mj} \sum_u A_{tu} \sin(m (\theta_{uj} - \theta_{tj}) + \alpha_{mj}),  a_1 = 1."""
    x = theta.view(*theta.shape[:2], H, J)
    difference = x[:, None] - x[:, :, None]  # [b t u h j]
    total = torch.zeros_like(x)
    for m in range(1, module.config.harmonics + 1):
        amplitude = 1.0 if m == 1 else module.amplitude[m - 2]  # type: ignore[index]
        lag = 0.0 if module.lag is None else module.lag[m - 1]
        total = total + amplitude * torch.einsum("bhtu,btuhj->bthj", map, (m * difference + lag).sin())
    return (total * module.step).flatten(2)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("base", [10000.0, None])
def test_weights_and_update_match_the_equations(gate: str, base: float | None) -> None:
    module, theta = layer(gate=gate, rotary_base=base), angles()
    leaves = [theta, *module.parameters()]
    map = as_map(reference_weights(module, theta), successors=False)
    same(module.weights(theta), map, theta)
    same(module(theta)[0], reference_update(module, theta, map), *leaves)


@pytest.mark.parametrize("gate", ["static", "content", "off"])
def test_score_is_a_sum_of_gated_cosines_for_real_gates(gate: str) -> None:
    """The score above without complex numbers."""
    module, theta = layer(gate=gate), angles().detach()
    x, lengths = theta.view(B, T, H, J), reference_query(module, theta).abs()
    omega = 10000.0 ** -(torch.arange(J).double() / J)
    for t in range(T):
        for u in range(t):
            cosines = lengths[:, t] * (x[:, t] - x[:, u] + omega * (t - u)).cos()
            same(score(module, theta, t, u), module.temperature.exp() * cosines.sum(-1))


@pytest.mark.parametrize("options", [{}, {"gate": "static", "step": "head"}, {"gate": "off", "step": "fixed"}], ids=str)
def test_update_equals_kuramoto_coupling_with_the_map(options: dict[str, Any]) -> None:
    module, theta = layer(**options), angles()
    pull = kuramoto.coupling(theta.view(B, T, H, J), module.weights(theta)) * module.step
    same(module(theta)[0], pull.flatten(2), theta, *module.parameters())


@pytest.mark.parametrize("harmonics", [1, 2, 3])
@pytest.mark.parametrize("gate", ["static", "complex"])
def test_frustrated_update_matches_the_equations(gate: str, harmonics: int) -> None:
    module, theta = layer(gate=gate, frustrated=True, harmonics=harmonics), angles()
    map = as_map(reference_weights(module, theta), successors=True)
    same(module.weights(theta), map, theta)
    same(map.sum(-1), torch.ones(B, H, T, dtype=torch.float64))
    same(module(theta)[0], reference_update(module, theta, map), theta, *module.parameters())


@pytest.mark.parametrize("frustrated", [False, True])
def test_window_includes_the_zero_key(frustrated: bool) -> None:
    module, theta = layer(gate="static", frustrated=frustrated, window=3), angles(7)
    rows = reference_weights(module, theta)
    for t, row in enumerate(rows):
        near = row * (torch.arange(t + 1) > t - 3)
        rows[t] = near / near.sum(-1, keepdim=True)
    map = as_map(rows, successors=frustrated)
    same(module.weights(theta), map, theta)
    same(module(theta)[0], reference_update(module, theta, map), theta, *module.parameters())


def test_first_token_attends_to_itself_if_not_strict() -> None:
    module, theta = layer(gate="static", strict=False), angles()
    scores = torch.full((B, H, T, T), -torch.inf, dtype=torch.float64)
    for t in range(T):
        for u in range(t + 1):
            scores[:, :, t, u] = score(module, theta, t, u)
    map = scores.softmax(-1)
    same(module.weights(theta), map, theta)
    same(module(theta)[0], reference_update(module, theta, map), theta, *module.parameters())


def test_projected_values_differ_from_kuramoto_coupling() -> None:
    module, theta = layer(values="projected"), angles()
    pull = kuramoto.coupling(theta.view(B, T, H, J), module.weights(theta)) * module.step
    assert float((module(theta)[0] - pull.flatten(2)).detach().abs().max()) > 0.1


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("frustrated", [False, True])
def test_full_turns_change_nothing(gate: str, frustrated: bool) -> None:
    module, theta = layer(gate=gate, frustrated=frustrated, harmonics=1 + frustrated), angles(6)
    around = theta + TURN * torch.randint(-7, 8, theta.shape).double()
    same(module.weights(around), module.weights(theta), theta, atol=1e-11)
    same(module(around)[0], module(theta)[0], theta, *module.parameters(), atol=1e-11)
    with torch.no_grad():
        (head, state), (_, turned) = module(theta[:, :4]), module(around[:, :4])
        tail, _ = module(theta[:, 4:], turned)
        same(torch.cat([head, tail], 1), module(theta)[0], atol=1e-11)
        same(module(around[:, 4:], state)[0], tail, atol=1e-11)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("frustrated", [False, True])
def test_common_rotation_affects_content_gates_only(gate: str, frustrated: bool) -> None:
    module, theta, shift = layer(gate=gate, frustrated=frustrated), angles(), torch.randn(H * J, dtype=torch.float64)
    if gate in ("static", "off"):
        same(module(theta + shift)[0], module(theta)[0], theta, *module.parameters())
    else:
        assert float((module(theta + shift)[0] - module(theta)[0]).detach().abs().max()) > 1e-3


def test_weights_maximise_similarity_plus_entropy() -> None:
    r"""The weights p maximize <p, s> + \tau H(p)  for the scores s of unit temperature and  \tau = 1 / \exp."""
    module, theta = layer(gate="content"), angles().detach()
    map = module.weights(theta).detach()
    t, tau = T - 1, (-module.temperature).exp().detach()[:, None]
    zero = theta.new_zeros(B, H)
    s = tau * torch.stack([zero, *(score(module, theta, t, u).detach() for u in range(t))], -1)
    p = torch.cat([1 - map[:, :, t].sum(-1, keepdim=True), map[:, :, t, :t]], -1)

    def worth(p: Tensor) -> Tensor:
        return (p * s).sum(-1) + tau[:, 0] * torch.special.entr(p).sum(-1)

    slope = s - tau * (p.log() + 1)  # equal for every token at the maximum
    same(slope, slope.mean(-1, keepdim=True).expand_as(slope), atol=1e-11)
    others = torch.distributions.Dirichlet(torch.full((t + 1,), 0.5).double()).sample((300, B, H))
    near = (p + 1e-3 * (others - p)).clamp_min(0)
    assert bool((worth(others) < worth(p)).all())
    assert bool((worth(near) <= worth(p)).all())


@pytest.mark.parametrize("frustrated", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_torus_kernels_equal_the_general_path(gate: str, frustrated: bool) -> None:
    special, general = (
        layer(gate=gate, frustrated=frustrated),
        GroupAttention(
            H * J,
            H,
            config=GroupConfig(group="torus", gate=gate, frustrated=frustrated),  # type: ignore[arg-type]
        ).double(),
    )
    general.load_state_dict(special.state_dict())
    theta = angles()
    (actual, got_state), (expected, want_state) = general(theta), special(theta)
    assert torch.equal(actual, expected)
    assert torch.equal(general(theta, got_state)[0], special(theta, want_state)[0])
    leaves = [theta, *special.parameters()], [theta, *general.parameters()]
    for a, b in zip(
        torch.autograd.grad(expected.sum(), leaves[0]), torch.autograd.grad(actual.sum(), leaves[1]), strict=True
    ):
        assert torch.equal(a, b)


def tokens(on: Group, elements: int) -> Tensor:
    return on.points(on.random(1, 4, elements).double()).flatten(2).requires_grad_()


def translated(on: Group, x: Tensor, c: Tensor, side: str) -> Tensor:
    each = x.unflatten(-1, (-1, on.size))
    pair = (c.expand_as(each), each) if side == "left" else (each, c.expand_as(each))
    return on.multiply(*pair).flatten(2)


def equivariance_error(module: GroupAttention, c: Tensor, side: str) -> float:
    """Return the difference between the update of translated tokens and the translated update."""
    on, x = module.group, tokens(module.group, module.heads * module.elements).detach()
    return float((module(translated(on, x, c, side))[0] - translated(on, module(x)[0], c, side)).detach().abs().max())


@pytest.mark.parametrize("name", ["su2", "so3"])
def test_update_is_equivariant_under_translation(name: str) -> None:
    """With static gates, the update is equivariant under translation from the right.

    From the left, it is so only without drift and lag, or for elements that commute with them.
    """
    on = find_group(name)
    width, c = 2 * 2 * on.size, on.points(on.random(4).double())
    free = on_group(width, 2, group=name, gate="static", rotary_base=None)
    assert equivariance_error(free, c, "left") < 1e-12
    assert equivariance_error(free, c, "right") < 1e-12
    turn = on.turn(torch.randn(4, dtype=torch.float64))
    for options in ({}, {"frustrated": True}, {"frustrated": True, "rotary_base": None}):
        turning = on_group(width, 2, group=name, gate="static", **options)
        assert equivariance_error(turning, c, "right") < 1e-12
        assert equivariance_error(turning, turn, "left") < 1e-12
        assert equivariance_error(turning, c, "left") > 1e-3
    reading = on_group(width, 2, group=name, gate="content", rotary_base=None)
    assert equivariance_error(reading, c, "left") > 1e-3


@pytest.mark.parametrize(("name", "width", "heads"), [("su2", 8, 2), ("so3", 18, 2)])
def test_update_on_a_group_is_the_tangent_of_the_weighted_values(name: str, width: int, heads: int) -> None:
    module = on_group(width, heads, group=name, gate="static")
    on, x = module.group, tokens(module.group, width // module.group.size)
    g = on.points(x.unflatten(-1, (heads, -1, on.size)))
    q = g * (F.softplus(module.gate) * module.temperature.exp()[:, None]).unsqueeze(-1)  # type: ignore[operator]
    speed = 10000.0 ** -(torch.arange(module.elements).double() / module.elements)
    zero = x.new_zeros(1, heads)
    rows = []
    for t in range(4):
        shift = [on.turn((u - t) * speed).expand_as(g[:, u]) for u in range(t)]
        recorded = [on.similarity(q[:, t], on.multiply(shift[u], g[:, u])).sum(-1) for u in range(t)]
        rows.append(torch.stack([zero, *recorded], -1).softmax(-1))
    map = as_map(rows, successors=False)
    pull = on.tangent(g, torch.einsum("bhtu,buhea->bthea", map, g)) * module.step.unsqueeze(-1)
    same(module.weights(x), map, x)
    same(module(x)[0], pull.flatten(2), x, *module.parameters())


@pytest.mark.parametrize(
    ("spec", "width", "heads"),
    [
        ("kuramoto:frustrated=True,harmonics=2,heads=2", 4, 2),
        ("kuramoto:gate=content,heads=2", 4, 2),
        ("group:frustrated=True,heads=2", 8, 2),
        ("group:group=so3", 9, 1),
    ],
)
def test_gradients_match_finite_differences(spec: str, width: int, heads: int) -> None:
    module: Any = generic(mechanism(spec)(width, heads, 0, 1))
    x = torch.randn(1, 3, width, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda *_: module(x)[0], (x, *module.parameters()), fast_mode=True)


@pytest.mark.parametrize(
    "spec", ["kuramoto:heads=2", "kuramoto:frustrated=True,heads=2", "kuramoto:window=3,heads=2", "group:heads=2"]
)
def test_map_with_a_state_equals_rows_of_the_full_map(spec: str) -> None:
    module: Any = generic(mechanism(spec)(8, 4, 0, 1))
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    whole = module.weights(x)
    for cut in range(1, 7):
        _, state = module(x[:, :cut])
        map = module.weights(x[:, cut:], state)
        same(map, whole[:, :, cut:, -map.shape[-1] :])
        assert not bool(whole[:, :, cut:, : -map.shape[-1]].any())


@pytest.mark.parametrize("spec", ["kuramoto:heads=2", "kuramoto:frustrated=True,heads=2", "group:heads=2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_map_of_rows_with_different_lengths_has_slots_in_order(spec: str, side: Any) -> None:
    module: Any = generic(mechanism(spec)(8, 4, 0, 1))
    lengths, counts = [3, 1, 4], [2, 3, 1]
    x, more = torch.randn(3, 5, 8, dtype=torch.float64), torch.randn(3, 3, 8, dtype=torch.float64)
    layout, after = Layout.padded(lengths, 5, side=side), Layout.padded(counts, 3, side=side)
    _, state = module(x, layout=layout)
    map = module.weights(more, state, after)
    slots = state.cache.positions
    assert map.shape == (3, 2, 3, slots.shape[1] + 3)
    for i, count in enumerate(counts):
        alone = torch.cat([x[i, layout.valid[i]], more[i, after.valid[i]]])[None]
        whole, now = module.weights(alone)[0], lengths[i] + torch.arange(count)
        z = map[i][:, after.valid[i]]
        is_held = slots[i] >= 0
        assert slots[i][is_held].tolist() == list(range(lengths[i]))
        same(z[..., : slots.shape[1]][..., is_held], whole[:, now, : lengths[i]])
        same(z[..., slots.shape[1] :][..., after.valid[i]], whole[:, now][..., now])
        assert not bool(z[..., : slots.shape[1]][..., ~is_held].any())
        assert not bool(z[..., slots.shape[1] :][..., ~after.valid[i]].any())
        assert not bool(map[i][:, ~after.valid[i]].any())


def test_config_can_set_the_number_of_heads() -> None:
    for spec in ("kuramoto:heads=4", "group:heads=4"):
        module: Any = mechanism(spec)(16, 2, 0, 1)
        assert module.heads == 4
        assert module.weights(torch.randn(1, 3, 16)).shape == (1, 4, 3, 3)


def test_param_options_and_circuits_name_parameters() -> None:
    module = layer(frustrated=True, harmonics=2, gate="content")
    names = {name for name, _ in module.named_parameters()}
    circuits = module.circuits()
    assert {*circuits.qk, *circuits.ov} == names
    assert {"lag", "amplitude", "step"} <= set(circuits.ov)
    assert set(module.param_options()) == {"gate", "temperature", "step", "lag", "amplitude"}
    assert not any(pace.decay for pace in module.param_options().values())
    assert set(layer(gate="off", temperature="fixed", step="fixed").param_options()) == set()


REFUSED: dict[str, tuple[Any, str]] = {
    "half elements": (lambda: KuramotoAttention(10, 4), "multiple of 4"),
    "half quaternions": (lambda: GroupAttention(12, 2), "su2.* multiple of 8"),
    "half rotations": (lambda: GroupAttention(32, 4, config=GroupConfig(group="so3")), "so3.* multiple of 36"),
    "no heads": (lambda: KuramotoAttention(8, 0), "for 0 heads"),
    "harmonics on su2": (
        lambda: GroupAttention(8, 2, config=GroupConfig(frustrated=True, harmonics=2)),
        "torus only, got 2 on su2",
    ),
    "harmonics alone": (lambda: KuramotoConfig(harmonics=2), "frustrated=True"),
    "no harmonics": (lambda: KuramotoConfig(harmonics=0), "harmonics must be"),
    "frustration with oneself": (lambda: KuramotoConfig(frustrated=True, strict=False), "requires strict=True"),
    "no heads by config": (lambda: KuramotoConfig(heads=0), "heads must be at least 1, got 0"),
    "no window": (lambda: KuramotoConfig(window=0), "window must be at least 1, got 0"),
    "no sharpness": (lambda: KuramotoConfig(sharpness=0.0), "sharpness must be a finite number above 0"),
    "no base": (lambda: KuramotoConfig(rotary_base=0.0), "rotary_base must be a finite number above 0"),
    "endless steps": (lambda: KuramotoConfig(step_size=math.inf), "step_size must be a finite number"),
    "an unknown group": (lambda: GroupConfig(group="su5"), "unknown group 'su5'"),
    "two groups": (lambda: GroupAttention(9, 1, config=GroupConfig(group="so3"), on=SO3), "got a group twice"),
    "no tokens": (lambda: layer()(torch.zeros(1, 0, 6).double()), "no tokens"),
}


@pytest.mark.parametrize("option", REFUSED)
def test_invalid_configs_raise(option: str) -> None:
    make, message = REFUSED[option]
    with pytest.raises(UsageError, match=message) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_custom_group_equals_the_built_in_one() -> None:
    mine = replace(SU2, name="mine")
    module = GroupAttention(8, 2, on=mine).double()
    assert module.group is mine
    other = GroupAttention(8, 2).double()
    other.load_state_dict(module.state_dict())
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    assert torch.equal(module(x)[0], other(x)[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_angles_raise_except_at_padding(bad: float) -> None:
    module, theta = layer(), angles().detach()
    expected = module(theta[1:, :3])[0]
    theta[1, 3:] = bad
    with pytest.raises(NotFiniteError, match="phases must be finite"):
        module(theta)
    same(module(theta, layout=Layout.padded([T, 3], T))[0][1:, :3], expected)


def test_foreign_states_raise() -> None:
    module, theta = layer(), angles().detach()
    _, state = module(theta)
    assert isinstance(state, ShiftedKVCache)
    for wrong in (
        KVCache.start((theta,)),
        KuramotoAttention(8, 2).double()(torch.zeros(B, 3, 8).double())[1],
        layer(frustrated=True)(theta)[1],
        layer(frustrated=True, harmonics=2)(theta)[1],
        on_group(8, 2)(torch.randn(B, 3, 8).double())[1],
    ):
        with pytest.raises(UsageError, match=r"got a KVCache|another mechanism"):
            module(theta, wrong)
    with pytest.raises(UsageError, match=r"holds 2 rows, the input 1: select\(\)"):
        module(theta[:1], state)
    assert module(theta[:1], state.select(torch.tensor([1])))[0].shape == (1, T, H * J)


def test_bias_and_hook_on_the_query_apply_at_any_length() -> None:
    module, heard, theta = layer(), [], angles(3)
    assert module.query is not None
    module.query.bias = nn.Parameter(torch.ones(2 * H * J, dtype=torch.float64))
    module.query.register_forward_hook(lambda *_: heard.append("query"))
    whole, _ = module(theta)
    assert heard == ["query"]
    _, state = module(theta[:, :2])
    same(module(theta[:, 2:], state)[0], whole[:, 2:])
