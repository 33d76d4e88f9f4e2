"""A task's accuracies in words and tables, once: the page and the terminal show the same ones."""

from __future__ import annotations

from qkflow.experiment.metrics.recall import AccuracySummary, ArmRecall, RecallSummary, SeedMean
from qkflow.report.rows import Table
from qkflow.report.wording import MISSING, fixed, interval, signed

AXES = {"pairs": "number of pairs", "length": "length in tokens", "depth": "depth of the needle in %"}
"""What the axes of a grid are called in a figure."""
ALIKE = "="
"""Stands for an interval where all seeds are alike."""
_RARE = 1e-6
"""Chances below this are not told apart."""
_PLACES = {"pairs": "{} pairs", "length": "{} tokens", "depth": "{} % deep"}


def place(axis: str, value: int) -> str:
    """A place of an axis in words.

    >>> place("pairs", 8), place("length", 2048), place("depth", 25), place("pairs", 1)
    ('8 pairs', '2,048 tokens', '25 % deep', '1 pair')
    """
    told = _PLACES[axis].format(f"{value:,}")
    return told.removesuffix("s") if value == 1 else told


def accuracies(recall: RecallSummary) -> Table:
    """Each arm over all cells, and along the first axis."""
    rows = [(one.arm, *(_share(item.accuracy) for item in (one.overall, *one.along))) for one in recall.arms]
    return Table(caption=f"Accuracy on the test instances, % ({how(recall)})", columns=_columns(recall), rows=(*rows,))


def differences(recall: RecallSummary) -> Table:
    """Each arm minus the baseline, over all cells and along the first axis."""
    rows = [(one.arm, *(_apart(item.difference) for item in (one.overall, *one.along))) for one in recall.arms[1:]]
    caption = f"Accuracy minus the baseline's of the same seed, percentage points ({how(recall)})"
    return Table(caption=caption, columns=_columns(recall), rows=(*rows,))


def every_cell(recall: RecallSummary) -> Table:
    """Each arm in each cell, seed by seed."""
    rows = []
    for one in recall.arms:
        for cell, found in zip(recall.cells, one.cells, strict=True):
            where = [f"{cell.at(axis):,}" for axis in recall.axes]
            each = [] if found.accuracy is None else [percent(value) for value in found.accuracy.values]
            told = ", ".join(each) or MISSING
            rows.append((one.arm, *where, _share(found.accuracy), _apart(found.difference), told))
    columns = ("arm", *(AXES[axis] for axis in recall.axes), "accuracy, %", "minus the baseline's", "each seed, %")
    return Table(caption=f"Every cell of the test grid ({how(recall)})", columns=columns, rows=(*rows,))


def told(recall: RecallSummary, arm: str) -> str:
    """How often an arm is right, beside the baseline, in a sentence; empty where nothing is known of it."""
    one = next((found for found in recall.arms if found.arm == arm), None)
    if one is None or one.overall.accuracy is None:
        return ""
    text = f"Accuracy {percent(one.overall.accuracy.mean)} %"
    if (apart := one.overall.difference) is None:
        return f"{text}."
    baseline, points = recall.arms[0].arm, 100 * apart.mean
    way = f"{percent(abs(apart.mean))} points {'above' if points > 0 else 'below'}"
    text += f", {way if abs(points) >= 0.05 else 'the same as'} {baseline}'s"
    ends = "one seed, no interval"
    if _alike(apart):
        ends = f"alike in all {len(apart.seeds)} seeds"
    elif apart.low is not None:
        ends = f"{how(recall)} {_ends(apart, sign=True)}; {len(apart.seeds)} seeds"
    return f"{text} ({ends})."


def chance(recall: RecallSummary) -> str:
    """What guessing comes to, in a sentence."""
    part = f"{100 * recall.chance:.2g} %" if recall.chance >= _RARE else f"less than {100 * _RARE:.2g} %"
    return f"A guess among the possible answers is right {part} of the time."


def percent(part: float, digits: int = 1) -> str:
    """A part in per cent, without the sign.

    >>> percent(0.98123)
    '98.1'
    """
    return fixed(100 * part, digits)


def with_half(reading: AccuracySummary) -> str:
    """An accuracy in per cent with half its interval's width, as short as can be; `=` where all seeds are alike.

    >>> from qkflow.experiment.metrics.recall import seed_mean
    >>> with_half(AccuracySummary(accuracy=seed_mean({0: 0.9, 1: 0.91}, least=0.0), difference=None))
    '90.5±6.4'
    >>> with_half(AccuracySummary(accuracy=seed_mean({0: 0.0, 1: 0.0}, least=0.0), difference=None))
    '0.0 ='
    """
    found = reading.accuracy
    if found is None:
        return MISSING
    if _alike(found):  # which does not say that another seed would be
        return f"{percent(found.mean)} {ALIKE}"
    half = "" if found.half is None else f"±{percent(min(found.half, 1.0))}"
    return f"{percent(found.mean)}{half}"


def known(one: ArmRecall) -> bool:
    """Whether an arm has answered anything."""
    return one.overall.accuracy is not None


def _columns(recall: RecallSummary) -> tuple[str, ...]:
    return ("arm", "mean of all cells", *(place(recall.axes[0], value) for value in recall.places))


def how(recall: RecallSummary) -> str:
    """What the intervals are."""
    return f"{100 * recall.level:.4g} % interval"


def _share(found: SeedMean | None) -> str:
    return MISSING if found is None else percent(found.mean) + _around(found, sign=False)


def _apart(found: SeedMean | None) -> str:
    return MISSING if found is None else signed(100 * found.mean, 1) + _around(found, sign=True)


def _around(found: SeedMean, *, sign: bool) -> str:
    if found.low is None:
        return ""
    return " (all alike)" if _alike(found) else f" ({_ends(found, sign=sign)})"


def _alike(found: SeedMean) -> bool:
    return found.half is not None and found.half < 1e-9


def _ends(found: SeedMean, *, sign: bool) -> str:
    low, high = (None if end is None else 100 * end for end in (found.low, found.high))
    return interval(low, high, 1, sign=sign)
