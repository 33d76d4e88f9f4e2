"""The encoder layer equals PyTorch's with copied weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.models import EncoderLayer

WIDTH, HEADS, HIDDEN = 16, 4, 24
LEFT, RIGHT = (Layout.padded([3, 5], 5, side=side) for side in ("left", "right"))


def twins(**options: Any) -> tuple[nn.TransformerEncoderLayer, EncoderLayer]:
    """PyTorch's layer and ours with its weights."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, batch_first=True, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer, EncoderLayer.from_torch(layer)


def own_gradients(layer: nn.Module, y: Tensor, x: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    """The gradients of `x` and the parameters, with the names of PyTorch's layer."""
    named = {"x": x, **dict(layer.named_parameters())}
    gradients = dict(zip(named, torch.autograd.grad(y, [*named.values()], cotangent), strict=True))
    for kind in ("weight", "bias"):
        if f"self_attn.query.{kind}" in gradients:
            parts = [gradients.pop(f"self_attn.{name}.{kind}") for name in ("query", "key", "value")]
            gradients[f"self_attn.in_proj_{kind}"] = torch.cat(parts)
            gradients[f"self_attn.out_proj.{kind}"] = gradients.pop(f"self_attn.output.{kind}")
    return gradients


def random_mask(kind: str) -> Tensor:
    """For two sequences of five tokens; token 1 may attend to nothing."""
    per_head, dtype = kind.split()
    mask = torch.rand(5, 5) < 0.4 if per_head == "shared" else torch.rand(2 * HEADS, 5, 5) < 0.4
    mask[..., 1, :] = True
    return mask if dtype == "bool" else torch.randn(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)


@pytest.mark.parametrize("layout", [None, LEFT, RIGHT])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("activation", "bias"), [("relu", True), ("gelu", False)])
def test_parity_with_pytorch(layout: Layout | None, norm_first: bool, activation: str, bias: bool) -> None:
    compare(*twins(norm_first=norm_first, activation=activation, bias=bias), None, layout)


@pytest.mark.parametrize("layout", [None, LEFT, RIGHT])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", ["shared bool", "shared float", "per-head bool", "per-head float"])
@pytest.mark.filterwarnings("ignore:Support for mismatched")  # a boolean and an additive mask
def test_parity_with_pytorch_with_a_mask(kind: str, norm_first: bool, layout: Layout | None) -> None:
    compare(*twins(norm_first=norm_first), random_mask(kind), layout)


def compare(theirs: nn.Module, ours: nn.Module, src_mask: Tensor | None, layout: Layout | None) -> None:
    """Values and gradients at tokens."""
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    mask = None if layout is None else ~layout.valid
    is_token = torch.ones(2, 5, dtype=torch.bool) if layout is None else layout.valid
    expected, y = (layer(x, src_mask, src_key_padding_mask=mask) for layer in (theirs, ours))
    assert_close(y[is_token], expected[is_token], rtol=0, atol=1e-12)
    assert not y[~is_token].any()
    cotangent = torch.randn_like(x) * is_token[..., None]
    gradients = own_gradients(ours, y, x, cotangent)
    expected_gradients = own_gradients(theirs, expected, x, cotangent)
    assert {*gradients} == {*expected_gradients}
    for name, gradient in gradients.items():
        assert_close(gradient, expected_gradients[name], rtol=0, atol=1e-11, msg=name)


def test_one_sequence_without_a_batch() -> None:
    theirs, ours = twins()
    x, padding, mask = torch.randn(5, WIDTH, dtype=torch.float64), ~RIGHT.valid[0], random_mask("per-head bool")[:HEADS]
    expected, y = (layer(x, mask, padding) for layer in (theirs, ours))
    assert_close(y[~padding], expected[~padding], rtol=0, atol=1e-12)
    assert_close(ours(x, layout=Layout.padded([3], 5)), ours(x, src_key_padding_mask=padding))


