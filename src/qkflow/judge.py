"""Verdicts for runs made by anybody with any framework, from a table of their losses.

    arm,seed,loss            one row per run, or one per run and held-out block:
    arm,seed,block,loss,weight

The statistics are those of `qkflow compare` (`qkflow.experiment.stats`), without a prior on the spread over seeds: it
was calibrated on our own runs. Runs of the baseline and of an arm are paired by seed. An arm that shares only some
seeds with the baseline is compared on these, one that shares none by Welch's test.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from qkflow.errors import UsageError, unknown

if TYPE_CHECKING:
    from qkflow.experiment.stats.verdict import Verdict

COLUMNS = ("arm", "seed", "loss", "block", "weight")
_REQUIRED = COLUMNS[:3]
_METRICS = ("bits_per_byte", "eval_loss", "val_loss", "loss")
_SEED_NAME = re.compile(r"(?P<arm>.*?)[-_.]?(?:seed[-_=]?|s)?(?P<seed>\d+)$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdicts on a table of losses."""

    baseline: str
    error_rate: float
    """The rate that adjusted p values are compared with: the share of this look."""
    margin: float
    """The equivalence margin, in the unit of the losses."""
    is_higher_better: bool
    verdicts: tuple[Verdict, ...]
    """One per arm but the baseline, in the order of the table."""
    losses: Mapping[str, Mapping[str, float]]
    """The loss of each run by arm and seed: the weighted mean over blocks."""
    blocks: int
    """Held-out blocks per run; 1 if the table has none."""
    notices: tuple[str, ...]
    """What a reader must know: how the baseline was chosen, arms that are not paired, runs that were left out."""

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, as `qkflow judge --json` prints it."""
        return {
            "baseline": self.baseline,
            "error_rate": self.error_rate,
            "verdicts": [
                {
                    "arm": verdict.arm,
                    "verdict": verdict.kind,
                    "difference": None if verdict.difference is None else verdict.difference.mean,
                    "low": None if verdict.difference is None else verdict.difference.low,
                    "high": None if verdict.difference is None else verdict.difference.high,
                    "p_adjusted": verdict.p_adjusted,
                    "paired": verdict.paired,
                    "seeds": 0 if verdict.difference is None else verdict.difference.seeds,
                    "seeds_needed": verdict.seeds_needed,
                }
                for verdict in self.verdicts
            ],
        }


def judge(
    table: Any,
    *,
    baseline: str | None = None,
    margin: float | None = None,
    margin_absolute: float | None = None,
    higher_is_better: bool = False,
    look: int | None = None,
    error_rate: float = 0.05,
) -> Judgement:
    """Judge every arm of a table against the baseline.

    Args:
        table: Rows with the columns `arm`, `seed`, `loss` and optionally `block` and `weight`: a list of dictionaries
            or tuples, a data frame (pandas or polars), a dictionary of columns, the path of a CSV file, or a folder of
            runs with `metrics.jsonl`.
        baseline: The arm to compare with; by default `standard` if there is one, else the first arm.
        margin: Differences within this fraction of the baseline's mean are equivalent; by default 0.005.
        margin_absolute: The same in the unit of the losses.
        higher_is_better: Whether the numbers are scores, such as accuracies, and not losses.
        look: If the table grows and is judged several times, the number of this time, counted from 1. Every look spends
            half of the error rate that is left. None: the table is judged once.
        error_rate: The chance of a false better or worse over all arms (and looks).

    >>> rows = [("standard", s, 2.50 + 0.01 * s) for s in range(4)] + [("mine", s, 2.41 + 0.01 * s) for s in range(4)]
    >>> rows[-1] = ("mine", 3, 2.442)
    >>> result = judge(rows)
    >>> result.verdicts[0].kind, result.verdicts[0].sentence
    ('better', 'better by 0.0895 (3.6%), 95% interval 0.0879 to 0.0911, 4 seeds')
    """
    from qkflow.experiment.stats.rounds import MARGIN, Rule
    from qkflow.experiment.stats.verdict import judge_round

    if margin is not None and margin_absolute is not None:
        raise UsageError("got both a relative and an absolute margin: give one of them")
    for name, value in (("margin", margin), ("margin-absolute", margin_absolute)):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"the {name} must be a number above 0, got {value}")
    if look is not None and look < 1:
        raise UsageError(f"looks are counted from 1, got {look}")
    losses = read_losses(table)
    notices = list(losses.notices)
    base = _choose_baseline(losses, baseline, notices)
    share = 1.0 if look is None else 0.5**look
    rule = Rule(
        error_rate=error_rate,
        margin=MARGIN if margin is None else margin,
        seeds_by_round=(2,) if look is None else (2, 3),
        spending=(share,) if look is None else (share, share / 2),
    )
    by_run = {
        arm: {seed: float(run.sum() / losses.weights.sum()) for seed, run in runs.items()}
        for arm, runs in losses.runs.items()
    }
    mean = float(np.mean(list(by_run[base].values())))
    if margin_absolute is None and mean == 0:
        raise UsageError("the baseline's mean is 0, so a relative margin is 0: give an absolute margin")
    bits = margin_absolute if margin_absolute is not None else rule.margin * abs(mean)
    verdicts = judge_round(
        losses.runs,
        losses.weights,
        baseline=base,
        rule=rule,
        round=1,
        unit=None,
        scale=1.0,
        margin=bits,
        is_higher_better=higher_is_better,
        may_be_unpaired=True,
        resolution=losses.resolution,
    )
    notices += [notice for verdict in verdicts if (notice := _pairing_notice(verdict, base, by_run))]
    return Judgement(
        baseline=base,
        error_rate=error_rate * share,
        margin=bits,
        is_higher_better=higher_is_better,
        verdicts=verdicts,
        losses=by_run,
        blocks=len(losses.weights),
        notices=tuple(notices),
    )


class LossTable(NamedTuple):
    """The losses of a table, checked."""

    runs: dict[str, dict[str, np.ndarray]]
    """For each arm and seed, the loss of each block times its weight."""
    weights: np.ndarray
    """One per block."""
    resolution: float
    """The unit of the last digit of a run's loss."""
    notices: tuple[str, ...] = ()


