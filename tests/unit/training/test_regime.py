"""Default hyperparameters."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data import CorpusConfig
from qkflow.mechanisms import mechanisms
from qkflow.models import SIZES, parameters, size
from qkflow.training import TrainConfig
from qkflow.training.regime import (
    LARGEST_BATCH,
    SMALLEST_BATCH,
    OptimizerName,
    default_batch,
    default_regime,
)


@given(tokens=st.floats(1, 1e12), context=st.sampled_from([16, 128, 256, 1024]))
@settings(deadline=None, max_examples=100)
def test_a_run_has_1500_steps_if_its_tokens_allow_it(tokens: float, context: int) -> None:
    batch = default_batch(tokens, context)
    steps = tokens / (batch * context)
    assert SMALLEST_BATCH <= batch <= LARGEST_BATCH
    assert math.log2(batch).is_integer()
    if tokens >= 1500 * SMALLEST_BATCH * context:
        assert steps >= 1500
    else:
        assert batch == SMALLEST_BATCH
    if SMALLEST_BATCH < batch < LARGEST_BATCH:
        assert steps < 4000


@pytest.mark.parametrize("size_name", SIZES)
def test_every_mechanism_has_usable_defaults_at_every_size(size_name: str) -> None:
    count = parameters(size(size_name, vocabulary=257))
    for mechanism in mechanisms():
        for optimizer in get_args(OptimizerName):
            for batch, context in ((4, 128), (64, 1024)):
                regime = default_regime(
                    parameters=count, batch=batch, context=context, mechanism=mechanism, optimizer=optimizer
                )
                assert 1e-5 < regime.lr < 0.2
                assert 0.5 < regime.betas[1] < 1
                assert 0 < regime.decay <= 1
                assert 0 <= regime.floor < 1
                TrainConfig(
                    data=CorpusConfig(),
                    model=size("100k", vocabulary=257),
                    steps=100,
                    lr=regime.lr,
                    betas=regime.betas,
                    decay=regime.decay,
                    floor=regime.floor,
                    optimizer=regime.optimizer,
                    batch=batch,
                    context=context,
                )


def test_larger_models_and_smaller_batches_learn_more_slowly() -> None:
    rates = [default_regime(parameters=n, batch=4, context=128).lr for n in (10**5, 10**6, 10**7)]
    assert rates == sorted(rates, reverse=True)
    rates = [default_regime(parameters=10**5, batch=batch, context=128).lr for batch in (4, 16, 64)]
    assert rates == sorted(rates)


def test_options_of_a_mechanism_do_not_change_its_rate() -> None:
    rates = {
        default_regime(parameters=10**5, batch=4, context=128, mechanism=name).lr
        for name in ("standard", "standard:window=8")
    }
    assert len(rates) == 1
