"""Arms made comparable: the same parameters, and then the same tokens, the same FLOPs or the same seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from qkflow.errors import UsageError
from qkflow.experiment.arm import parse_arm
from qkflow.experiment.design import EVALUATIONS
from qkflow.experiment.spec import ExperimentSpec, Match
from qkflow.mechanisms import mechanism
from qkflow.models import Decoder, DecoderConfig, matched, parameters, size

TOLERANCE = 0.005
"""How far an arm's parameters may be from the baseline's, as a part of them."""
OWN = "own"
"""What the size of a study with a model of the user's own is called."""

_WINDOWS = {"100k": (128, 16), "500k": (256, 16)}  # size: (context, batch)
_USUAL_WINDOWS = (256, 32)


@dataclass(frozen=True, kw_only=True)
class MatchedArm:
    """An arm at one size, with the baseline's parameters."""

    name: str
    model: DecoderConfig
    parameters: int
    flops_per_token: int
    """Of one forward pass at the context's length."""
    state_bytes: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """All arms of a study at one size."""

    size: str
    context: int
    batch: int
    arms: tuple[MatchedArm, ...]

    @property
    def step_tokens(self) -> int:
        """Tokens that a step trains on."""
        return self.batch * self.context

    @property
    def parameters(self) -> int:
        """Those of the baseline."""
        return self.arms[0].parameters


def shape(request: ExperimentSpec, size_name: str, vocabulary: int, instance: int | None = None) -> Shape:
    """The arms of a request at a named size (or `OWN`), each with as many parameters as the baseline.

    `instance` is the length of a task's instances, which is what a window then is; steps keep their tokens.

    >>> from qkflow.data import CorpusConfig
    >>> made = shape(ExperimentSpec(corpus=CorpusConfig(), arms=("standard", "differential")), "100k", 257)
    >>> [arm.parameters for arm in made.arms], made.context
    ([100224, 100032], 128)
    """
    context, batch = _WINDOWS.get(size_name, _USUAL_WINDOWS)
    if instance is not None:
        context, batch = instance, max(1, context * batch // instance)
    context, batch = request.context or context, request.batch or batch
    base = request.model or size(size_name, vocabulary=vocabulary)
    if base.vocabulary < vocabulary:
        base = replace(base, vocabulary=vocabulary)
    refuse_twins(request.arms)
    specs = [parse_arm(name)[0] for name in request.arms]
    target = parameters(replace(base, mechanism=specs[0]))
    return Shape(
        size=size_name,
        context=context,
        batch=batch,
        arms=tuple(
            _arm(name, replace(base, mechanism=spec), target, context)
            for name, spec in zip(request.arms, specs, strict=True)
        ),
    )


def refuse_twins(arms: Sequence[str]) -> None:
    """Raise where a name is unknown, or two arms are the same mechanism with the same ratio."""
    made = [(mechanism(spec), ratio) for spec, ratio in map(parse_arm, arms)]
    for number, one in enumerate(made):
        if one in made[:number]:
            twin = arms[made.index(one)]
            raise UsageError(f"the arms {twin!r} and {arms[number]!r} are the same mechanism: give each once")


def steps_of(shape: Shape, steps: int, match: Match, seconds: Sequence[float] = ()) -> tuple[int, ...]:
    """Steps of each arm where the baseline makes `steps`; `seconds`: what a step of each takes.

    >>> from qkflow.data import CorpusConfig
    >>> made = shape(ExperimentSpec(corpus=CorpusConfig(), arms=("standard", "differential")), "100k", 257)
    >>> steps_of(made, 1000, "tokens"), steps_of(made, 1000, "seconds", [0.01, 0.02])
    ((1000, 1000), (1000, 500))
    """
    if match == "tokens":
        return (steps,) * len(shape.arms)
    costs = seconds if match == "seconds" else [arm.flops_per_token for arm in shape.arms]
    return tuple(whole(steps * costs[0] / cost) for cost in costs)


def whole(steps: float) -> int:
    """The nearest number of steps that divides into the evaluations of a run, and is not none."""
    return max(1, round(steps / EVALUATIONS)) * EVALUATIONS


def _arm(name: str, model: DecoderConfig, target: int, context: int) -> MatchedArm:
    try:
        model = matched(model, target)
    except UsageError as error:
        raise UsageError(f"matching impossible for the arm {name!r}: {error}") from error
    with torch.device("meta"):
        cost = Decoder(model).cost(context)
    found = cost.parameters
    if abs(found / target - 1) > TOLERANCE:
        raise UsageError(
            f"matching impossible for the arm {name!r}: the nearest it comes to the baseline's {target:,} parameters "
            f"is {found:,} ({found / target - 1:+.1%}, with a feed-forward width of {model.hidden}), "
            f"and at most {TOLERANCE:.1%} may be left: choose a larger size"
        )
    flops = round(cost.flops / context)
    return MatchedArm(name=name, model=model, parameters=found, flops_per_token=flops, state_bytes=cost.state_bytes)
