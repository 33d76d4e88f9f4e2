"""Laws of modules: compilation, declared costs, state dict, precision, determinism, attention map and circuits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from qkflow.laws.comparison import (
    LawContext,
    LawNotApplicable,
    LawViolation,
    has_dropout,
    is_causal,
    require_equal,
    require_equal_with_gradients,
    run,
)
from qkflow.layout import Layout

BFLOAT16_TOLERANCE = 0.05
"""Root-mean-square error of bfloat16 outputs relative to float64; bfloat16 has 8 significant bits."""


def compilation(context: LawContext) -> None:
    """torch.compile captures the whole call in one graph, with a state and a layout and for any length."""
    if context.backend == "inductor" and (error := compiler_error()):
        raise LawNotApplicable(error)
    mechanism = context.make()

    def compile_mechanism() -> Callable[..., Any]:
        torch.compiler.reset()  # graphs of previous cases would count towards the recompile limit
        return torch.compile(mechanism, fullgraph=True, backend=context.backend)

    compiled = compile_mechanism()
    # One graph for the first length, one for dynamic lengths, one for lengths beyond a window: the last one is not new.
    for t in (5, 8, 11, 14):
        x = context.input(2, t).requires_grad_()
        with torch._dynamo.config.patch(recompile_limit=3):
            (y, state), (expected, expected_state) = run(compiled, x), run(mechanism, x)
        case = f"t={t}, compiled"
        require_equal_with_gradients(case, mechanism, [(y, expected)], x, retain=False)
    _require_equal_decoding(case, context, mechanism, compiled, state, expected_state)

    compiled = compile_mechanism()
    x, layout = context.input(2, 5).requires_grad_(), Layout.padded([3, 5], 5, side="left")
    (y, state), (expected, expected_state) = run(compiled, x, layout=layout), run(mechanism, x, layout=layout)
    case = "t=5, padded, compiled"
    require_equal_with_gradients(case, mechanism, [(y, expected)], x, retain=False)
    _require_equal_decoding(case, context, mechanism, compiled, state, expected_state)


@torch.no_grad()
def _require_equal_decoding(
    case: str, context: LawContext, mechanism: Any, compiled: Any, state: Any, expected_state: Any
) -> None:
    if not is_causal(mechanism):
        return
    state, expected_state = state.detach(), expected_state.detach()
    for step in range(3):
        token = context.input(2, 1, seed=step)
        y, state = run(compiled, token, state)
        expected, expected_state = run(mechanism, token, expected_state)
        require_equal(f"{case}, then {step + 1} tokens", "output", y, expected)


def compiler_error() -> str | None:
    """The reason why torch.compile cannot build for the CPU on this machine; None if it can."""
    if " " in torch.__file__:
        return "torch.compile cannot link against a torch installed in a path with a space"
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes a second to import

    try:
        get_cpp_compiler()
    except Exception as error:  # the exception type depends on the version of torch
        return f"torch.compile finds no C++ compiler ({str(error).strip().splitlines()[0]})"
    return None


class FlopCounter(FlopCounterMode):
    """Counts the FLOPs of the code that runs without it: PyTorch's counter adds hooks to all modules, ours does not.

    Modules with hooks are called one by one, so fused operators would not be counted.
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker = _NoModules()


class _NoModules(ModuleTracker):
    """Attributes everything to the whole model."""

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *args: object) -> None:
        pass


def cost(context: LawContext) -> None:
    """Declared parameters, FLOPs and state bytes are the measured ones."""
    mechanism = context.make()
    if not hasattr(mechanism, "cost"):
        raise LawNotApplicable("no cost()")
    for t in (16, 64):
        declared = mechanism.cost(t)
        n_parameters = sum(p.numel() for p in mechanism.parameters())
        if declared.parameters != n_parameters:
            raise LawViolation(f"declares {declared.parameters} parameters, has {n_parameters}")
        x = context.input(1, t)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounter() as counter:
            _, state = run(mechanism, x)
        flops = declared.linear_flops + declared.pair_flops * t * t
        if counter.get_total_flops() != flops:
            raise LawViolation(
                f"t={t}: declares {flops} FLOPs with every pair counted, torch counts {counter.get_total_flops()}"
            )
        if declared.pair_flops and hasattr(mechanism, "weights"):
            pairs = int((mechanism.weights(x)[0, 0] != 0).sum())
            if abs(pairs - declared.pairs) > t / 2:
                raise LawViolation(f"t={t}: declares {declared.pairs:g} pairs, the map has {pairs}")
        with torch.enable_grad():
            _, state = run(mechanism, x)
        if state.nbytes != declared.state_bytes:
            raise LawViolation(f"t={t}: declares a state of {declared.state_bytes} bytes, has {state.nbytes}")


def state_dict(context: LawContext) -> None:
    """Loading the state dict into another instance gives bitwise identical outputs."""
    mechanism, other = context.make(0), context.make(1)
    x = context.input(2, 5)
    other.load_state_dict({name: value.clone() for name, value in mechanism.state_dict().items()})
    require_equal("loaded into a second instance, t=5", "output", run(other, x)[0], run(mechanism, x)[0], tolerance=0.0)


