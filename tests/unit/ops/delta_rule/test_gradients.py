"""Gradients: any subset of inputs, any memory layout, and compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from qkflow.ops.delta_rule import delta_rule

NAMES = ("q", "k", "v", "beta", "log_alpha", "erase", "state")


@pytest.mark.parametrize("vector", [False, True])
def test_gradients_match_finite_differences(helpers: Any, backend: str, vector: bool) -> None:
    inputs = helpers.make_inputs(3, rows=1, heads=1, key=2, value=2, vector=vector)
    leaves = tuple(x.requires_grad_() for x in inputs.values())
    assert gradcheck(partial(_by_name, list(inputs), backend), leaves)


def _by_name(names: list[str], backend: str, *args: Tensor) -> tuple[Tensor, Tensor]:
    return delta_rule(**dict(zip(names, args, strict=True)), backend=backend, chunk=2)


def test_the_naive_form_has_second_derivatives(helpers: Any) -> None:
    inputs = helpers.make_inputs(2, rows=1, heads=1, key=2, value=1)
    leaves = tuple(x.requires_grad_() for x in inputs.values())
    assert gradgradcheck(partial(_by_name, list(inputs), "naive"), leaves)


def test_second_derivatives_of_fast_forms_raise(helpers: Any, fast: str) -> None:
    inputs = {name: x.requires_grad_() for name, x in helpers.make_inputs(5).items()}
    o, _ = delta_rule(**inputs, backend=fast)
    with pytest.raises(NotImplementedError, match="use backend 'naive'"):
        torch.autograd.grad(o.sum(), inputs["q"], create_graph=True)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's message
@pytest.mark.parametrize("name", NAMES)
def test_only_the_naive_form_has_forward_mode_derivatives(helpers: Any, backend: str, name: str) -> None:
    inputs, tangent = helpers.make_inputs(5), torch.ones_like(helpers.make_inputs(5)[name])
    with forward_ad.dual_level():
        dual = {**inputs, name: forward_ad.make_dual(inputs[name], tangent)}
        if backend == "naive":
            assert forward_ad.unpack_dual(delta_rule(**dual, backend=backend)[0]).tangent.abs().max() > 0
            return
        delta_rule(**inputs, backend=backend)
        with pytest.raises(NotImplementedError, match="use backend 'naive'"):
            delta_rule(**dual, backend=backend)


@pytest.mark.parametrize("name", NAMES)
def test_each_input_alone_can_require_grad(helpers: Any, backend: str, name: str) -> None:
    inputs, expected = helpers.make_inputs(9), helpers.results(helpers.make_inputs(9), backend=backend)
    actual = helpers.results(
        {name: inputs[name]}, lambda **arguments: delta_rule(**{**inputs, **arguments}, backend=backend)
    )
    helpers.assert_agree(actual, {part: expected[part] for part in ("o", "final", name)}, tolerance=1e-14)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("part", [0, 1])
def test_outputs_or_the_final_state_may_be_unused(helpers: Any, backend: str, part: int, vector: bool) -> None:
    inputs = {name: x.requires_grad_() for name, x in helpers.make_inputs(70, vector=vector).items()}
    weight = torch.randn_like((inputs["v"], inputs["state"])[part])

    def gradients(form: Callable[..., tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        grads = torch.autograd.grad(
            (form(**inputs)[part] * weight).sum(), list(inputs.values()), materialize_grads=True
        )
        return dict(zip(inputs, grads, strict=True))

    helpers.assert_agree(gradients(partial(delta_rule, backend=backend)), gradients(helpers.published))


@pytest.mark.parametrize("nothing", [torch.no_grad, torch.inference_mode])
def test_values_are_the_same_without_grad(helpers: Any, backend: str, nothing: Any) -> None:
    for t in (1, 2, 5, 70):
        inputs = {name: x.requires_grad_() for name, x in helpers.make_inputs(t).items()}
        expected = delta_rule(**inputs, backend=backend)
        with nothing():
            actual = delta_rule(**inputs, backend=backend)
        assert not any(x.requires_grad for x in actual)
        assert all(x.requires_grad for x in expected)
        helpers.assert_agree(dict(enumerate(actual)), dict(enumerate(expected)), tolerance=1e-13)


def test_a_retained_graph_can_be_used_again(helpers: Any, backend: str) -> None:
    inputs = {name: x.requires_grad_() for name, x in helpers.make_inputs(40).items()}
    total = sum(x.square().sum() for x in delta_rule(**inputs, backend=backend))
    first = torch.autograd.grad(total, list(inputs.values()), retain_graph=True)
    again = torch.autograd.grad(total, list(inputs.values()))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def _transposed(x: Tensor) -> Tensor:
    order = list(range(x.ndim))[::-1]
    return x.permute(order).contiguous().permute(order)


def _sliced(x: Tensor) -> Tensor:
    room = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan)
    room[..., 1::2] = x
    return room[..., 1::2]


def _offset(x: Tensor) -> Tensor:
    """Return a dense tensor that is not aligned to SIMD vectors."""
    room = x.new_full((x.numel() + 1,), torch.nan)
    room[1:] = x.flatten()
    return room[1:].view(x.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lay", [_transposed, _sliced, _offset])
def test_non_contiguous_inputs(helpers: Any, backend: str, lay: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    for t, vector in ((2, False), (37, False), (2, True), (37, True)):
        inputs = helpers.make_inputs(t, rows=3, vector=vector, dtype=dtype)
        moved = {name: lay(x) for name, x in inputs.items()}
        actual = helpers.results(moved, backend=backend)
        helpers.assert_agree(
            actual, helpers.results(inputs, backend=backend), tolerance=1e-12 if dtype == torch.float64 else 1e-5
        )


def test_expanded_inputs_and_gradients(helpers: Any, backend: str) -> None:
    inputs = {
        name: x[:1, :1].expand(3, 37, *x.shape[2:]) for name, x in helpers.make_inputs(1).items() if name != "state"
    }
    inputs["state"] = helpers.make_inputs(1)["state"][:1].expand(3, -1, -1, -1)
    dense = {name: x.contiguous() for name, x in inputs.items()}
    helpers.assert_agree(helpers.results(inputs, backend=backend), helpers.results(dense, helpers.published))
    gradients = []
    for form in (partial(delta_rule, backend=backend), helpers.published):
        leaves = {name: x.detach().requires_grad_() for name, x in dense.items()}
        sum(x.sum() for x in form(**leaves)).backward()  # the gradient of a sum is an expanded scalar
        gradients.append({name: x.grad for name, x in leaves.items()})
    helpers.assert_agree(*gradients)


def test_a_shared_tensor_accumulates_its_gradients(helpers: Any, backend: str) -> None:
    inputs = helpers.make_inputs(20, key=3, without=("q", "k"))
    helpers.assert_agree(
        helpers.results(inputs, lambda v, **rest: delta_rule(v, v, v, **rest, backend=backend)),
        helpers.results(inputs, lambda v, **rest: helpers.published(v, v, v, **rest)),
    )


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # torch.compile emits warnings
@pytest.mark.parametrize("vector", [False, True])
def test_it_compiles_to_one_graph_for_any_length(helpers: Any, fast: str, vector: bool) -> None:
    torch.compiler.reset()
    rule = partial(delta_rule, backend=fast)
    compiled = torch.compile(rule, fullgraph=True, backend="aot_eager", dynamic=True)
    for t in (5, 70):
        inputs = helpers.make_inputs(t, vector=vector)
        expected = helpers.results(inputs, rule)  # kernels are not built while a graph is traced
        helpers.assert_agree(helpers.results(inputs, compiled), expected, tolerance=1e-12)
    with torch.no_grad():
        o, _ = compiled(**{**inputs, "beta": inputs["beta"] * 0.5})
    assert not torch.equal(o, expected["o"])
