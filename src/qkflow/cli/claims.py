"""Test published claims: `qkflow reproduce CLAIM` and `qkflow reproduce --all`.

OUT/
  claims.json              the outcome of each claim that was tested, with everything behind it
  claims.html              the same as a page
  CLAIM/STUDY/             the studies of each claim; they copy runs that another one has finished
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.table import Table

from qkflow.cli.compare import run_and_present
from qkflow.cli.console import Console
from qkflow.cli.options import command_line, print_notices
from qkflow.errors import BusyError, Interrupted, UsageError
from qkflow.experiment.executors.base import Executor
from qkflow.experiment.result import ExperimentResult
from qkflow.experiment.study_dir import holds_study
from qkflow.experiment.summary import read_result
from qkflow.io import write_file, write_json
from qkflow.recipes.claims import CLAIMS, Claim
from qkflow.recipes.criteria import ClaimVerdict, Reading
from qkflow.recipes.scoreboard import claim_record, format_number, summary
from qkflow.report.claims import claims_report
from qkflow.report.html import render
from qkflow.training.run_dir import read_json

FILE, PAGE = "claims.json", "claims.html"


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


def run_all(
    out: Path, *, executor: Executor, console: Console, data_dir: str | None = None, budget: float | None = None
) -> None:
    """Run the studies of every claim, the claim that is nearest to an outcome first, then the controls.

    After `budget` seconds, the study that is running stops. The same call continues it. Claims that cannot be tested,
    such as those whose files are missing, are skipped with a notice; if there are no others, their error is raised.
    """
    skipped: dict[str, UsageError] = {}

    def test(claim: Claim, *, controls: bool) -> None:
        try:
            run_claim(claim, out, executor=executor, console=console, data_dir=data_dir, controls=controls)
        except BusyError:
            raise
        except UsageError as error:
            skipped[claim.name] = error
            print_notices([f"{claim.name} is skipped: {error}"])

    with _stop_after(budget) as is_over:
        while open_claims := [claim for claim in CLAIMS if claim.name not in skipped and not _is_finished(claim, out)]:
            test(min(open_claims, key=lambda claim: _remaining_runs(claim, out)), controls=False)
        for claim in sorted(CLAIMS, key=_planned_runs):
            if claim.name not in skipped and len(claim.studies) > len(claim.deciding):
                test(claim, controls=True)
    if is_over():
        console.print("\nthe budget is spent: the same command continues", highlight=False)
    path = out / FILE
    if path.exists():
        records = read_json(path)
        untested = f"; {missing} not tested yet" if (missing := len(CLAIMS) - len(records)) > 0 else ""
        console.print(f"\n{summary(records)}{untested}; {out / PAGE}", highlight=False, soft_wrap=True)
    elif skipped:
        raise next(iter(skipped.values()))


@contextmanager
def _stop_after(seconds: float | None) -> Iterator[Callable[[], bool]]:
    """Stop the running study after some seconds, and leave the block; the value tells whether that has happened.

    The signal is SIGTERM, on which a study writes its checkpoints: background jobs ignore SIGINT. Between studies, this
    block handles it.
    """
    over = threading.Event()
    if seconds is None:
        yield over.is_set
        return

    def stop() -> None:
        over.set()
        os.kill(os.getpid(), signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        if over.is_set():
            raise Interrupted("the budget is spent")
        signal.signal(number, signal.SIG_DFL)  # a signal from another process
        os.kill(os.getpid(), number)

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), stop)
    timer.daemon = True
    before = signal.signal(signal.SIGTERM, handle)
    timer.start()
    try:
        try:
            yield over.is_set
        finally:
            timer.cancel()
            timer.join()  # its signal arrives while it is handled
    except Interrupted:
        if not over.is_set():
            raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


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
    value = format_number(reading.value, reading.unit)
    if reading.low is None or reading.high is None:
        return value, "-"
    return value, f"{format_number(reading.low, reading.unit)} to {format_number(reading.high, reading.unit)}"


def _planned_runs(claim: Claim) -> int:
    return sum(len(claim.studies[name].arms) * claim.studies[name].seeds for name in claim.deciding)


def _remaining_runs(claim: Claim, out: Path) -> int:
    """About how many runs the deciding studies need for an outcome: those planned, less those finished."""
    folders = {name: out / claim.name / name for name in claim.deciding}
    finished = sum(read_result(folder).finished for folder in folders.values() if holds_study(folder))
    return _planned_runs(claim) - finished


def _is_finished(claim: Claim, out: Path) -> bool:
    """Whether the deciding studies have ended and the outcome is recorded."""
    path = out / FILE
    if not path.exists() or claim.name not in read_json(path):
        return False
    folders = [out / claim.name / name for name in claim.deciding]
    return all(holds_study(folder) and read_result(folder).state.ended is not None for folder in folders)


def _record(out: Path, claim: Claim, verdict: ClaimVerdict, results: Mapping[str, ExperimentResult]) -> None:
    """Write the outcome of this claim into claims.json, beside those of other claims, and the page of all of them.

    Control studies that were run before stay in the record.
    """
    path = out / FILE
    records = read_json(path) if path.exists() else {}
    record = claim_record(claim, verdict, results)
    record["studies"] = {**records.get(claim.name, {}).get("studies", {}), **record["studies"]}
    records = {**records, claim.name: record}
    write_json(path, records)
    write_file(out / PAGE, render(claims_report(records)))