@pytest.mark.parametrize("spec", ["standard:key_heads=2", "standard:conv=3,key_shift=True,window=4", "coupled"])
def test_a_mask_further_restricts_a_causal_layer(spec: str) -> None:
    """A mask that forbids later tokens only changes nothing; another is that of the packed sequences themselves."""
    layer: Any = EncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, mechanism=spec, causal=True, dtype=torch.float64)
    x, later = torch.randn(2, 5, WIDTH, dtype=torch.float64), torch.ones(5, 5, dtype=torch.bool).triu(1)
    for layout in (None, LEFT, Layout.segmented(torch.tensor([[0, 0, 1, 0, 0], [0, 1, 0, 0, 0]]).bool())):
        assert_close(layer(x, later, layout=layout), layer(x, layout=layout), rtol=0, atol=1e-12)
    near = later | torch.ones(5, 5, dtype=torch.bool).tril(-2)
    expected = (layer.self_attn(x, layout=LEFT, mask=~near[None, None])[0] - layer.self_attn.output.bias)[0, 2]
    assert_close(expected, layer.self_attn(x[:1, 2:3])[0][0, 0] - layer.self_attn.output.bias, rtol=0, atol=1e-12)


def test_a_mask_may_be_learned() -> None:
    layer, x = EncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, dtype=torch.float64), torch.randn(1, 3, WIDTH).double()
    assert torch.autograd.gradcheck(lambda mask: layer(x, mask), torch.randn(3, 3).double().requires_grad_())


def test_device_and_dtype_are_those_of_pytorch() -> None:
    for device, dtype in ((None, None), ("cpu", torch.bfloat16), (torch.device("meta"), None)):
        theirs, ours = (
            make(WIDTH, HEADS, HIDDEN, 0.0, "relu", 1e-5, True, False, True, device, dtype)
            for make in (nn.TransformerEncoderLayer, EncoderLayer)
        )
        assert {(p.device, p.dtype) for p in ours.parameters()} == {(p.device, p.dtype) for p in theirs.parameters()}


def test_tensors_without_data() -> None:
    with FakeTensorMode():
        x, layer = torch.randn(2, 5, WIDTH), EncoderLayer(WIDTH, HEADS, HIDDEN)
        assert layer(x, torch.zeros(5, 5), is_causal=True).shape == x.shape


def test_nn_transformer_encoder_takes_the_layer() -> None:
    """It passes masks as numbers, and `is_causal` with a causal mask."""
    theirs, ours = twins(norm_first=True)
    x, mask = torch.randn(2, 5, WIDTH, dtype=torch.float64), ~RIGHT.valid
    stacks = [nn.TransformerEncoder(layer, 2, enable_nested_tensor=False) for layer in (theirs, ours)]
    expected, y = (stack(x, src_key_padding_mask=mask) for stack in stacks)
    assert_close(y[~mask], expected[~mask], rtol=0, atol=1e-12)

    causal = EncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, norm_first=True, causal=True).double()
    causal.load_state_dict(ours.state_dict())
    triangle = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    stacks[1] = nn.TransformerEncoder(causal, 2, enable_nested_tensor=False)
    expected, y = (stack(x, mask=triangle, is_causal=True) for stack in stacks)
    assert_close(y, expected, rtol=0, atol=1e-12)
    assert_close(ours(x, triangle, is_causal=True), causal(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", ["standard", "differential:rotary_base=None", "coupled", "nonlinear-query"])
def test_padding_changes_nothing(spec: str) -> None:
    """Whatever it holds, a row without tokens included; a layout in place of the mask is the same."""
    layer = EncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, mechanism=spec).double()
    x, layout = torch.randn(3, 4, WIDTH, dtype=torch.float64), Layout.padded([2, 4, 0], 4, side="left")
    bad = x.masked_fill(~layout.valid[..., None], torch.nan).requires_grad_()
    y = layer(bad, src_key_padding_mask=~layout.valid)
    assert_close(y[0, 2:], layer(x[:1, 2:])[0], rtol=0, atol=1e-12)
    assert not y[~layout.valid].any()
    assert torch.equal(y, layer(bad, layout=layout))
    gradients = torch.autograd.grad(y.square().sum(), [bad, *layer.parameters()], materialize_grads=True)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_dropout_is_that_of_pytorch() -> None:
    """The same places draw the same random numbers; in one sequence, also in the same order."""
    theirs = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.3, batch_first=True, dtype=torch.float64)
    ours, x = EncoderLayer.from_torch(theirs), torch.randn(1, 5, WIDTH, dtype=torch.float64)
    outputs = []
    for layer in (theirs, ours):
        torch.manual_seed(3)
        outputs.append(layer(x))
    assert_close(outputs[1], outputs[0], rtol=0, atol=1e-12)
    assert torch.equal(ours.eval()(x), ours(x))


