"""Gradients however they are asked for, of tensors however they lie, and in compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from qkflow.ops.delta_rule import delta_rule

NAMES = ("q", "k", "v", "beta", "log_alpha", "lam", "state")


def test_gradients_match_finite_differences(bench: Any, backend: str) -> None:
    given = bench.case(3, rows=1, heads=1, key=2, value=2)
    leaves = tuple(x.requires_grad_() for x in given.values())
    assert gradcheck(partial(_by_place, list(given), backend), leaves)


def _by_place(names: list[str], backend: str, *args: Tensor) -> tuple[Tensor, Tensor]:
    return delta_rule(**dict(zip(names, args, strict=True)), backend=backend, chunk=2)


def test_the_naive_form_has_second_derivatives(bench: Any) -> None:
    given = bench.case(2, rows=1, heads=1, key=2, value=1)
    leaves = tuple(x.requires_grad_() for x in given.values())
    assert gradgradcheck(partial(_by_place, list(given), "naive"), leaves)


def test_second_derivatives_of_fast_forms_raise(bench: Any, fast: str) -> None:
    given = {name: x.requires_grad_() for name, x in bench.case(5).items()}
    o, _ = delta_rule(**given, backend=fast)
    with pytest.raises(NotImplementedError, match="use backend 'naive'"):
        torch.autograd.grad(o.sum(), given["q"], create_graph=True)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("name", NAMES)
def test_only_the_naive_form_has_forward_mode_derivatives(bench: Any, backend: str, name: str) -> None:
    given, tangent = bench.case(5), torch.ones_like(bench.case(5)[name])
    with forward_ad.dual_level():
        dual = {**given, name: forward_ad.make_dual(given[name], tangent)}
        if backend == "naive":
            assert forward_ad.unpack_dual(delta_rule(**dual, backend=backend)[0]).tangent.abs().max() > 0
            return
        delta_rule(**given, backend=backend)
        with pytest.raises(NotImplementedError, match="use backend 'naive'"):
            delta_rule(**dual, backend=backend)


@pytest.mark.parametrize("name", NAMES)
def test_each_input_alone_can_require_grad(bench: Any, backend: str, name: str) -> None:
    given, want = bench.case(9), bench.outcome(bench.case(9), backend=backend)
    got = bench.outcome({name: given[name]}, lambda **one: delta_rule(**{**given, **one}, backend=backend))
    bench.agree(got, {part: want[part] for part in ("o", "final", name)}, within=1e-14)


@pytest.mark.parametrize("part", [0, 1])
def test_outputs_or_the_final_state_may_be_unused(bench: Any, backend: str, part: int) -> None:
    given = {name: x.requires_grad_() for name, x in bench.case(70).items()}
    weight = torch.randn_like((given["v"], given["state"])[part])

    def gradients(form: Callable[..., tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        found = torch.autograd.grad((form(**given)[part] * weight).sum(), list(given.values()), materialize_grads=True)
        return dict(zip(given, found, strict=True))

    bench.agree(gradients(partial(delta_rule, backend=backend)), gradients(bench.published))


@pytest.mark.parametrize("nothing", [torch.no_grad, torch.inference_mode])
def test_values_are_the_same_without_grad(bench: Any, backend: str, nothing: Any) -> None:
    for t in (1, 2, 5, 70):
        given = {name: x.requires_grad_() for name, x in bench.case(t).items()}
        want = delta_rule(**given, backend=backend)
        with nothing():
            got = delta_rule(**given, backend=backend)
        assert not any(x.requires_grad for x in got)
        assert all(x.requires_grad for x in want)
        bench.agree(dict(enumerate(got)), dict(enumerate(want)), within=1e-13)


def test_a_retained_graph_can_be_used_again(bench: Any, backend: str) -> None:
    given = {name: x.requires_grad_() for name, x in bench.case(40).items()}
    total = sum(x.square().sum() for x in delta_rule(**given, backend=backend))
    first = torch.autograd.grad(total, list(given.values()), retain_graph=True)
    again = torch.autograd.grad(total, list(given.values()))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def _transposed(x: Tensor) -> Tensor:
    order = list(range(x.ndim))[::-1]
    return x.permute(order).contiguous().permute(order)


def _sliced(x: Tensor) -> Tensor:
    room = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan)
    room[..., 1::2] = x
    return room[..., 1::2]


def _offset(x: Tensor) -> Tensor:
    """Dense, but where no vector of the processor begins."""
    room = x.new_full((x.numel() + 1,), torch.nan)
    room[1:] = x.flatten()
    return room[1:].view(x.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lay", [_transposed, _sliced, _offset])
def test_non_contiguous_inputs(bench: Any, backend: str, lay: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    for t in (2, 37):
        given = bench.case(t, rows=3, dtype=dtype)
        moved = {name: lay(x) for name, x in given.items()}
        got = bench.outcome(moved, backend=backend)
        bench.agree(got, bench.outcome(given, backend=backend), within=1e-12 if dtype == torch.float64 else 1e-5)


def test_expanded_inputs_and_gradients(bench: Any, backend: str) -> None:
    given = {name: x[:1, :1].expand(3, 37, *x.shape[2:]) for name, x in bench.case(1).items() if name != "state"}
    given["state"] = bench.case(1)["state"][:1].expand(3, -1, -1, -1)
    dense = {name: x.contiguous() for name, x in given.items()}
    bench.agree(bench.outcome(given, backend=backend), bench.outcome(dense, bench.published))
    found = []
    for form in (partial(delta_rule, backend=backend), bench.published):
        leaves = {name: x.detach().requires_grad_() for name, x in dense.items()}
        sum(x.sum() for x in form(**leaves)).backward()  # the gradient of a sum is a one, expanded
        found.append({name: x.grad for name, x in leaves.items()})
    bench.agree(*found)


def test_a_shared_tensor_accumulates_its_gradients(bench: Any, backend: str) -> None:
    given = bench.case(20, key=3, without=("q", "k"))
    bench.agree(
        bench.outcome(given, lambda v, **rest: delta_rule(v, v, v, **rest, backend=backend)),
        bench.outcome(given, lambda v, **rest: bench.published(v, v, v, **rest)),
    )


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # torch.compile emits warnings
def test_it_compiles_to_one_graph_for_any_length(bench: Any, fast: str) -> None:
    torch.compiler.reset()
    rule = partial(delta_rule, backend=fast)
    compiled = torch.compile(rule, fullgraph=True, backend="aot_eager", dynamic=True)
    for t in (5, 70):
        given = bench.case(t)
        want = bench.outcome(given, rule)  # first, since kernels are not built while a graph is traced
        bench.agree(bench.outcome(given, compiled), want, within=1e-12)
    with torch.no_grad():
        o, _ = compiled(**{**given, "beta": given["beta"] * 0.5})
    assert not torch.equal(o, want["o"])
