"""How `qkflow sharpen` trains on each task: model, optimizer, learning rates and ratios.

Comments say what the paper states; the rest was chosen here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from qkflow.data.tasks import Task, TaskConfig, open_task
from qkflow.errors import UsageError, unknown
from qkflow.experiment.spec import ExperimentSpec, RationaleSpec, parse_arm, refuse_duplicate_arms
from qkflow.models import ClassifierConfig, DecoderConfig
from qkflow.models.one_layer import Form, OneLayerConfig
from qkflow.training import task_defaults
from qkflow.training.config import ModelConfig

SEEDS = 5


@dataclass(frozen=True, kw_only=True)
class Preset:
    """How a task is trained on."""

    optimizer: Literal["adamw", "sgd"]
    rates: tuple[float, ...]
    """Learning rates for tuning."""
    ratios: tuple[float, ...]
    """Learning-rate ratios of W_Q and W_K; the first is the baseline."""
    steps: int
    batch: int
    momentum: float = 0.0
    clip: float | None = None
    published_ratios: tuple[float, float] | None = None
    """The ratios of the QK circuit and of the embeddings in the published code; None: unknown."""
    published: tuple[tuple[str, float, float, float], ...] = ()
    """The paper's results: arm, performance, AC, comprehensiveness."""


PRESETS: dict[str, Preset] = {
    # The smallest model that learns the built-in grammar. Attention is uniform at first, as in the theory.
    "grammar": Preset(optimizer="adamw", rates=(5e-4, 1e-3, 2e-3), ratios=(1.0, 2.0, 5.0), steps=1200, batch=64),
    # Paper: one layer of attention only, SGD with momentum 0.99 and learning rate 5e-4.
    "agreement": Preset(
        optimizer="sgd",
        momentum=0.99,
        rates=(5e-4, 1e-3, 2e-3, 4e-3),
        ratios=(1.0, 5.0, 20.0),
        steps=1000,
        batch=64,
        published_ratios=(100.0, 100.0),
        published=(("r = 1", 92.43, 41.67, 0.24), ("faster QK", 93.41, 76.85, 0.30)),
    ),
    # Paper: SGD with learning rate 1e-2, which stays at its initial loss for about 12,000 steps (FAFO). A rate of 1
    # follows the same trajectory in a hundredth of the steps.
    "synthetic": Preset(optimizer="sgd", rates=(1.0, 0.3), ratios=(1.0, 5.0, 20.0), steps=2000, batch=32),
    # Paper: one layer, width 64, four heads, a feed-forward width of 256, no norm, AdamW with learning rate 5e-5.
    "hatexplain": Preset(
        optimizer="adamw",
        rates=(3e-4, 1e-3),
        ratios=(1.0, 5.0, 20.0),
        steps=800,
        batch=64,
        published_ratios=(30.0, 30.0),
        published=(("r = 1", 55.74, 0.00, 0.40), ("faster QK", 56.90, 43.50, 0.48)),
    ),
    # Paper: six layers of width 300, and arms that differ in more than r.
    "squad": Preset(
        optimizer="adamw",
        rates=(1e-3, 3e-3),
        ratios=(1.0, 5.0, 20.0),
        steps=2000,
        batch=32,
        clip=1.0,
        published=(("r = 1", 56.11, 12.65, 0.38), ("faster QK", 56.86, 42.95, 0.53)),
    ),
    # A form of SQuAD that small models learn.
    "squad-entities": Preset(
        optimizer="adamw", rates=(5e-4, 1e-3, 2e-3), ratios=(1.0, 5.0, 20.0), steps=1500, batch=64, clip=1.0
    ),
    # No rationales: for comparisons of accuracy.
    "sst2": Preset(optimizer="adamw", rates=(5e-4, 1e-3, 2e-3), ratios=(1.0, 5.0), steps=1000, batch=64, clip=1.0),
}


def preset_for(task: TaskConfig) -> Preset:
    """The preset of a task; the built-in grammar of agreement has its own.

    >>> preset_for(TaskConfig()).ratios
    (1.0, 2.0, 5.0)
    """
    return PRESETS["grammar" if _is_built_in(task) else task.name]


