"""The reduced flow of the two circuits."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.errors import UsageError
from qkflow.theory.gradient_flow import FlowConfig, alpha_at, flow, invariant

CONFIGS = st.builds(
    FlowConfig,
    informative=st.integers(1, 60),
    uninformative=st.integers(1, 200),
    classes=st.integers(2, 100),
    b=st.floats(0.1, 200.0),
    r=st.floats(-3, 3).map(lambda power: 10**power),
)


def followed_in_time(config: FlowConfig, time: float) -> tuple[float, float]:
    """mu_QK and mu_OV at a time, by another method and with nothing reduced: the published equations as they stand."""
    from scipy.integrate import solve_ivp

    m, n, M, b = config.informative, config.uninformative, config.classes, config.b

    def slope(_: float, mu: np.ndarray) -> list[float]:
        alpha = m * math.exp(mu[0]) / (m * math.exp(mu[0]) + n)
        shared = b * (math.exp(alpha * mu[1]) + M - 1)
        ov = config.eta * alpha / shared
        qk = config.r * config.eta * (M - 1) * alpha * (1 - alpha) * mu[1] / (M * b * shared)
        return [qk, ov]

    found = solve_ivp(slope, (0, time), [0.0, 0.0], method="LSODA", rtol=1e-10, atol=1e-12)
    return found.y[0, -1], found.y[1, -1]


@pytest.mark.parametrize(("r", "alpha"), [(0.01, 0.149), (0.1, 0.287), (1.0, 0.591), (10.0, 0.922), (100.0, 0.993)])
def test_attention_at_a_loss_of_1e_4_is_as_published(r: float, alpha: float) -> None:
    config = FlowConfig(r=r)
    assert alpha_at(config, 1e-4) == pytest.approx(alpha, abs=1e-3)
    assert flow(config, loss=1e-4, points=2).alpha[-1] == pytest.approx(alpha_at(config, 1e-4), abs=1e-9)


@given(config=CONFIGS)
@settings(deadline=None, max_examples=10)
def test_the_invariant_holds_along_the_way_to_a_loss_of_1e_8(config: FlowConfig) -> None:
    path = flow(config, loss=1e-8, points=100)
    assert np.abs(invariant(config, path.mu_qk, path.mu_ov)).max() < 1e-8
    assert path.alpha[-1] == pytest.approx(alpha_at(config, 1e-8), abs=1e-8)


def test_the_invariant_is_missed_off_the_flow() -> None:
    path = flow(FlowConfig())
    assert np.abs(invariant(FlowConfig(), path.mu_qk * 1.001, path.mu_ov)).max() > 1e-4


@pytest.mark.parametrize("config", [FlowConfig(eta=3.0), FlowConfig(r=20.0, b=5.0, classes=4)])
def test_the_path_is_the_one_that_the_published_equations_give_in_time(config: FlowConfig) -> None:
    path = flow(config, loss=1e-3, points=5)
    for i in (1, 3, 4):
        mu_qk, mu_ov = followed_in_time(config, path.time[i])
        assert (path.mu_qk[i], path.mu_ov[i]) == pytest.approx((mu_qk, mu_ov), rel=1e-6)


@given(config=CONFIGS, factor=st.floats(1.1, 100.0), loss=st.floats(-8, -1).map(lambda power: 10**power))
@settings(deadline=None, max_examples=25)
def test_attention_at_equal_loss_rises_with_r(config: FlowConfig, factor: float, loss: float) -> None:
    slow, fast = alpha_at(config, loss), alpha_at(replace(config, r=config.r * factor), loss)
    assert config.informative / (config.informative + config.uninformative) < slow < fast < 1


def test_without_a_qk_rate_attention_stays_at_the_share_of_informative_tokens() -> None:
    assert alpha_at(FlowConfig(r=1e-12), 1e-8) == pytest.approx(5 / 55, abs=1e-9)
    assert alpha_at(FlowConfig(r=100.0), math.log(20)) == pytest.approx(5 / 55, abs=1e-12)


def test_the_loss_falls_in_time_and_time_grows_like_its_reciprocal() -> None:
    path = flow(FlowConfig(), loss=1e-8, points=200)
    assert path.loss[0] == pytest.approx(math.log(20))
    assert path.loss[-1] == pytest.approx(1e-8)
    for falls, rises in zip((-np.diff(path.loss),) * 3, map(np.diff, (path.time, path.mu_ov, path.alpha)), strict=True):
        assert (falls > 0).all()
        assert (rises > 0).all()
    late = path.loss < 1e-7
    assert np.ptp(np.log(path.time[late] * path.loss[late])) < 0.2


def test_eta_stretches_time_and_nothing_else() -> None:
    one, three = flow(FlowConfig(), points=9), flow(FlowConfig(eta=3.0), points=9)
    np.testing.assert_allclose(3 * three.time, one.time, rtol=1e-9)
    np.testing.assert_allclose(three.alpha, one.alpha, rtol=1e-9)


@pytest.mark.parametrize(
    ("field", "value"), [("r", 0.0), ("r", -1.0), ("b", math.nan), ("informative", 0), ("classes", 1)]
)
def test_constants_that_make_no_flow_are_refused(field: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"^{field} must be .*, got {value}"):
        FlowConfig(**{field: value})


@pytest.mark.parametrize("loss", [0.0, 5.0, math.nan])
def test_a_loss_that_the_flow_never_has_is_refused(loss: float) -> None:
    with pytest.raises(UsageError, match=rf"loss must be .*log\(classes\).*got {loss}"):
        alpha_at(FlowConfig(), loss)
    with pytest.raises(UsageError, match="loss must be"):
        flow(FlowConfig(), loss=loss)


def test_a_path_needs_a_beginning_and_an_end() -> None:
    with pytest.raises(UsageError, match="at least 2 points, got 1"):
        flow(FlowConfig(), points=1)
    with pytest.raises(UsageError, match="below log"):
        flow(FlowConfig(), loss=math.log(20))
