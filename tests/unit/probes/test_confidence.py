import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from qkflow.probes.confidence import confidence, confidence_curve, effective_tokens, entropy, mass

ROWS = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
RATIONALES = torch.tensor([[True, True, False, False], [True, False, False, False], [True, False, False, False]])


def test_mass_is_what_lies_on_the_rationale() -> None:
    assert mass(ROWS, RATIONALES).tolist() == [0.75, 0, 0]


def test_mass_of_signed_weights_is_a_part_of_their_size() -> None:
    assert mass(torch.tensor([[-6.0, 2.0]]), torch.tensor([[True, False]])).item() == 0.75


def test_an_instance_without_a_rationale_has_no_mass_and_counts_in_no_confidence() -> None:
    found = mass(ROWS[:2], torch.tensor([[True] * 4, [False] * 4]))
    assert found[0] == 1
    assert found[1].isnan()
    assert confidence(found) == 100
    assert math.isnan(confidence(found[1:]))


@pytest.mark.parametrize(("tau", "percent"), [(0.0, 100), (0.2, 75), (0.5, 50), (0.51, 25), (1.0, 25)])
def test_confidence_is_the_percentage_that_reaches_tau(tau: float, percent: float) -> None:
    assert confidence([0.1, 0.2, 0.5, 1.0], tau) == percent
    assert confidence(np.array([0.1, 0.2, 0.5, 1.0]), tau) == percent
    assert confidence(torch.tensor([0.1, 0.2, 0.5, 1.0]), tau) == percent  # 0.2 in single precision, too


@given(masses=st.lists(st.floats(0, 1), min_size=1, max_size=12))
@settings(deadline=None, max_examples=25)
def test_the_curve_never_rises_and_its_area_is_the_mean_mass(masses: list[float]) -> None:
    taus = (np.arange(2000) + 0.5) / 2000
    curve = confidence_curve(masses, taus)
    assert (np.diff(curve) <= 0).all()
    assert curve.mean() == pytest.approx(100 * np.mean(masses), abs=0.1)


def test_entropy_counts_in_nats_and_no_share_adds_nothing() -> None:
    found = entropy(ROWS)
    assert_close(found[0].item(), 1.5 * math.log(2))
    assert found[1] == 0
    assert math.copysign(1, found[1].item()) == 1
    assert found[2].isnan()


@pytest.mark.parametrize("n", [1, 2, 7])
def test_even_attention_has_as_many_effective_tokens_as_it_attends_to(n: int) -> None:
    row = torch.zeros(1, 9, dtype=torch.float64)
    row[0, :n] = 0.3  # shares are made of it
    assert_close(effective_tokens(row).item(), float(n))
