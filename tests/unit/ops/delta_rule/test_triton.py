"""The Triton kernels in the interpreter equal the published recurrence, in values and gradients."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from qkflow.layout import Layout
from qkflow.ops.delta_rule import delta_rule, delta_rule_flops

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("quick")]

OPTIONS = ("log_alpha", "erase", "state")
SINGLE = {"rows": 1, "heads": 1, "dtype": torch.float32}
triton = partial(delta_rule, backend="triton")


def agree(helpers: Any, t: int, tolerance: float = 1e-4, chunk: int | None = None, **options: Any) -> None:
    """Compare outputs, memory and all gradients with the published equation."""
    inputs = helpers.make_inputs(t, **options)
    exact = {name: x.double() for name, x in inputs.items()}
    helpers.assert_agree(
        helpers.results(inputs, triton, chunk=chunk), helpers.results(exact, helpers.published), tolerance=tolerance
    )


@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_similar_keys_are_accurate(helpers: Any, chunk: int) -> None:
    agree(helpers, 130, 3e-5, chunk, **{**SINGLE, "rho": 0.95, "separate": chunk == 32})


@pytest.mark.parametrize(
    ("t", "chunk"), [(1, 16), (15, 16), (16, 16), (17, 16), (63, 64), (64, 64), (65, 64), (49, 16)]
)
def test_every_length_is_accurate(helpers: Any, t: int, chunk: int) -> None:
    agree(helpers, t, 1e-5, chunk, **SINGLE, key=5, value=3)


@pytest.mark.parametrize(
    ("key", "value"), [(1, 1), (5, 17), (16, 16), (17, 33), (64, 64), (65, 20), (100, 70), (256, 8), (9, 130)]
)
def test_every_width_is_accurate_across_a_chunk_boundary(helpers: Any, key: int, value: int) -> None:
    agree(helpers, 18, 1e-5, 16, **SINGLE, key=key, value=value)


@pytest.mark.parametrize(
    "without", [tuple(x for x, out in zip(OPTIONS, outs, strict=True) if out) for outs in product([0, 1], repeat=3)]
)
def test_every_optional_input_may_be_omitted(helpers: Any, without: tuple[str, ...]) -> None:
    agree(helpers, 18, 3e-5, 16, **{**SINGLE, "rho": 0.95, "without": without})


def test_several_rows_and_heads(helpers: Any) -> None:
    agree(helpers, 18, 1e-5, 16, rows=2, heads=3, dtype=torch.float32)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("rho", [0.0, 0.95])
def test_16_bit_values_and_gradients_are_accurate(
    helpers: Any, dtype: torch.dtype, tolerance: float, rho: float
) -> None:
    inputs = helpers.make_inputs(70, rows=1, heads=1, key=32, value=16, rho=rho, dtype=dtype)
    inputs["state"] = inputs["state"].float()
    actual = helpers.results(inputs, triton, chunk=64)
    assert (actual["o"].dtype, actual["final"].dtype) == (dtype, torch.float32)
    assert all(actual[name].dtype == x.dtype for name, x in inputs.items())
    exact = {name: x.double() for name, x in inputs.items()}
    helpers.assert_agree(actual, helpers.results(exact, helpers.published), tolerance=tolerance)


def test_mixed_dtypes(helpers: Any) -> None:
    """With float32 queries and keys and bfloat16 values, products use bfloat16; gradients have their input's type."""
    inputs = helpers.make_inputs(18, **SINGLE)
    inputs["v"] = inputs["v"].bfloat16()
    actual = helpers.results(inputs, triton)
    assert (actual["o"].dtype, actual["v"].dtype, actual["q"].dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    exact = {name: (x.bfloat16() if name in ("q", "k") else x).double() for name, x in inputs.items()}
    helpers.assert_agree(actual, helpers.results(exact, helpers.published), tolerance=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_equals_the_training_form(helpers: Any, dtype: torch.dtype) -> None:
    inputs = helpers.make_inputs(19, rows=2, heads=1, key=5, value=3, rho=0.95, dtype=dtype)
    whole = triton(**inputs)
    for sizes in ([1] * 19, [4, 2, 3, 6, 4]):
        state, outputs = inputs["state"], []
        with torch.inference_mode():
            for parts in zip(*(x.split(sizes, 1) for name, x in inputs.items() if name != "state"), strict=True):
                o, state = triton(*parts, state=state)
                outputs.append(o)
        actual = {"o": torch.cat(outputs, 1), "final": state}
        helpers.assert_agree(
            actual, dict(zip(("o", "final"), whole, strict=True)), tolerance=1e-5 if dtype == torch.float32 else 1e-2
        )


@pytest.mark.parametrize("width", [(256, 70), (3, 300), (64, 8)])
def test_decoding_is_accurate_at_every_width(helpers: Any, width: tuple[int, int]) -> None:
    for without in ((), OPTIONS):
        inputs = helpers.make_inputs(
            3, rows=1, heads=2, key=width[0], value=width[1], without=without, dtype=torch.float32
        )
        actual, expected = triton(**inputs), helpers.published(**{name: x.double() for name, x in inputs.items()})
        helpers.assert_agree(dict(enumerate(actual)), dict(enumerate(expected)), tolerance=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        Layout.padded([5, 18, 0, 1], 18, side="left"),
        Layout.padded([5, 17, 1], 18),
        Layout.packed([0, 5, 22, 22, 23]),
    ],
    ids=["left", "right", "packed"],
)
def test_sequences_are_independent(helpers: Any, layout: Layout) -> None:
    rows, t = layout.valid.shape
    inputs = helpers.make_inputs(t, rows=rows, heads=1, rho=0.95, dtype=torch.float32)
    inputs["state"] = helpers.make_inputs(1, rows=len(layout.lengths), heads=1, seed=5, dtype=torch.float32)["state"]
    hole = ~layout.valid
    for name, x in inputs.items():
        if name != "state":
            x[hole] = math.nan
    actual = helpers.results(inputs, triton, layout=layout)
    exact = {name: x.double() for name, x in inputs.items()}
    helpers.assert_agree(actual, helpers.results(exact, delta_rule, layout=layout, backend="naive"), tolerance=1e-4)
    assert not actual["q"][hole].any()


@pytest.mark.parametrize("decay", [-1e-12, -3.0, -50.0, -1e4])
def test_every_decay_strength_is_accurate(helpers: Any, decay: float) -> None:
    inputs = helpers.make_inputs(37, **SINGLE, rho=0.95)
    inputs["log_alpha"][:, 5::20] = decay
    exact = {name: x.double() for name, x in inputs.items()}
    helpers.assert_agree(
        helpers.results(inputs, triton, chunk=32), helpers.results(exact, backend="naive"), tolerance=3e-5
    )


@pytest.mark.parametrize("strength", [0.0, 2.0])
def test_the_limits_of_beta_are_correct(helpers: Any, strength: float) -> None:
    inputs = helpers.make_inputs(18, **SINGLE, without=("erase",))
    inputs["beta"] = torch.full_like(inputs["beta"], strength)
    exact = {name: x.double() for name, x in inputs.items()}
    helpers.assert_agree(helpers.results(inputs, triton), helpers.results(exact, helpers.published), tolerance=1e-5)


@pytest.mark.parametrize("part", [0, 1])
def test_outputs_or_the_final_state_may_be_unused(helpers: Any, part: int) -> None:
    inputs = {name: x.requires_grad_() for name, x in helpers.make_inputs(18, **SINGLE).items()}
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    results = [
        torch.autograd.grad(form(**x)[part].square().sum(), list(x.values()), materialize_grads=True)
        for form, x in ((triton, inputs), (helpers.published, exact))
    ]
    helpers.assert_agree(*(dict(zip(inputs, x, strict=True)) for x in results), tolerance=1e-5)


def test_non_contiguous_inputs(helpers: Any) -> None:
    inputs = helpers.make_inputs(18, rows=2, heads=2, dtype=torch.float32)
    turned = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}
    actual, expected = helpers.results(turned, triton), helpers.results(inputs, triton)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_uninitialized_memory_is_never_read_and_results_are_deterministic(helpers: Any) -> None:
    """Uninitialized tensors are filled with NaN."""
    inputs, before = helpers.make_inputs(18, **SINGLE, key=70), torch.are_deterministic_algorithms_enabled()
    first = helpers.results(inputs, triton)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        again = helpers.results(inputs, triton)
        with torch.no_grad():
            plain = triton(**inputs)
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert torch.equal(plain[0], first["o"])


