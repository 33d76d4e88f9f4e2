"""Test published claims: `qkflow reproduce CLAIM` and `qkflow reproduce --all`.

OUT/
  claims.json              the outcome of each claim that was tested, with its readings
  CLAIM/STUDY/             the studies of each claim; they copy runs that another one has finished
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from qkflow.cli.compare import run_and_present
from qkflow.cli.options import command_line
from qkflow.config import to_dict
from qkflow.experiment.executors.base import Executor
from qkflow.experiment.result import ExperimentResult
from qkflow.experiment.study_dir import holds_study
from qkflow.experiment.summary import read_result
from qkflow.io import write_json
from qkflow.recipes.claims import CLAIMS, Claim
from qkflow.recipes.criteria import ClaimVerdict, Reading
from qkflow.training.run_dir import read_json

FILE = "claims.json"
_NUMBERS = {"times": "{:.2f}", "points": "{:+.1f}", "runs": "{:.0f}"}
"""How numbers are written, by unit."""


def claims_table() -> Table:
    """All claims, by number."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "claim", "what is claimed"):
        table.add_column(column, no_wrap=column == "claim")
    for claim in CLAIMS:
        table.add_row(str(claim.number), claim.name, claim.text)
    return table


def run_claim(
    claim: Claim,
    out: Path,
    *,
    executor: Executor,
    console: Console,
    corpus: str | None = None,
    data_dir: str | None = None,
    budget: float | None = None,
    controls: bool = False,
) -> ClaimVerdict:
    """Run the studies that decide a claim (with `controls`, all of them), print the outcome and add it to claims.json.

    With a budget in seconds, runs are as long as it allows and learning rates are the defaults; such an outcome is not
    comparable with that of the full studies.
    """
    names = [name for name in claim.studies if controls or name in claim.deciding]
    results: dict[str, ExperimentResult] = {}
    for name in names:
        share = None if budget is None else budget / len(names)
        spec = claim.studies[name].spec(data_dir, corpus=corpus, budget=share)
        folder = out / claim.name / name
        console.print(f"\n{claim.name}, {name}: {', '.join(spec.arms)}", highlight=False)
        reuse = [path.parent for path in out.glob("*/*/design.json") if path.parent != folder]
        results[name] = run_and_present(
            spec, folder, executor=executor, console=console, command=command_line(), reuse=reuse
        )
    verdict = claim.criterion(results)
    _record(out, claim, verdict, results)
    console.print(outcome_table(claim, verdict))
    for line in (f"published: {claim.published}; {claim.source}", f"unclear: {claim.unclear}" if claim.unclear else ""):
        if line:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return verdict


def run_all(out: Path, *, executor: Executor, console: Console, data_dir: str | None = None) -> None:
    """Run the studies of every claim, those that decide with the fewest runs first, then the controls."""
    order = sorted(CLAIMS, key=_planned_runs)
    for controls in (False, True):
        for claim in order:
            if controls or not _is_finished(claim, out):
                run_claim(claim, out, executor=executor, console=console, data_dir=data_dir, controls=controls)


def read_outcome(claim: Claim, out: Path) -> ClaimVerdict:
    """The outcome of a claim from the studies in a folder, finished or not."""
    folders = {name: out / claim.name / name for name in claim.studies}
    return claim.criterion({name: read_result(folder) for name, folder in folders.items() if holds_study(folder)})


def outcome_table(claim: Claim, verdict: ClaimVerdict) -> Table:
    """The outcome of a claim, with a row for each quantity that decides it."""
    title = f"\nclaim {claim.number}, {claim.text}: {verdict.outcome}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("measured", "value", "95% interval", "seeds", ""):
        table.add_column(column, justify="left" if column in ("measured", "") else "right")
    for reading in verdict.readings:
        table.add_row(reading.name, *_numbers(reading), str(reading.seeds), reading.outcome)
    return table


def _numbers(reading: Reading) -> tuple[str, str]:
    if reading.value is None:
        return "-", "-"
    number = _NUMBERS.get(reading.unit, "{:+.4f}").format
    if reading.low is None or reading.high is None:
        return number(reading.value), "-"
    return number(reading.value), f"{number(reading.low)} to {number(reading.high)}"


def _planned_runs(claim: Claim) -> int:
    return sum(len(claim.studies[name].arms) * claim.studies[name].seeds for name in claim.deciding)


def _is_finished(claim: Claim, out: Path) -> bool:
    folders = [out / claim.name / name for name in claim.deciding]
    return all(holds_study(folder) and read_result(folder).state.ended is not None for folder in folders)


def _record(out: Path, claim: Claim, verdict: ClaimVerdict, results: Mapping[str, ExperimentResult]) -> None:
    """Write the outcome of this claim into claims.json, beside those of other claims."""
    path = out / FILE
    outcomes = read_json(path) if path.exists() else {}
    studies = {
        name: {
            "data": result.data,
            "digest": result.digest,
            "size": result.size,
            "tokens": result.arms[0].tokens,
            "rows": result.rows(),
        }
        for name, result in results.items()
    }
    record = {"claim": claim.text, "published": claim.published, "verdict": to_dict(verdict), "studies": studies}
    write_json(path, {**outcomes, claim.name: record})
