"""Make arms comparable: the same number of parameters, and the same tokens, FLOPs or seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from qkflow.errors import UsageError
from qkflow.experiment.spec import ExperimentSpec, Match, parse_arm, refuse_duplicate_arms
from qkflow.models import Decoder, DecoderConfig, matched, parameters, size

EVALUATIONS = 20
"""Evaluations per run. Steps are a multiple of it, so that one evaluation is at the end of the stable learning rate."""
TUNING_EVALUATIONS = 4
"""Evaluations per tuning run; only the last one matters."""
DECAY = 0.2
"""The last fraction of a run, over which the learning rate decays."""
TOLERANCE = 0.005
"""The largest relative difference between an arm's parameters and the baseline's."""
OWN = "own"
"""The size of an experiment with a given model."""

_CONTEXT_AND_BATCH = {"100k": (128, 16), "500k": (256, 16)}
_DEFAULT_CONTEXT_AND_BATCH = (256, 32)


@dataclass(frozen=True, kw_only=True)
class MatchedArm:
    """An arm at one size, with the baseline's number of parameters."""

    name: str
    model: DecoderConfig
    parameters: int
    flops_per_token: int
    """Of one forward pass at the context length."""
    state_bytes: int


@dataclass(frozen=True, kw_only=True)
class SizedArms:
    """All arms of an experiment at one model size."""

    size: str
    context: int
    batch: int
    arms: tuple[MatchedArm, ...]

    @property
    def step_tokens(self) -> int:
        """Training tokens per step."""
        return self.batch * self.context

    @property
    def parameters(self) -> int:
        """The number of parameters of the baseline."""
        return self.arms[0].parameters


def match_arms(spec: ExperimentSpec, size_name: str, vocabulary: int, instance_length: int | None = None) -> SizedArms:
    """The arms of a spec at a named size (or `OWN`), each with as many parameters as the baseline.

    For a recall task, `instance_length` is the context length; the tokens per step stay the same.

    >>> from qkflow.data import CorpusConfig
    >>> sized = match_arms(ExperimentSpec(data=CorpusConfig(), arms=("standard", "differential")), "100k", 257)
    >>> [arm.parameters for arm in sized.arms], sized.context
    ([100224, 100032], 128)
    """
    context, batch = _CONTEXT_AND_BATCH.get(size_name, _DEFAULT_CONTEXT_AND_BATCH)
    if instance_length is not None:
        context, batch = instance_length, max(1, context * batch // instance_length)
    context, batch = spec.context or context, spec.batch or batch
    base = spec.model or size(size_name, vocabulary=vocabulary)
    if base.vocabulary < vocabulary:
        base = replace(base, vocabulary=vocabulary)
    refuse_duplicate_arms(spec.arms)
    models = [replace(base, mechanism=parse_arm(name).mechanism) for name in spec.arms]
    target = parameters(models[0])
    arms = tuple(_match(name, model, target, context) for name, model in zip(spec.arms, models, strict=True))
    return SizedArms(size=size_name, context=context, batch=batch, arms=arms)


def steps_per_arm(arms: SizedArms, steps: int, match: Match, seconds: Sequence[float] = ()) -> tuple[int, ...]:
    """Steps of each arm if the baseline has `steps`. `seconds` is the time per step of each arm.

    >>> from qkflow.data import CorpusConfig
    >>> sized = match_arms(ExperimentSpec(data=CorpusConfig(), arms=("standard", "differential")), "100k", 257)
    >>> steps_per_arm(sized, 1000, "tokens"), steps_per_arm(sized, 1000, "seconds", [0.01, 0.02])
    ((1000, 1000), (1000, 500))
    """
    if match == "tokens":
        return (steps,) * len(arms.arms)
    costs = seconds if match == "seconds" else [arm.flops_per_token for arm in arms.arms]
    return tuple(round_steps(steps * costs[0] / cost) for cost in costs)


def round_steps(steps: float) -> int:
    """The nearest positive multiple of `EVALUATIONS`."""
    return max(1, round(steps / EVALUATIONS)) * EVALUATIONS


def _match(name: str, model: DecoderConfig, target: int, context: int) -> MatchedArm:
    try:
        model = matched(model, target)
    except UsageError as error:
        raise UsageError(f"cannot match the arm {name!r}: {error}") from error
    with torch.device("meta"):
        cost = Decoder(model).cost(context)
    count = cost.parameters
    if abs(count / target - 1) > TOLERANCE:
        raise UsageError(
            f"cannot match the arm {name!r}: the closest to the baseline's {target:,} parameters is {count:,} "
            f"({count / target - 1:+.1%}, with a feed-forward width of {model.hidden}), and at most {TOLERANCE:.1%} is "
            "allowed: choose a larger size"
        )
    flops = round(cost.flops / context)
    return MatchedArm(name=name, model=model, parameters=count, flops_per_token=flops, state_bytes=cost.state_bytes)
