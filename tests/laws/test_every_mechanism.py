"""Every law over every registered mechanism, and over the variants whose code paths differ."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import jaxtyping
import pytest
import torch
from torch.testing import assert_close

from qkflow.laws import LAWS, check
from qkflow.laws.modules import compiler_fault
from qkflow.mechanisms import mechanism, mechanisms
from qkflow.mechanisms.coupled import DYNAMICS
from qkflow.ops import short_conv
from qkflow.ops.delta_rule import use_backend

DELTAS = ("deltanet", "gated-deltanet", "qdelta")
BASES = ("standard", "differential", "coupled", *DELTAS, "kuramoto")
MEMORIES = (
    "qdelta:conv=1,decay=False",
    "qdelta:heads=1,key_width=130",
    "qdelta+hamiltonian:conv=3",
    "qdelta+affine:lam=0.5",
    "gated-deltanet+euler:gate=False,value_expansion=1",
    "deltanet+uncoupled:key_width=12",
    "deltanet+nonlinear-query",
)
PHASES = (
    "kuramoto:frustrated=True",
    "kuramoto:frustrated=True,harmonics=2,window=3",
    "kuramoto:gate=static,step=head",
    "kuramoto:gate=content,values=projected,temperature=fixed",
    "kuramoto:gate=off,rotary_base=None,step=fixed",
    "kuramoto:strict=False,window=3",
    "group:frustrated=True",
    "group:group=so3,frustrated=True",
    "group:group=torus,gate=static",
)
VARIANTS = (
    "standard:key_heads=2",
    "standard:qk_norm=True",
    "standard:window=3",
    "standard:window=3,key_heads=1,qk_norm=True",
    "standard:rotary_base=None",
    "differential:key_heads=1",
    "differential:window=4,qk_norm=True",
    "coupled:steps=7",
    "coupled:integrator=leapfrog,force=potential,steps=3",
    "coupled:window=3,key_heads=1,qk_norm=True",
    "coupled:sharing=none,key_heads=2",
    "coupled:force=none",
    "standard+euler:steps=2",
    "standard+affine:alternations=2",
    "standard+uncoupled",
    "standard+nonlinear-query",
    "differential+hamiltonian:key_heads=1,qk_norm=True",
    "differential+euler",
    "differential+affine",
    "differential+uncoupled:window=4",
    "differential+nonlinear-query",
    *MEMORIES,
    "group:group=so3",
    *PHASES,
)
ALIKE = {
    "deltanet",
    "gated-deltanet",
    *MEMORIES,
    *PHASES,
    "standard:key_heads=2",
    "standard:qk_norm=True",
    "standard:window=3",
    "differential:key_heads=1",
    "differential:window=4,qk_norm=True",
    "differential+hamiltonian:key_heads=1,qk_norm=True",
    "coupled:steps=7",
    "coupled:window=3,key_heads=1,qk_norm=True",
    "coupled:sharing=none,key_heads=2",
    "coupled:force=none",
    "differential+euler",
    "differential+uncoupled:window=4",
    "differential+nonlinear-query",
}
"""Those whose graphs are put together from those of others, such as `standard:window=3,key_heads=1,qk_norm=True` and
`differential`: they are not compiled."""
COMPILED = tuple(base for base in BASES if base not in ALIKE)
WHOLE = ("coupled", "qdelta", "kuramoto")
"""One of each family, which has in it what the plainer ones have: a minute each through the compiler users meet."""
SPECS = (*BASES, *VARIANTS, *sorted(set(mechanisms()) - set(BASES)))
"""A mechanism that joins the registry is held to the laws without a word here."""
REPEATING = {"causality", "stepping", "padding", "determinism", "saving", "circuitry"}
"""Laws whose calls are, in shape, those of the others: there shapes are checked, which takes most of a law's time."""


def test_the_built_in_mechanisms_are_among_those_tried() -> None:
    assert set(BASES) <= set(mechanisms())
    assert {re.split("[+:]", spec)[0] for spec in SPECS} == set(mechanisms())