def test_the_spec_and_the_arguments_set_the_mechanism() -> None:
    layer: Any = EncoderLayer(WIDTH, HEADS, HIDDEN, 0.2, bias=False, mechanism="differential:dropout=0.5", layer=2)
    config = layer.self_attn.config
    assert (config.causal, config.bias, config.dropout, config.rotary_base) == (False, False, 0.5, 10000.0)
    assert layer.self_attn.lambda_init == pytest.approx(0.8 - 0.6 * torch.tensor(-0.6).exp().item())
    assert EncoderLayer(WIDTH, HEADS, HIDDEN, mechanism="qdelta", causal=True)(torch.ones(1, 2, WIDTH)).shape[1] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_first": False}, "batch_first=False is not supported"),
        ({"activation": "rleu"}, "unknown activation 'rleu'.*relu"),
        ({"dropout": 1.0}, "dropout must be"),
        ({"mechanism": "kuramoto"}, "reads phases"),
        ({"mechanism": "qdelta"}, "writes its memory token by token"),
        ({"mechanism": "standard:causal=False", "causal": True}, "the layer causal=True: make them equal"),
    ],
)
def test_options_are_refused_with_the_reason(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EncoderLayer(WIDTH, HEADS, HIDDEN, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"src_mask": torch.zeros(4, 5)}, r"of shape \[5, 5\] or \[8, 5, 5\], got torch.float32 \[4, 5\]"),
        ({"src_mask": torch.zeros(5, 5).long()}, "boolean or floating-point"),
        ({"src_mask": torch.zeros(5, 5), "is_causal": True}, "src_mask is not causal"),
        ({"is_causal": True}, "construct with causal=True"),
        ({"src_key_padding_mask": torch.ones(2, 5)}, "0 and minus infinity"),
        ({"src_key_padding_mask": torch.tensor([[0, 1, 0, 0, 0]] * 2).bool()}, "holes"),
        ({"src_key_padding_mask": ~LEFT.valid, "layout": LEFT}, "pass one of them"),
        ({"layout": Layout.padded([4], 4)}, r"a batch of \[1, 4\], got \[2, 5\]"),
    ],
)
def test_masks_are_refused_with_the_reason(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EncoderLayer(WIDTH, HEADS, HIDDEN)(torch.randn(2, 5, WIDTH), **arguments)


@pytest.mark.parametrize(("spec", "causal"), [("differential", False), ("qdelta", True)])
def test_only_standard_attention_takes_a_mask(spec: str, causal: bool) -> None:
    layer, x = EncoderLayer(WIDTH, HEADS, HIDDEN, mechanism=spec, causal=causal).eval(), torch.randn(2, 5, WIDTH)
    with pytest.raises(UsageError, match=r"does not support src_mask.*use standard attention"):
        layer(x, torch.zeros(5, 5))
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    if causal:
        assert torch.equal(layer(x, later, is_causal=True), layer(x))
        with pytest.raises(UsageError, match="src_mask is not causal"):
            layer(x, later.T, is_causal=True)


@pytest.mark.parametrize("shape", [(5,), (2, 5, WIDTH + 1), (1, 2, 5, WIDTH)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"src must be \[batch, tokens, 16\] or \[tokens, 16\]"):
        EncoderLayer(WIDTH, HEADS, HIDDEN)(torch.randn(shape))
