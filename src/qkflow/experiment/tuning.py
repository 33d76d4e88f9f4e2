"""The choice of a learning rate for each arm, read from the folders of the tuning runs."""

from __future__ import annotations

import math
from pathlib import Path

from qkflow.experiment.design import Design, jobs
from qkflow.io import write_json
from qkflow.training.run_dir import finished


def tried(study: Path, design: Design) -> dict[str, dict[float, float | None]]:
    """For each arm the learning rates it tried, in the order they were given, with the loss they came to.

    None: that run failed, or is not finished. Empty where one learning rate was given.
    """
    found: dict[str, dict[float, float | None]] = {arm.name: {} for arm in design.arms}
    for job in jobs(design):
        if job.kind == "tuning" and job.config is not None:
            result = finished(study / job.folder)
            bits = math.inf if result is None else float(result.metrics["bits_per_byte"])
            found[job.arm][job.config.lr] = bits if math.isfinite(bits) else None
    return found


def rates(study: Path, design: Design) -> dict[str, float]:
    """The learning rate of each arm's runs: the one given, or the best that it tried, the smaller of two alike.

    An arm of which every rate failed is not there. Meaningful once no tuning run is left to be made.
    """
    if not design.tuned:
        return dict.fromkeys((arm.name for arm in design.arms), design.request.learning_rates[0])
    chosen = {}
    for arm, outcomes in tried(study, design).items():
        if ended := [(bits, rate) for rate, bits in outcomes.items() if bits is not None]:
            chosen[arm] = min(ended)[1]
    return chosen


def write_tuning(study: Path, design: Design) -> None:
    """Write tuning.json, for people: it follows from the folders, and is not read again."""
    chosen = rates(study, design)
    table = {}
    for arm, outcomes in tried(study, design).items():
        rows = [{"lr": rate, "bits_per_byte": bits} for rate, bits in outcomes.items()]
        table[arm] = {"chosen": chosen.get(arm), "tried": rows}
    write_json(study / "tuning.json", table)
