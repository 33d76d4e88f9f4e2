"""Laws of modules: what a mechanism declares is what it does, compiled, saved, looked at, and in fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from qkflow.laws.cases import Bench, LawNotApplicable, LawViolation, run, same, same_values_and_gradients
from qkflow.layout import Layout

BFLOAT16 = 0.05
"""Size of the difference between bfloat16 and float64 outputs, relative to the latter: bfloat16 keeps 8 bits."""


def compilation(bench: Bench) -> None:
    """The whole call compiles into one graph, with a state and a layout too and for any length, and stays the same."""
    if bench.backend == "inductor" and (fault := compiler_fault()):
        raise LawNotApplicable(fault)
    mechanism = bench.make()

    def fresh() -> Callable[..., Any]:
        torch.compiler.reset()  # graphs of the cases before would count towards the compiler's limit
        return torch.compile(mechanism, fullgraph=True, backend=bench.backend)

    x = bench.input(2, 5).requires_grad_()
    for case, layout in (("t=5", None), ("t=5, padded", Layout.padded([3, 5], 5, side="left"))):
        compiled = fresh()
        (got, got_state), (want, want_state) = run(compiled, x, layout=layout), run(mechanism, x, layout=layout)
        same_values_and_gradients(f"{case}, compiled", mechanism, [(got, want)], x, retain=False)
        with torch.no_grad():
            got_state, want_state = got_state.detach(), want_state.detach()
            for step in range(3):
                token = bench.input(2, 1, seed=step)
                got, got_state = run(compiled, token, got_state)
                want, want_state = run(mechanism, token, want_state)
                same(f"{case}, then {step + 1} tokens, compiled", "output", got, want)
    compiled = fresh()
    for t in (5, 8):  # at the second length the compiler leaves lengths open, and may trip over one
        x = bench.input(2, t).requires_grad_()
        pairs = [(run(compiled, x)[0], run(mechanism, x)[0])]
        same_values_and_gradients(f"t={t} after other lengths, compiled", mechanism, pairs, x, retain=False)


def compiler_fault() -> str | None:
    """Why torch.compile cannot build for the CPU here, which is no mechanism's fault; `None` where it can."""
    if " " in torch.__file__:
        return "torch.compile cannot link against a torch that lies in a path with a space"
    from torch._inductor.cpp_builder import get_cpp_compiler  # here: it takes a second, and only this law needs it

    try:
        get_cpp_compiler()
    except Exception as error:  # torch's own kinds of it change from version to version
        return f"torch.compile finds no C++ compiler ({str(error).strip().splitlines()[0]})"
    return None


def declaration(bench: Bench) -> None:
    """Declared parameters, FLOPs and state bytes are the counted ones."""
    mechanism = bench.make()
    if not hasattr(mechanism, "cost"):
        raise LawNotApplicable("no cost()")
    for t in (16, 64):
        cost = mechanism.cost(t)
        counted = sum(p.numel() for p in mechanism.parameters())
        if cost.parameters != counted:
            raise LawViolation(f"declares {cost.parameters} parameters, has {counted}")
        x = bench.input(1, t)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            _, state = run(mechanism, x)
        square = cost.linear_flops + cost.pair_flops * t * t
        if counter.get_total_flops() != square:
            raise LawViolation(
                f"t={t}: declares {square} FLOPs with every pair counted, torch counts {counter.get_total_flops()}"
            )
        if cost.pair_flops and hasattr(mechanism, "weights"):
            meeting = int((mechanism.weights(x)[0, 0] != 0).sum())
            if abs(meeting - cost.pairs) > t / 2:
                raise LawViolation(f"t={t}: declares {cost.pairs:g} pairs, {meeting} meet")
        with torch.enable_grad():
            _, state = run(mechanism, x)
        if state.nbytes != cost.state_bytes:
            raise LawViolation(f"t={t}: declares a state of {cost.state_bytes} bytes, holds {state.nbytes}")


def saving(bench: Bench) -> None:
    """Parameters loaded into another instance make it the same, to the bit."""
    mechanism, other = bench.make(0), bench.make(1)
    x = bench.input(2, 5)
    other.load_state_dict({name: value.clone() for name, value in mechanism.state_dict().items()})
    same("loaded into a second instance, t=5", "output", run(other, x)[0], run(mechanism, x)[0], tolerance=0.0)