@pytest.mark.parametrize("family", [("standard", "coupled"), ("differential",), DELTAS])
def test_every_dynamics_is_among_them_in_every_family(family: tuple[str, ...]) -> None:
    tried = {mechanism(spec).coupling for spec in SPECS if re.split("[+:]", spec)[0] in family}
    assert {coupling.dynamics for coupling in tried if coupling} == set(DYNAMICS)


@pytest.mark.parametrize("law", [law for law in LAWS if law != "compilation"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_mechanism_obeys(spec: str, law: str) -> None:
    assert verdict(spec, law) == ("passed", "")


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # the compiler warns of itself
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec not in ALIKE])
def test_a_mechanism_compiles_whole(spec: str) -> None:
    """One of each family through the whole compiler; the others, whose graphs differ little, through its front half."""
    whole = spec in WHOLE and compiler_fault() is None
    assert verdict(spec, "compilation", backend="inductor" if whole else "aot_eager") == ("passed", "")


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # the compiler warns of itself
@pytest.mark.parametrize("spec", COMPILED)
def test_a_compiled_mechanism_serves_every_length(spec: str) -> None:
    """With lengths left open after the second one; a graph for each length would run into the compiler's limit."""
    layer = mechanism(spec)(32, 4, layer=1, layers=3).double()
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for t in range(4, 16):
        x = torch.randn(2, t, 32, dtype=torch.float64, requires_grad=True)
        got, want = compiled(x)[0], layer(x)[0]
        assert_close(got, want, rtol=0, atol=1e-12)
        assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want)), rtol=0, atol=1e-11)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # the compiler warns of itself
@pytest.mark.parametrize("spec", [*COMPILED, "standard:window=3"])
def test_a_compiled_mechanism_steps_without_compiling_at_each_token(spec: str) -> None:
    layer = mechanism(spec)(32, 4, layer=1, layers=3).double()
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    with torch.no_grad():
        y, state = compiled(x[:, :3])
        steps = [y]
        for token in x[:, 3:].split(1, 1):
            y, state = compiled(token, state)
            steps.append(y)
        assert_close(torch.cat(steps, 1), layer(x)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("law", [law for law in LAWS if law != "compilation"])
@pytest.mark.parametrize(("width", "heads"), [(12, 2), (40, 10)])
@pytest.mark.parametrize("spec", COMPILED)
def test_a_mechanism_obeys_at_other_shapes(spec: str, width: int, heads: int, law: str) -> None:
    assert verdict(spec, law, width=width, heads=heads) == ("passed", "")


@pytest.mark.parametrize("law", [law for law in LAWS if law != "compilation"])
@pytest.mark.parametrize("spec", DELTAS)
def test_a_memory_obeys_without_kernels(spec: str, law: str, without_kernels: None) -> None:
    """With them, where they can be built, it does in all the tests above."""
    with use_backend("chunked"):
        assert verdict(spec, law) == ("passed", "")


@pytest.mark.parametrize("law", [law for law in LAWS if law not in ("compilation", "declaration")])
def test_a_memory_obeys_as_a_recurrence(law: str, without_kernels: None) -> None:
    """Which is to say that the truth obeys; the products that are declared are not those it makes."""
    with use_backend("naive"):
        assert verdict("qdelta", law) == ("passed", "")


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_conv, "_has_kernel", lambda x, weight: False)


def verdict(
    spec: str, law: str, *, width: int | None = None, heads: int = 4, backend: str = "aot_eager"
) -> tuple[str, str]:
    usual = 36 if "so3" in spec else 32  # whole elements, for every head
    with unchecked() if law in REPEATING else nullcontext():
        (answer,) = check(mechanism(spec), only=[law], width=width or usual, heads=heads, backend=backend)
    assert answer.law == law
    return answer.outcome, answer.detail


@contextmanager
def unchecked() -> Iterator[None]:
    """Without the checks of shapes and types, if they are on."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)