def sharpen_spec(
    data: TaskConfig,
    *,
    arms: Sequence[str] | None = None,
    ratios: Sequence[float] | None = None,
    growths: Sequence[float] = (),
    published: bool = False,
    rates: Sequence[float] | None = None,
    seeds: int = SEEDS,
    steps: int | None = None,
    batch: int | None = None,
    mechanism: str = "standard",
    form: Form = "FAFO",
    rationale: RationaleSpec | None = None,
    jobs: int | None = None,
) -> ExperimentSpec:
    """An experiment on whether faster query-key learning sharpens attention on a task.

    There is one arm per ratio, one per growth (r grows linearly from 1) and, if `published`, one with the ratios of the
    published code, which speeds up embeddings, too. None takes the value of the task's preset. `arms` are compared
    instead of ratios, if given.

    >>> sharpen_spec(TaskConfig(), ratios=(1.0, 20.0), growths=(40.0,)).arms
    ('standard:r=1', 'standard:r=20', 'standard:r=1,growth=40')
    """
    preset = preset_for(data)
    if arms is None:
        arms = _ratio_arms(data, preset, ratios, tuple(growths), published=published, mechanism=mechanism, form=form)
    refuse_duplicate_arms(arms)
    learning_rates = preset.rates if rates is None else tuple(rates)
    steps = preset.steps if steps is None else steps
    model = model_for(data, open_task(data), mechanism=mechanism, form=form)
    base = replace(
        task_defaults(data=data, model=model, steps=steps, lr=learning_rates[0]),
        batch=preset.batch if batch is None else batch,
        optimizer=preset.optimizer,
        momentum=preset.momentum,
        clip=preset.clip,
        evaluate_every=steps,
        checkpoint_every=None,
        checkpoint_minutes=1.0,
    )
    return ExperimentSpec(
        data=data,
        arms=tuple(arms),
        seeds=seeds,
        learning_rates=learning_rates,
        jobs=jobs,
        base=base,
        rationale=rationale or RationaleSpec(),
    )


def model_for(data: TaskConfig, task: Task, *, mechanism: str, form: Form) -> ModelConfig:
    """The model for a task."""
    words, classes = len(task.words), len(task.classes)
    match data.name:
        case "synthetic":
            # With the published start of 1e-6, a product of two matrices hardly moves for small r.
            start = 0.1 if form.startswith("FA") else 1e-6
            return OneLayerConfig(vocabulary=words, form=form, start=start)
        case "squad":
            return DecoderConfig(width=128, layers=2, heads=4, hidden=344, vocabulary=words, mechanism=mechanism)
        case "hatexplain":
            shape = ClassifierConfig(width=64, layers=1, heads=4, hidden=168, classes=classes)
            return replace(shape, vocabulary=words, mechanism=mechanism)
        case "squad-entities" | "sst2":
            shape = ClassifierConfig(width=64, layers=2, heads=4, hidden=168, norm=True, classes=classes)
            return replace(shape, vocabulary=words, mechanism=mechanism)
        case "agreement":
            heads = 2 if mechanism.startswith("differential") else 1  # differential heads come in pairs
            shape = ClassifierConfig(width=64, layers=1, heads=heads, classes=classes)
            qk_start = 0.1 if _is_built_in(data) else 1.0
            return replace(shape, vocabulary=words, mechanism=mechanism, qk_start=qk_start)


def _ratio_arms(
    data: TaskConfig,
    preset: Preset,
    ratios: Sequence[float] | None,
    growths: tuple[float, ...],
    *,
    published: bool,
    mechanism: str,
    form: Form,
) -> tuple[str, ...]:
    """One arm per ratio and per growth, and one with the published ratios."""
    ratios = preset.ratios if ratios is None else tuple(ratios)
    _check(data, ratios, growths, published=published, mechanism=mechanism, form=form)
    options = [f"r={r:g}" for r in ratios] + [f"r=1,growth={r:g}" for r in growths]
    if published:
        if preset.published_ratios is None:
            raise UsageError(
                f"the published ratios for {data.name} are unknown: leave out --published, or give --data with "
                "Marvin & Linzen's pairs or HateXplain"
            )
        qk, embeddings = preset.published_ratios
        options.append(f"r={qk:g},embeddings={embeddings:g}")
    separator = "," if ":" in mechanism else ":"
    return tuple(f"{mechanism}{separator}{option}" for option in options)


def _is_built_in(task: TaskConfig) -> bool:
    return task.name == "agreement" and task.data is None


def _check(
    data: TaskConfig,
    ratios: tuple[float, ...],
    growths: tuple[float, ...],
    *,
    published: bool,
    mechanism: str,
    form: Form,
) -> None:
    if any(not 0 < r < math.inf for r in (*ratios, *growths)):
        raise UsageError(f"r must be a finite number above 0, got {', '.join(f'{r:g}' for r in (*ratios, *growths))}")
    for name, values in (("ratios", ratios), ("growth", growths)):
        if len({f"{value:g}" for value in values}) < len(values):
            raise UsageError(f"--{name} has a number twice: give each once")
    if not ratios:
        raise UsageError("the first ratio is the baseline: give --ratios 1,20")
    if 1.0 in growths:
        raise UsageError("r cannot grow from 1 to 1: leave 1 out of --growth")
    if len(ratios) + len(growths) + published < 2:
        raise UsageError("at least two arms are needed: give --ratios 1,20")
    if form not in get_args(Form):
        raise unknown("form", form, get_args(Form))
    if data.name == "synthetic" and mechanism != "standard":
        raise UsageError(
            f"the task synthetic uses the one-layer model of the theory, got mechanism {mechanism!r}: choose a --form, "
            "or another task"
        )
    if data.name != "synthetic" and form != "FAFO":
        raise UsageError(f"--form is for the task synthetic, got {form!r} for {data.name}: leave it out")
    if not parse_arm(mechanism).ratio.is_identity:
        raise UsageError(f"the mechanism {mechanism!r} has a ratio: use --ratios 1,20 or --growth 40")
