"""Outcomes of laws for incomplete or failing mechanisms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.laws import LAWS, check
from qkflow.layout import Layout
from qkflow.mechanisms import Circuits, StandardAttention

Answer = tuple[Tensor, Any]


class OnlyForward(nn.Module):
    """A minimal layer: only the computation."""

    def __init__(self, width: int, heads: int, layer: int, layers: int) -> None:
        super().__init__()
        self.inner = StandardAttention(width, heads, layer, layers)

    def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Answer:
        return self.inner(x, state, layout)


def verdicts(factory: Any, *laws: str) -> dict[str, tuple[str, str]]:
    return {verdict.law: (verdict.outcome, verdict.detail) for verdict in check(factory, only=laws)}


def test_laws_on_missing_methods_are_absent_and_the_others_hold() -> None:
    outcomes = verdicts(OnlyForward, *(law for law in LAWS if law != "compilation"))
    missing = {law: answer for law, answer in outcomes.items() if answer[0] == "skipped"}
    assert missing == {
        "permutation": ("skipped", "the order of the tokens matters"),
        "cost": ("skipped", "no cost()"),
        "attention_map": ("skipped", "no weights()"),
        "circuits": ("skipped", "no circuits()"),
    }
    assert {answer for law, answer in outcomes.items() if law not in missing} == {("passed", "")}


def test_circuits_without_a_map_are_checked_by_name() -> None:
    class Named(OnlyForward):
        def circuits(self) -> Circuits:
            return Circuits(qk=("inner.query.weight",), ov=("inner.values.weight",))

    assert verdicts(Named, "circuits") == {
        "circuits": ("failed", "circuits() names 'inner.values.weight', which is not a parameter")
    }


def test_an_exception_of_the_mechanism_breaks_the_law() -> None:
    class Fails(OnlyForward):
        def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Answer:
            if state is not None:
                raise KeyError("no such thing\nas a state")
            return super().forward(x, state, layout)

    outcomes = verdicts(Fails, "causality", "splitting", "batching")
    assert outcomes["causality"] == outcomes["batching"] == ("passed", "")
    outcome, detail = outcomes["splitting"]
    assert outcome == "failed"
    assert detail.startswith("KeyError: ")
    assert "no such thing" in detail


def test_an_exception_without_a_message_is_named() -> None:
    class Silent(OnlyForward):
        def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Answer:
            raise NotImplementedError

    assert verdicts(Silent, "causality") == {"causality": ("failed", "NotImplementedError: ")}


def test_a_factory_that_fails_is_a_usage_error_instead_of_broken_laws() -> None:
    def factory(width: int, heads: int, layer: int, layers: int) -> StandardAttention:
        raise ValueError("not today")

    with pytest.raises(UsageError, match="raised ValueError: not today"):
        check(factory)


def test_a_layer_with_other_arguments_is_a_usage_error_instead_of_broken_laws() -> None:
    class Stateless(OnlyForward):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return x, None

    class AnyArguments(OnlyForward):
        def forward(self, *args: Any, **kwargs: Any) -> Answer:
            return super().forward(*args, **kwargs)

    with pytest.raises(UsageError, match=r"Stateless\.forward\(x\) cannot be called as forward\(x, state=None"):
        check(Stateless)
    assert verdicts(AnyArguments, "batching") == {"batching": ("passed", "")}


def test_a_factory_that_fails_at_some_sizes_breaks_laws_and_raises_nothing() -> None:
    calls = iter(range(100))

    def factory(width: int, heads: int, layer: int, layers: int) -> StandardAttention:
        if next(calls):
            raise UsageError("not today")
        return StandardAttention(width, heads)

    assert verdicts(factory, "batching", "padding") == {
        "batching": ("failed", "UsageError: not today"),
        "padding": ("failed", "UsageError: not today"),
    }


def test_an_output_of_the_wrong_form_is_explained() -> None:
    class OneTensor(OnlyForward):
        def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Any:
            return super().forward(x, state, layout)[0]

    class Narrow(OnlyForward):
        def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Answer:
            y, after = super().forward(x, state, layout)
            return y[..., :-1], after

    assert verdicts(OneTensor, "batching") == {"batching": ("failed", "must return (y, state), got Tensor")}
    assert verdicts(Narrow, "batching") == {
        "batching": ("failed", "y must have the shape of x, [2, 1, 32], got [2, 1, 31]")
    }


def test_nan_breaks_a_law() -> None:
    class Poisoned(OnlyForward):
        def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Answer:
            y, after = super().forward(x, state, layout)
            return y * torch.nan, after

    outcome, detail = verdicts(Poisoned, "batching")["batching"]
    assert outcome == "failed"
    assert "nan" in detail


def test_check_does_not_change_the_global_random_state() -> None:
    before = torch.random.get_rng_state()
    check(StandardAttention, only=["causality", "state_dict", "padding"])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_unknown_law_suggests_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"unknown law 'causalty': did you mean 'causality'\?"):
        check(StandardAttention, only=["causalty"])


def test_every_law_has_a_one_sentence_docstring() -> None:
    for name, law in LAWS.items():
        assert law.__name__ == name
        assert (law.__doc__ or "").splitlines()[0].endswith(".")