def precision(context: LawContext) -> None:
    """In bfloat16 the output is bfloat16 and close to the float64 output, also token by token."""
    exact, rounded = context.make(), context.make(dtype=torch.bfloat16)
    reference_size = 0.0
    for t in (9, 1):
        x = context.input(2, t)
        expected = run(exact, x)[0]
        size = _root_mean_square(expected)
        if size > 1e-3 * reference_size:  # else the first token has no output, and its relative error is undefined
            reference_size = size
        whole, _ = run(rounded, x.bfloat16())
        state, outputs = None, []
        with torch.no_grad():
            for token in x.bfloat16().split(1, 1) if is_causal(rounded) else ():
                y, state = run(rounded, token, state)
                outputs.append(y)
        cases = [("whole", whole), *([("token by token", torch.cat(outputs, 1))] if outputs else [])]
        for case, actual in cases:
            if actual.dtype != torch.bfloat16:
                raise LawViolation(f"t={t}, {case}: bfloat16 in, {actual.dtype} out")
            error = _root_mean_square(actual.double() - expected) / reference_size
            if not error <= BFLOAT16_TOLERANCE:
                raise LawViolation(
                    f"t={t}, {case}: relative error {error:.3f} in bfloat16, allowed {BFLOAT16_TOLERANCE}"
                )


def _root_mean_square(x: torch.Tensor) -> float:
    return float(x.detach().square().mean().sqrt())


def determinism(context: LawContext) -> None:
    """The same call gives bitwise identical outputs and gradients."""
    mechanism = context.make(dtype=torch.float32)
    mechanism.train(not has_dropout(mechanism))
    for t in (1, 33):
        x = context.input(2, t, dtype=torch.float32).requires_grad_()
        first, second = (run(mechanism, x)[0] for _ in range(2))
        leaves = [x, *mechanism.parameters()]
        gradients = [torch.autograd.grad(y.square().sum(), leaves, materialize_grads=True) for y in (first, second)]
        for a, b in zip((first, *gradients[0]), (second, *gradients[1]), strict=True):
            require_equal(f"t={t}, called twice", "output or gradient", a, b, tolerance=0.0)


def attention_map(context: LawContext) -> None:
    """The attention map times the values, projected, is the output; it is zero for pairs that cannot see each other."""
    mechanism = context.make()
    for method in ("weights", "values", "read"):
        if not hasattr(mechanism, method):
            raise LawNotApplicable(f"no {method}()")
    padded = Layout.padded([2, 5], 6, side="left")
    packed = Layout.packed([0, 3, 4, 9])
    for case, b, t, layout in (
        ("t=1", 1, 1, None),
        ("t=7", 2, 7, None),
        ("padded", 2, 6, padded),
        ("packed", 1, 9, packed),
    ):
        x = context.input(b, t).requires_grad_()
        weights = mechanism.weights(x, layout=layout)
        if is_causal(mechanism) and bool(weights.triu(1).any()):
            raise LawViolation(f"{case}: the map is not zero above the diagonal")
        if layout is None:
            z = torch.einsum("bhts,bshv->bthv", weights, mechanism.values(x))
            require_equal_with_gradients(case, mechanism, [(mechanism.read(z, x), run(mechanism, x)[0])], x)
            continue
        is_separate = (layout.sequences[:, :, None] != layout.sequences[:, None, :]) | ~layout.valid[:, None, :]
        if bool(weights.masked_select(is_separate[:, None]).any()):
            raise LawViolation(f"{case}: the map connects different sequences, or padding")
        for i in range(len(layout.lengths)):
            row, columns = (layout.sequences == i).nonzero(as_tuple=True)
            own_map = weights[row[0]][:, columns][:, :, columns]
            alone = mechanism.weights(x[row[0]][columns][None])[0]
            require_equal(f"{case}, sequence {i}", "map", own_map, alone)


def circuits(context: LawContext) -> None:
    """Circuits name existing parameters; QK parameters change the map but not the values, OV ones never the map."""
    mechanism = context.make()
    if not hasattr(mechanism, "circuits"):
        raise LawNotApplicable("no circuits()")
    circuits, parameters = mechanism.circuits(), dict(mechanism.named_parameters())
    for name in (*circuits.qk, *circuits.ov):
        if name not in parameters:
            raise LawViolation(f"circuits() names {name!r}, which is not a parameter")
    if len({*circuits.qk, *circuits.ov}) < len(circuits.qk) + len(circuits.ov):
        raise LawViolation("circuits() names a parameter twice")
    if not hasattr(mechanism, "weights") or not hasattr(mechanism, "values"):
        return
    x = context.input(1, 5)
    for circuit, names, constant in (("QK", circuits.qk, mechanism.values), ("OV", circuits.ov, mechanism.weights)):
        before = constant(x)
        for name in names:
            map_before = mechanism.weights(x)
            with torch.no_grad():  # uneven factors: a subsequent norm would cancel a common factor
                parameters[name].mul_(torch.linspace(1.2, 1.8, parameters[name].numel()).view_as(parameters[name]))
            if circuit == "QK" and torch.equal(mechanism.weights(x), map_before):
                raise LawViolation(f"{name} changed, t=5: circuits() puts it in QK, but the map does not change")
            quantity = (
                "the values, which QK must not change" if circuit == "QK" else "the map, which OV must not change"
            )
            require_equal(f"{name} changed, t=5", quantity, constant(x), before, tolerance=0.0)
