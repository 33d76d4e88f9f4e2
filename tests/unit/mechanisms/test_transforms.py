"""torch.func, second derivatives, tensors without data and torch.export, for every mechanism."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export
from torch.func import functional_call, grad, jvp, vmap
from torch.testing import assert_close

from qkflow.layout import Layout
from qkflow.mechanisms import mechanism, mechanisms
from qkflow.ops.attention import use_backend as use_attention
from qkflow.ops.delta_rule import use_backend

DELTAS = ("deltanet", "gated-deltanet", "qdelta", "comba", "kda", "eda")
VARIANTS = (
    "standard:conv=3,key_shift=True,window=2,key_heads=1",
    "coupled:integrator=leapfrog,force=potential,steps=2",
    "standard+affine:qk_norm=True",
    "kuramoto:frustrated=True,harmonics=2",
    "kuramoto:causal=False",
    "group:group=so3",
)
SPECS = (*mechanisms(), *VARIANTS)


def make(spec: str) -> Any:
    layer = mechanism(spec)(width(spec), 2, layer=1, layers=2).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def width(spec: str) -> int:
    return 18 if "so3" in spec else 16


def stream(spec: str, b: int, t: int) -> Tensor:
    return torch.randn(b, t, width(spec), dtype=torch.float64)


def plain_form(spec: str) -> AbstractContextManager[None]:
    """The option that the errors of the delta rule name; the other operators choose their plain form themselves."""
    return use_backend("naive") if spec in DELTAS else nullcontext()


@pytest.mark.parametrize("spec", SPECS)
def test_per_sample_gradients(spec: str) -> None:
    """`vmap(grad(loss))` of the plain form equals the gradients of the fast form, sample by sample."""
    layer, x = make(spec), stream(spec, 3, 4)
    parameters, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, {**parameters, **buffers}, (x[None],))[0].square().sum()

    with plain_form(spec):
        detached = {name: parameter.detach() for name, parameter in parameters.items()}
        actual = vmap(grad(loss), in_dims=(None, 0))(detached, x)
        outputs = vmap(lambda x: layer(x[None])[0][0])(x)
    assert_close(outputs, layer(x)[0], rtol=0, atol=1e-12)
    for i, sample in enumerate(x):
        expected = torch.autograd.grad(loss(parameters, sample), [*parameters.values()], materialize_grads=True)
        for name, gradient in zip(parameters, expected, strict=True):
            assert_close(actual[name][i], gradient, rtol=0, atol=1e-10, msg=f"{name} of sample {i}")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # PyTorch's forward mode uses it
@pytest.mark.parametrize("spec", SPECS)
def test_forward_mode(spec: str) -> None:
    """<dy, J dx> of `jvp` equals <J^T dy, dx> of the backward pass."""
    layer, x, tangent, cotangent = make(spec), *(stream(spec, 2, 3) for _ in range(3))
    with plain_form(spec):
        y, change = jvp(lambda x: layer(x)[0], (x,), (tangent,))
    expected = layer(x.requires_grad_())[0]
    assert_close(y, expected, rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(expected, x, cotangent)
    assert_close((change * cotangent).sum(), (gradient * tangent).sum(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("spec", SPECS)
def test_second_derivatives(spec: str) -> None:
    layer, x = make(spec), stream(spec, 1, 3).requires_grad_()
    with plain_form(spec):
        assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], (x,), fast_mode=True)


@pytest.mark.parametrize("spec", ["standard:causal=False", "differential:causal=False", "kuramoto:causal=False"])
def test_second_derivatives_with_a_mask(spec: str) -> None:
    """PyTorch's fused attention, which has none, computes the first derivative only."""
    layer, layout = make(spec), Layout.padded([2, 3], 3)
    x = stream(spec, 2, 3).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: layer(x, layout=layout)[0], (x,), fast_mode=True)


@pytest.mark.parametrize("key_heads", [1, 2])
def test_second_derivatives_of_the_torch_backend(key_heads: int) -> None:
    spec = f"standard:key_heads={key_heads}"
    layer, x = make(spec), stream(spec, 1, 3).requires_grad_()
    with use_attention("torch"):
        assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], (x,), fast_mode=True)


@pytest.mark.parametrize("spec", DELTAS)
def test_errors_of_the_fast_delta_rule_name_the_option(spec: str) -> None:
    layer, x = make(spec), stream(spec, 1, 3).requires_grad_()
    option = r"use_backend\('naive'\).*QKFLOW_DELTA=naive"
    with pytest.raises(NotImplementedError, match=option):
        vmap(lambda x: layer(x[None])[0])(x)
    with pytest.raises(NotImplementedError, match=option):
        grad(lambda x: layer(x)[0].sum())(x.detach())
    with pytest.raises(NotImplementedError, match=option):
        torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)


@pytest.mark.parametrize("spec", SPECS)
def test_tensors_without_data(spec: str) -> None:
    """A layer can be built and run in FakeTensorMode: forward, backward, and one more token."""
    with FakeTensorMode():
        layer = mechanism(spec)(width(spec), 2, layer=0, layers=1)
        x = torch.randn(2, 5, width(spec), requires_grad=True)
        y, state = layer(x)
        y.sum().backward()
        assert y.shape == x.shape
        assert x.grad is not None
        assert all(p.grad is not None for p in layer.parameters() if p.requires_grad)
        if layer.causal:
            with torch.no_grad():
                assert layer(x[:, :1], state.detach())[0].shape == (2, 1, width(spec))


class Outputs(nn.Module):
    """The outputs of a layer without its state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # torch.export emits warnings
@pytest.mark.parametrize("spec", SPECS)
def test_export_with_any_batch_size_and_length(spec: str) -> None:
    layer = make(spec).eval()
    program = export(Outputs(layer), (stream(spec, 3, 7),), dynamic_shapes=({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},))
    lengths = (3,) if "window" in spec else (1, 2)  # with a window, the lengths on the side of the example
    for b, t in ((2, 5), (5, 70), *((2, t) for t in lengths)):
        x = stream(spec, b, t)
        assert_close(program.module()(x), layer(x)[0], rtol=0, atol=1e-12)
