"""Every law for every registered mechanism and for the options that change its code path."""

from __future__ import annotations

import re

import pytest
import torch
from torch.testing import assert_close

from qkflow.laws import LAWS, check
from qkflow.laws.modules import compiler_error
from qkflow.mechanisms import mechanism, mechanisms
from qkflow.mechanisms.coupling import DYNAMICS
from qkflow.ops import short_conv
from qkflow.ops.delta_rule import use_backend

DELTAS = ("deltanet", "gated-deltanet", "qdelta")
BASES = ("standard", "differential", "coupled", *DELTAS, "kuramoto")
VARIANTS = (
    "standard:qk_norm=True",
    "standard:window=3",
    "standard:window=3,key_heads=1,qk_norm=True",
    "standard:rotary_base=None",
    "standard:conv=4",
    "standard:key_shift=True",
    "standard:head_width=6,key_heads=2",
    "standard:bias=True",
    "differential:window=4,key_heads=1,qk_norm=True",
    "coupled:steps=7",
    "coupled:integrator=leapfrog,force=potential,steps=3",
    "coupled:window=3,key_heads=1,qk_norm=True",
    "coupled:conv=3,key_shift=True,window=3,key_heads=2,qk_norm=before",
    "coupled:sharing=none,key_heads=2",
    "coupled:force=none",
    "standard+euler:steps=2",
    "standard+affine:alternations=2",
    "standard+uncoupled",
    "standard+residual-query",
    "qdelta:conv=1,decay=False",
    "qdelta:heads=1,key_width=130",
    "qdelta:erase=own",
    "kda:heads=1,key_width=20,conv=1",
    "qdelta+hamiltonian:conv=3",
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
COMBINATIONS = (
    "differential:head_width=6,bias=True",
    "coupled:head_width=6",
    "standard:key_heads=2",
    "differential+hamiltonian:key_heads=1,qk_norm=True",
    "differential:conv=4,key_shift=True",
    "coupled:qk_norm=before",
    "nonlinear-query+affine:conv=2,key_heads=1",
    "differential+euler",
    "differential+affine",
    "differential+uncoupled:window=4",
    "differential+residual-query",
    "qdelta+affine:lam=0.5",
    "gated-deltanet+euler:gate=False,value_expansion=1",
    "deltanet+uncoupled:key_width=12",
    "deltanet+residual-query",
    "kda+affine",
    "eda+euler:conv=1",
    "group:group=so3",
)
"""Combinations of options that run the code of BASES and VARIANTS in another order or shape."""
COMBINATION_LAWS = ("splitting", "packing", "cost", "precision", "attention_map", "circuits")
"""The laws on which a wrong combination shows: state, layout, declared costs, dtypes, map and circuits."""
INDUCTOR = ("kuramoto", "qdelta", "coupled")
"""One mechanism of each family, for the default compiler backend; the others stop after AOTAutograd."""
COMPILED = (
    *INDUCTOR,  # first, because they take longest
    "standard:causal=False",
    "kuramoto:causal=False",
    "coupled:integrator=leapfrog,force=potential,steps=3",
    "coupled:conv=3,key_shift=True,window=3,key_heads=2,qk_norm=before",
    "standard+euler:steps=2,window=3,key_heads=1,qk_norm=True",
    "differential+affine",
    "group:group=so3",
)
"""One mechanism for each part whose graph differs: the other mechanisms combine the same parts."""
SPECS = (*BASES, *VARIANTS, *sorted(set(mechanisms()) - set(BASES)))
"""Includes mechanisms registered in the future."""
EAGER_LAWS = [law for law in LAWS if law not in ("compilation", "permutation")]
BIDIRECTIONAL = (
    "standard:causal=False",
    "standard:causal=False,rotary_base=None,key_heads=2,bias=True",
    "differential:causal=False,rotary_base=None,qk_norm=True",
    "coupled:causal=False,rotary_base=None",
    "kuramoto:causal=False",
    "kuramoto:causal=False,rotary_base=None,values=projected",
    "kuramoto:causal=False,rotary_base=None,strict=False",
    "group:causal=False,rotary_base=None",
)
CAUSAL_LAWS = ("causality", "splitting", "decoding", "states")
"""The laws about earlier and later tokens."""


def test_every_registered_mechanism_is_tested() -> None:
    assert set(BASES) <= set(mechanisms())
    assert {_base(spec) for spec in SPECS} == set(mechanisms())


@pytest.mark.parametrize("family", [("standard", "coupled"), ("differential",), DELTAS])
def test_every_dynamics_is_tested_in_every_family(family: tuple[str, ...]) -> None:
    couplings = {mechanism(spec).coupling for spec in (*SPECS, *COMBINATIONS) if _base(spec) in family}
    assert {coupling.dynamics for coupling in couplings if coupling} == set(DYNAMICS)


@pytest.mark.parametrize("law", EAGER_LAWS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_mechanism_satisfies(spec: str, law: str) -> None:
    assert outcome(spec, law) == ("passed", "")


@pytest.mark.parametrize("law", [law for law in LAWS if law not in (*CAUSAL_LAWS, "compilation")])
@pytest.mark.parametrize("spec", BIDIRECTIONAL)
def test_a_bidirectional_mechanism_satisfies(spec: str, law: str) -> None:
    if law == "permutation" and "rotary_base=None" not in spec:
        assert outcome(spec, law) == ("skipped", "the order of the tokens matters")
    else:
        assert outcome(spec, law) == ("passed", "")


@pytest.mark.parametrize("law", CAUSAL_LAWS)
def test_laws_of_causality_are_skipped_without_it(law: str) -> None:
    assert outcome("standard:causal=False", law) == ("skipped", "not causal")


@pytest.mark.parametrize("law", ["causality", "batching", "determinism", "attention_map"])
def test_a_mechanism_with_dropout_satisfies_in_evaluation_mode(law: str) -> None:
    assert outcome("standard:dropout=0.5", law) == ("passed", "")


@pytest.mark.parametrize("law", COMBINATION_LAWS)
@pytest.mark.parametrize("spec", COMBINATIONS)
def test_a_combination_satisfies(spec: str, law: str) -> None:
    assert outcome(spec, law) == ("passed", "")


@pytest.mark.parametrize("law", ["splitting", "padding", "cost", "attention_map"])
@pytest.mark.parametrize(("width", "heads"), [(12, 2), (40, 10)])
@pytest.mark.parametrize("spec", ["standard", "differential", "coupled", "qdelta", "kuramoto"])
def test_a_mechanism_satisfies_at_other_shapes(spec: str, width: int, heads: int, law: str) -> None:
    assert outcome(spec, law, width=width, heads=heads) == ("passed", "")


@pytest.mark.parametrize("law", EAGER_LAWS)
@pytest.mark.parametrize("spec", ["qdelta", "kda"])
def test_the_delta_rule_satisfies_without_c_kernels(spec: str, law: str, without_conv_kernel: None) -> None:
    with use_backend("chunked"):
        assert outcome(spec, law) == ("passed", "")


@pytest.mark.parametrize("law", [law for law in EAGER_LAWS if law != "cost"])
@pytest.mark.parametrize("spec", ["qdelta", "kda"])
def test_the_naive_delta_rule_satisfies(spec: str, law: str, without_conv_kernel: None) -> None:
    """Except for the FLOPs, which are those of the chunked form."""
    with use_backend("naive"):
        assert outcome(spec, law) == ("passed", "")


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # torch.compile emits warnings
@pytest.mark.parametrize("spec", [*COMPILED, *sorted({*mechanisms()} - {*BASES, "group"})])
def test_a_mechanism_compiles(spec: str) -> None:
    backend = "inductor" if spec in INDUCTOR and compiler_error() is None else "aot_eager"
    assert outcome(spec, "compilation", backend=backend) == ("passed", "")


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # torch.compile emits warnings
@pytest.mark.parametrize(
    "spec", ["standard", "standard:window=3", "standard:conv=4,key_shift=True", "qdelta", "kuramoto"]
)
def test_decoding_does_not_recompile_at_each_token(spec: str) -> None:
    """One mechanism for each kind of state; 37 recompilations would exceed the compiler's limit."""
    layer = mechanism(spec)(32, 4, layer=1, layers=3).double()
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    with torch.no_grad():
        y, state = compiled(x[:, :3])
        outputs = [y]
        for token in x[:, 3:].split(1, 1):
            y, state = compiled(token, state)
            outputs.append(y)
        assert_close(torch.cat(outputs, 1), layer(x)[0], rtol=0, atol=1e-12)


@pytest.fixture
def without_conv_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_conv, "_has_kernel", lambda x, weight: False)


def outcome(
    spec: str, law: str, *, width: int | None = None, heads: int = 4, backend: str = "aot_eager"
) -> tuple[str, str]:
    default_width = 36 if "so3" in spec else 32  # a whole number of rotations per head
    (report,) = check(mechanism(spec), only=[law], width=width or default_width, heads=heads, backend=backend)
    assert report.law == law
    return report.outcome, report.detail


def _base(spec: str) -> str:
    return re.split("[+:]", spec)[0]