def read_losses(table: Any) -> LossTable:
    """Read and check a table in any of the forms that `judge` takes."""
    if isinstance(table, str | Path):
        path = Path(table)
        if path.is_dir():
            return _read_folder(path)
        return _arrange(_read_csv(path))
    return _arrange(_records(table))


def _choose_baseline(losses: LossTable, baseline: str | None, notices: list[str]) -> str:
    arms = list(losses.runs)
    if baseline is not None and baseline.strip() not in losses.runs:
        raise unknown("baseline", baseline.strip(), arms)
    if len(arms) < 2:
        raise UsageError(f"the table has a single arm, {arms[0]!r}: expected at least two arms to compare")
    chosen = baseline.strip() if baseline is not None else "standard" if "standard" in arms else arms[0]
    if baseline is None:
        why = "" if chosen == "standard" else ", the first arm of the table"
        notices.append(f"the baseline is {chosen}{why}")
    counts = {arm: len(runs) for arm, runs in losses.runs.items()}
    if counts[chosen] < 2 or max(count for arm, count in counts.items() if arm != chosen) < 2:
        alone = chosen if counts[chosen] < 2 else next(arm for arm in arms if arm != chosen)
        raise UsageError(f"{alone} has one seed, which has no spread: expected at least 2 seeds of every arm")
    return chosen


def _pairing_notice(verdict: Verdict, baseline: str, losses: Mapping[str, Mapping[str, float]]) -> str | None:
    if verdict.paired == "unpaired":
        return f"{verdict.arm} and {baseline} share fewer than 2 seeds: compared without pairs (Welch's test)"
    if verdict.paired == "partly":
        seeds = losses[verdict.arm].keys()
        pairs = len(seeds & losses[baseline].keys())
        return f"{verdict.arm} has {pairs} of its {len(seeds)} seeds in common with {baseline}: only these count"
    return None


# Rows.


class _Row(NamedTuple):
    """One row of the table, with its position for error messages."""

    where: str
    arm: Any
    seed: Any
    loss: Any
    block: Any = None
    weight: Any = None