def test_a_nan_stays_in_its_row_and_head(helpers: Any) -> None:
    inputs = helpers.make_inputs(18, rows=2, heads=2, dtype=torch.float32)
    expected = triton(**inputs)
    inputs["v"][1, 3, 0] = torch.nan
    o, final = triton(**inputs)
    assert o[1, 3:, 0].isnan().all()
    assert torch.equal(o[0], expected[0][0])
    assert torch.equal(final[1, 1], expected[1][1, 1])


def test_flops_and_meta_shapes(helpers: Any) -> None:
    inputs = helpers.make_inputs(18, **SINGLE)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        triton(**inputs)
    assert counted.get_total_flops() == delta_rule_flops(18, 1, 4, 3)
    half = helpers.make_inputs(18, rows=1, heads=1, dtype=torch.bfloat16)
    for options, keep in ((inputs, True), (half, True), (half, False)):
        args = _operands(options)
        real = torch.ops.qkflow.delta(*args, 1.0, 16, keep, "triton")
        fake = torch.ops.qkflow.delta(*(x.to("meta") for x in args), 1.0, 16, keep, "triton")
        assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in real]
        if keep:
            go, gfinal = torch.ones_like(real[0]), torch.ones_like(real[1])
            saved = (go, gfinal, *args[:6], real[0], *real[2:])
            back = torch.ops.qkflow.delta_backward(*saved, 1.0, 16, "triton")
            shapes = torch.ops.qkflow.delta_backward(*(x.to("meta") for x in saved), 1.0, 16, "triton")
            assert [(x.shape, x.dtype) for x in shapes] == [(x.shape, x.dtype) for x in back]


def _operands(options: dict[str, Tensor]) -> list[Tensor]:
    return [x if name in ("q", "k", "v") else x.float() for name, x in options.items()]


@pytest.mark.filterwarnings("ignore")  # torch.compile emits warnings
def test_it_compiles_to_one_graph_for_any_length(helpers: Any) -> None:
    torch.compiler.reset()
    compiled = torch.compile(triton, fullgraph=True, backend="aot_eager", dynamic=True)
    for t in (5, 18):
        inputs = helpers.make_inputs(t, **SINGLE)
        helpers.assert_agree(helpers.results(inputs, compiled), helpers.results(inputs, triton), tolerance=1e-6)
