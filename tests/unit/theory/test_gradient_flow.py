"""The reduced gradient flow of the QK and OV circuits."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.errors import UsageError
from qkflow.theory.gradient_flow import FlowConfig, alpha_at, integrate_flow, invariant_error

CONFIGS = st.builds(
    FlowConfig,
    informative=st.integers(1, 60),
    uninformative=st.integers(1, 200),
    classes=st.integers(2, 100),
    b=st.floats(0.1, 200.0),
    r=st.floats(-3, 3).map(lambda power: 10**power),
)


def integrate_in_time(config: FlowConfig, time: float) -> tuple[float, float]:
    """Return mu_QK and mu_OV at a time, by integrating the published equations (3) and (4) with another method."""
    from scipy.integrate import solve_ivp

    m, n, M, b = config.informative, config.uninformative, config.classes, config.b

    def derivatives(_: float, mu: np.ndarray) -> list[float]:
        alpha = m * math.exp(mu[0]) / (m * math.exp(mu[0]) + n)
        shared = b * (math.exp(alpha * mu[1]) + M - 1)
        ov = config.eta * alpha / shared
        qk = config.r * config.eta * (M - 1) * alpha * (1 - alpha) * mu[1] / (M * b * shared)
        return [qk, ov]

    solution = solve_ivp(derivatives, (0, time), [0.0, 0.0], method="LSODA", rtol=1e-10, atol=1e-12)
    return solution.y[0, -1], solution.y[1, -1]


@pytest.mark.parametrize(("r", "alpha"), [(0.01, 0.149), (0.1, 0.287), (1.0, 0.591), (10.0, 0.922), (100.0, 0.993)])
def test_attention_matches_the_published_values(r: float, alpha: float) -> None:
    config = FlowConfig(r=r)
    assert alpha_at(config, 1e-4) == pytest.approx(alpha, abs=1e-3)
    assert integrate_flow(config, loss=1e-4, points=2).alpha[-1] == pytest.approx(alpha_at(config, 1e-4), abs=1e-9)


@given(config=CONFIGS)
@settings(deadline=None, max_examples=10)
def test_invariant_holds_along_the_flow(config: FlowConfig) -> None:
    path = integrate_flow(config, loss=1e-8, points=100)
    assert np.abs(invariant_error(config, path.mu_qk, path.mu_ov)).max() < 1e-8
    assert path.alpha[-1] == pytest.approx(alpha_at(config, 1e-8), abs=1e-8)


def test_invariant_fails_off_the_flow() -> None:
    path = integrate_flow(FlowConfig())
    assert np.abs(invariant_error(FlowConfig(), path.mu_qk * 1.001, path.mu_ov)).max() > 1e-4


@pytest.mark.parametrize("config", [FlowConfig(eta=3.0), FlowConfig(r=20.0, b=5.0, classes=4)])
def test_path_solves_the_published_equations(config: FlowConfig) -> None:
    path = integrate_flow(config, loss=1e-3, points=5)
    for i in (1, 3, 4):
        mu_qk, mu_ov = integrate_in_time(config, path.time[i])
        assert (path.mu_qk[i], path.mu_ov[i]) == pytest.approx((mu_qk, mu_ov), rel=1e-6)


@given(config=CONFIGS, factor=st.floats(1.1, 100.0), loss=st.floats(-8, -1).map(lambda power: 10**power))
@settings(deadline=None, max_examples=25)
def test_attention_at_equal_loss_increases_with_r(config: FlowConfig, factor: float, loss: float) -> None:
    slow, fast = alpha_at(config, loss), alpha_at(replace(config, r=config.r * factor), loss)
    assert config.informative / (config.informative + config.uninformative) < slow < fast < 1


def test_attention_without_qk_learning_is_uniform() -> None:
    assert alpha_at(FlowConfig(r=1e-12), 1e-8) == pytest.approx(5 / 55, abs=1e-9)
    assert alpha_at(FlowConfig(r=100.0), math.log(20)) == pytest.approx(5 / 55, abs=1e-12)


def test_loss_decreases_like_one_over_time() -> None:
    path = integrate_flow(FlowConfig(), loss=1e-8, points=200)
    assert path.loss[0] == pytest.approx(math.log(20))
    assert path.loss[-1] == pytest.approx(1e-8)
    for falls, rises in zip((-np.diff(path.loss),) * 3, map(np.diff, (path.time, path.mu_ov, path.alpha)), strict=True):
        assert (falls > 0).all()
        assert (rises > 0).all()
    late = path.loss < 1e-7
    assert np.ptp(np.log(path.time[late] * path.loss[late])) < 0.2


def test_eta_only_rescales_time() -> None:
    base, faster = integrate_flow(FlowConfig(), points=9), integrate_flow(FlowConfig(eta=3.0), points=9)
    np.testing.assert_allclose(3 * faster.time, base.time, rtol=1e-9)
    np.testing.assert_allclose(faster.alpha, base.alpha, rtol=1e-9)


@pytest.mark.parametrize(
    ("field", "value"), [("r", 0.0), ("r", -1.0), ("b", math.nan), ("informative", 0), ("classes", 1)]
)
def test_invalid_constants_raise(field: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"^{field} must be .*, got {value}"):
        FlowConfig(**{field: value})


@pytest.mark.parametrize("loss", [0.0, 5.0, math.nan])
def test_unreachable_loss_raises(loss: float) -> None:
    with pytest.raises(UsageError, match=rf"loss must be .*log\(classes\).*got {loss}"):
        alpha_at(FlowConfig(), loss)
    with pytest.raises(UsageError, match="loss must be"):
        integrate_flow(FlowConfig(), loss=loss)


def test_path_needs_two_points_and_a_lower_loss() -> None:
    with pytest.raises(UsageError, match="points must be at least 2, got 1"):
        integrate_flow(FlowConfig(), points=1)
    with pytest.raises(UsageError, match="below log"):
        integrate_flow(FlowConfig(), loss=math.log(20))