def _arrange(rows: Iterable[_Row]) -> LossTable:
    """Check the rows, and arrange their losses by arm, seed and block."""
    cells: dict[str, dict[str, dict[str, float]]] = {}
    origins: dict[tuple[str, str, str], str] = {}
    weights: dict[str, float] = {}
    last_digit = math.inf
    has_rows = False
    for row in rows:
        has_rows = True
        arm, seed = _name(row, "arm"), _name(row, "seed")
        block = "" if row.block is None else _name(row, "block")
        loss, weight = _number(row, "loss"), 1.0 if row.weight is None else _number(row, "weight")
        if weight < 0:
            raise UsageError(f"{row.where}: the weight {weight:g} is negative: expected 0 or more")
        key = (arm, seed, block)
        if key in origins:
            what = f"arm {arm}, seed {seed}" + (f", block {block}" if block else "")
            raise UsageError(f"{row.where}: {what} stands in {origins[key]} already: give every run once")
        if weights.setdefault(block, weight) != weight:
            raise UsageError(f"{row.where}: block {block} has the weight {weight:g}, and {weights[block]:g} before")
        origins[key] = row.where
        last_digit = min(last_digit, _last_digit(row.loss))
        cells.setdefault(arm, {}).setdefault(seed, {})[block] = loss
    if not has_rows:
        raise UsageError("the table has no rows: expected one per run, with the columns arm, seed and loss")
    blocks = list(weights)
    for arm, runs in cells.items():
        for seed, run in runs.items():
            if missing := [block for block in blocks if block not in run]:
                raise UsageError(
                    f"arm {arm}, seed {seed} has no block {missing[0]}: expected the same {len(blocks)} blocks in "
                    "every run"
                )
    total = np.array([weights[block] for block in blocks])
    if not total.sum() > 0:
        raise UsageError("all weights are 0: expected at least one above 0")
    runs = {
        arm: {seed: total * [run[block] for block in blocks] for seed, run in by_seed.items()}
        for arm, by_seed in cells.items()
    }
    return LossTable(runs, total, last_digit * float(np.sqrt(np.square(total).sum()) / total.sum()))


def _name(row: _Row, column: str) -> str:
    value = getattr(row, column)
    text = "" if value is None else str(value).strip()
    if not text or (isinstance(value, float) and math.isnan(value)):
        raise UsageError(f"{row.where}: the {column} is empty")
    return text


def _number(row: _Row, column: str) -> float:
    value = getattr(row, column)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{row.where}: the {column} is {value!r}, expected a number") from None
    if not math.isfinite(number):
        raise UsageError(f"{row.where}: the {column} is {number}: leave out runs that failed")
    return number


def _last_digit(loss: Any) -> float:
    """The unit of the last digit of a number, as it is written.

    >>> _last_digit("2.50"), _last_digit(91), _last_digit(" 1e-3 ")
    (0.01, 1.0, 0.001)
    """
    text = loss.strip() if isinstance(loss, str) else repr(float(loss)).removesuffix(".0")
    try:
        exponent = Decimal(text).as_tuple().exponent
    except InvalidOperation:
        return 0.0
    return 10.0**exponent if isinstance(exponent, int) else 0.0


def _columns(header: Sequence[str], where: str) -> dict[str, int]:
    """The position of each column that is used."""
    names = [str(name).strip().casefold() for name in header]
    if missing := [name for name in _REQUIRED if name not in names]:
        raise UsageError(
            f"{where}: no column {' or '.join(map(repr, missing))}, got {', '.join(names) or 'none'}: expected "
            "arm, seed and loss, and optionally block and weight"
        )
    for name in COLUMNS:
        if names.count(name) > 1:
            raise UsageError(f"{where}: two columns are called {name!r}: remove or rename one")
    if "weight" in names and "block" not in names:
        raise UsageError(f"{where}: a column 'weight' without a column 'block': a weight is the weight of a block")
    return {name: names.index(name) for name in COLUMNS if name in names}


def _read_csv(path: Path) -> Iterable[_Row]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: give a CSV file or a folder of runs") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as text ({error}): expected a CSV file in UTF-8") from None
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    try:
        lines = [(reader.line_num, fields) for fields in reader if any(field.strip() for field in fields)]
    except csv.Error as error:
        raise UsageError(f"{path}, line {reader.line_num}: not a CSV file ({error})") from None
    if not lines:
        raise UsageError(f"{path} is empty: expected a header and one row per run")
    header = lines[0][1]
    if len(header) == 1 and (other := next((mark for mark in ";\t|" if mark in header[0]), None)):
        raise UsageError(f"{path}: columns are separated by {other!r}: expected commas")
    columns = _columns(header, str(path))
    for number, fields in lines[1:]:
        where = f"{path}, line {number}"
        if len(fields) != len(header):
            raise UsageError(f"{where}: got {len(fields)} fields, expected {len(header)} as in the header")
        yield _Row(where, **{name: fields[index] for name, index in columns.items()})