def precision(bench: Bench) -> None:
    """In bfloat16 it stays in bfloat16, and near its float64 self, also token by token."""
    exact, rounded = bench.make(), bench.make(dtype=torch.bfloat16)
    usual = 0.0
    for t in (9, 1):
        x = bench.input(2, t)
        want = run(exact, x)[0]
        own = _size(want)
        usual = (
            own if own > 1e-3 * usual else usual
        )  # some answer nothing to a first token: no error is small beside it
        whole, _ = run(rounded, x.bfloat16())
        state, steps = None, []
        with torch.no_grad():
            for token in x.bfloat16().split(1, 1):
                y, state = run(rounded, token, state)
                steps.append(y)
        for case, got in (("whole", whole), ("token by token", torch.cat(steps, 1))):
            if got.dtype != torch.bfloat16:
                raise LawViolation(f"t={t}, {case}: bfloat16 in, {got.dtype} out")
            error = _size(got.double() - want) / usual
            if not error <= BFLOAT16:
                raise LawViolation(f"t={t}, {case}: relative error {error:.3f} in bfloat16, allowed {BFLOAT16}")


def _size(x: torch.Tensor) -> float:
    return float(x.detach().square().mean().sqrt())


def determinism(bench: Bench) -> None:
    """The same call gives the same bits, forward and backward."""
    mechanism = bench.make(dtype=torch.float32).train()
    for t in (1, 33):
        x = bench.input(2, t, dtype=torch.float32).requires_grad_()
        first, second = (run(mechanism, x)[0] for _ in range(2))
        leaves = [x, *mechanism.parameters()]
        grads = [torch.autograd.grad(y.square().sum(), leaves, materialize_grads=True) for y in (first, second)]
        for a, b in zip((first, *grads[0]), (second, *grads[1]), strict=True):
            same(f"t={t}, called twice", "output or gradient", a, b, tolerance=0.0)


def mapping(bench: Bench) -> None:
    """The map is the computation: weights times values, read out, is the output; it is zero where nothing is seen."""
    mechanism = bench.make()
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
        x = bench.input(b, t).requires_grad_()
        weights = mechanism.weights(x, layout=layout)
        if bool(weights.triu(1).any()):
            raise LawViolation(f"{case}: the map is not zero above the diagonal")
        if layout is None:
            z = torch.einsum("bhts,bshv->bthv", weights, mechanism.values(x))
            same_values_and_gradients(case, mechanism, [(mechanism.read(z, x), run(mechanism, x)[0])], x)
            continue
        apart = (layout.sequences[:, :, None] != layout.sequences[:, None, :]) | ~layout.valid[:, None, :]
        if bool(weights.masked_select(apart[:, None]).any()):
            raise LawViolation(f"{case}: the map joins tokens of different sequences, or padding")
        for i in range(len(layout.lengths)):
            row, columns = (layout.sequences == i).nonzero(as_tuple=True)
            own = weights[row[0]][:, columns][:, :, columns]
            same(f"{case}, sequence {i}", "map", own, mechanism.weights(x[row[0]][columns][None])[0])


def circuitry(bench: Bench) -> None:
    """Circuits name parameters that exist; QK decides the map and not the values, OV never decides the map."""
    mechanism = bench.make()
    if not hasattr(mechanism, "circuits"):
        raise LawNotApplicable("no circuits()")
    circuits, parameters = mechanism.circuits(), dict(mechanism.named_parameters())
    for name in (*circuits.qk, *circuits.ov):
        if name not in parameters:
            raise LawViolation(f"circuits() names {name!r}, which is no parameter")
    if len({*circuits.qk, *circuits.ov}) < len(circuits.qk) + len(circuits.ov):
        raise LawViolation("a parameter is named twice by circuits()")
    if not hasattr(mechanism, "weights") or not hasattr(mechanism, "values"):
        return
    x = bench.input(1, 5)
    for circuit, names, reading in (("QK", circuits.qk, mechanism.values), ("OV", circuits.ov, mechanism.weights)):
        before = reading(x)
        for name in names:
            seen = mechanism.weights(x)
            with torch.no_grad():  # by uneven factors: a norm behind it would take an even one back
                parameters[name].mul_(torch.linspace(1.2, 1.8, parameters[name].numel()).view_as(parameters[name]))
            if circuit == "QK" and torch.equal(mechanism.weights(x), seen):
                raise LawViolation(f"{name} changed, t=5: circuits() puts it in QK, yet the map stays as it was")
            same(f"{name} changed, t=5", f"what {circuit} must not decide", reading(x), before, tolerance=0.0)
