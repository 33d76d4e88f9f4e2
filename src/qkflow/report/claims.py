"""The page of published claims: what was measured for each, and whether it is confirmed."""

from __future__ import annotations

from collections.abc import Mapping

from qkflow.recipes.claims import CLAIMS
from qkflow.recipes.scoreboard import COLUMNS, Record, control_rows, score_rows, summary
from qkflow.report.sections import Note, ReportContent, Section, text_table

_CONTROLS = ("", "study", "difference of", "bits (95% interval)", "seeds", "size", "tokens per run", "verdict")
_NOTE = (
    "Each claim errs in at most 5 % of cases, over its arms and rounds. Superiority is confirmed by “better” and"
    " contradicted by “worse” or “equivalent”; equality and non-inferiority are confirmed by an interval within the"
    " margin and contradicted by one beyond it. Rules and margins were fixed before the runs."
)


def claims_report(records: Mapping[str, Record]) -> ReportContent:
    """The page of the records in claims.json."""
    rows = [tuple(row) for row in score_rows(records)]
    table = text_table(caption="Outcomes", columns=COLUMNS, rows=rows, text_columns=(0, 1, 2, 3, 6))
    sections = [Section(name="claims", title="Claims", nav="Claims", blocks=[table, Note(text=_NOTE)])]
    if controls := list(control_rows(records)):
        control_table = text_table(
            caption="Other studies", columns=_CONTROLS, rows=controls, text_columns=(0, 1, 2, 5, 7)
        )
        sections.append(Section(name="controls", title="Controls and sizes", nav="Controls", blocks=[control_table]))
    return ReportContent(
        kind="claims",
        title=f"{len(rows)} of {len(CLAIMS)} published claims",
        answer=f"{summary(records).capitalize()}.",
        callouts=[],
        facts=[],
        sections=sections,
        arms=[],
        source="published claims",
    )