def _records(table: Any) -> Iterable[_Row]:
    """The rows of a data frame, a dictionary of columns, or a sequence of dictionaries or tuples."""
    if hasattr(table, "to_dicts"):  # polars
        table = table.to_dicts()
    elif hasattr(table, "to_dict") and hasattr(table, "columns"):  # pandas
        table = table.to_dict("records")
    elif isinstance(table, Mapping):
        names, lists = list(table), [list(column) for column in table.values()]
        if len({len(column) for column in lists}) > 1:
            raise UsageError("the columns of the table have different lengths")
        table = [dict(zip(names, values, strict=True)) for values in zip(*lists, strict=True)]
    try:
        rows = list(table)
    except TypeError:
        raise UsageError(f"got a {type(table).__name__}: expected rows, a data frame, a CSV file or a folder") from None
    for number, row in enumerate(rows, 1):
        where = f"row {number}"
        if isinstance(row, Mapping):
            columns = _columns(list(row), where)
            values = list(row.values())
            yield _Row(where, **{name: values[index] for name, index in columns.items()})
        elif isinstance(row, Sequence) and not isinstance(row, str) and len(row) in (3, 4, 5):
            yield _Row(where, **dict(zip(COLUMNS, row, strict=False)))
        else:
            raise UsageError(f"{where}: expected a dictionary, or (arm, seed, loss), got {row!r}")


# Folders of runs.


def _read_folder(folder: Path) -> LossTable:
    """The last evaluation of every run below a folder, with the losses of its documents where all runs have them.

    The run folder gives the arm and the seed: `ARM/seed-3`, `ARM/3`, `ARM-seed-3`, `ARM_s3` or `ARM-3`.
    """
    root = folder / "runs" if (folder / "runs").is_dir() else folder
    files = sorted(root.rglob("metrics.jsonl"))
    if not files:
        raise UsageError(f"{folder} has no runs: expected folders with metrics.jsonl, or give a CSV file")
    runs = [_read_run(root, path) for path in files]
    notices = []
    longest: dict[str, float] = {}
    for run in runs:
        longest[run.row.arm] = max(longest.get(run.row.arm, -math.inf), run.step)
    complete = [run for run in runs if run.step == longest[run.row.arm]]
    if left_out := [run for run in runs if run.step < longest[run.row.arm]]:
        names = ", ".join(f"{run.row.arm} seed {run.row.seed}" for run in left_out)
        notices.append(f"left out, because other runs of the arm are longer: {names}")
    documents = [run.documents for run in complete]
    first = documents[0]
    if first is not None and all(d is not None and np.array_equal(d["bytes"], first["bytes"]) for d in documents):
        rows = [
            run.row._replace(loss=nats / math.log(2) / size if size else 0.0, block=str(n), weight=size)
            for run in complete
            if run.documents is not None
            for n, (nats, size) in enumerate(zip(run.documents["nats"].tolist(), first["bytes"].tolist(), strict=True))
        ]
    else:
        rows = [run.row for run in complete]
    table = _arrange(rows)
    return table._replace(notices=tuple(notices))


class _RunFolder(NamedTuple):
    row: _Row
    step: float
    documents: np.ndarray | None


def _read_run(root: Path, path: Path) -> _RunFolder:
    run = path.parent
    names = run.relative_to(root).parts
    match = _SEED_NAME.fullmatch(names[-1]) if names else None
    arm = "/".join(filter(None, (*names[:-1], match["arm"]))) if match else ""
    if match is None or not arm:
        raise UsageError(f"{run}: cannot tell the arm and the seed: name run folders ARM/seed-0, ARM/seed-1, ...")
    loss = step = None
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line) if line.strip() else {}
            if record.get("kind", "eval") != "train" and (key := next((m for m in _METRICS if m in record), None)):
                loss, step = record[key], record.get("step", 0)
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} cannot be read as JSON lines ({error})") from None
    if loss is None:
        raise UsageError(f"{path} has no evaluation: expected a line with one of {', '.join(_METRICS)}")
    return _RunFolder(_Row(str(path), arm, match["seed"], loss), float(step or 0), _read_documents(run))


def _read_documents(run: Path) -> np.ndarray | None:
    """The losses of the held-out documents of a qkflow run; None if there are none."""
    path = run / "documents.npy"
    if not path.exists():
        return None
    try:
        documents = np.load(path, allow_pickle=False)
        return documents if {"nats", "bytes"} <= set(documents.dtype.names or ()) else None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}): remove it to use metrics.jsonl") from None
