"""Fill in docs/results/claims.md and the results of README.md from docs/results/data/claims.json.

`--add FOLDER` first adds the outcomes that `qkflow reproduce --out FOLDER` found.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from qkflow.cli.claims import FILE
from qkflow.recipes.claims import CLAIMS, LONG, Claim
from qkflow.recipes.scoreboard import OUTCOMES, Record, control_rows, format_reading, gap_rows, score_rows, summary

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs/results/data/claims.json"
PAGES = ("docs/results/claims.md", "README.md")
README = {
    "coupled-better": "coupled attention beats standard attention",
    "hamiltonian-equals-euler": "Hamiltonian and Euler couplings are equal",
    "uncoupled-between": "the uncoupled control lies between coupled and standard attention",
    "uncoupled-variance": "the uncoupled control varies more than coupled attention",
    "steps-equal": "one, three and seven coupling steps are equal",
    "coupled-seconds": "coupled attention is level at equal training time",
    "coupled-text": "coupled attention helps on coherent text only",
    "coupled-glue": "coupled attention makes no difference on GLUE",
    "mass-grows": "attention mass on relevant tokens grows with r",
    "confidence-up": "higher r raises attention confidence",
    "comprehensiveness-up": "higher r raises comprehensiveness",
    "factorised-collapsed": "factorised training equals collapsed training",
    "qdelta-better": "Q-Delta beats Gated DeltaNet",
    "qdelta-needles": "Q-Delta finds needles better than Gated DeltaNet",
    "learned-lambda": "a learned lambda beats fixed ones",
    "qdelta-stable": "Q-Delta trains stably",
    "kuramoto-close": "Kuramoto attention is within 0.02 bits of standard attention",
    "frustrated-better": "frustrated Kuramoto attention beats standard attention",
}
"""The claims in README.md, in a few words."""
_MARKED = re.compile(r"(<!-- claims: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(page: str, records: Mapping[str, Record]) -> str:
    """Replace the content of every marked table of a page."""
    tables = {"scoreboard": scoreboard, "controls": controls, "gaps": gaps, "summary": short_summary, "arms": arms}

    def replacement(match: re.Match[str]) -> str:
        opening, name, end = match.groups()
        return f"{opening}\n{tables[name](records)}\n\n{end}"

    return _MARKED.sub(replacement, page)


def scoreboard(records: Mapping[str, Record]) -> str:
    """One row per claim; claims without runs are named as such."""
    rows = {row.number: row for row in score_rows(records)}
    header = ["", "claim", "published", "measured here (95% interval)", "seeds", "tokens per run", "outcome", "command"]
    lines = []
    for claim in CLAIMS:
        row, command = rows.get(str(claim.number)), f"`qkflow reproduce {claim.name}`"
        text = f"[{claim.text}](#{claim.name})" if row else claim.text
        cells = (row.measured, row.seeds, row.tokens, f"**{row.outcome}**") if row else ("", "", "", "not yet run")
        lines.append([str(claim.number), text, claim.published, *cells, command])
    return f"{summary(records).capitalize()}, {len(CLAIMS) - len(rows)} not yet run.\n\n{markdown([header, *lines])}"


def short_summary(records: Mapping[str, Record]) -> str:
    """The list of README.md: for each outcome its claims, with the first measured quantity."""
    lists = []
    for outcome in OUTCOMES:
        items = [short(claim.name, records[claim.name]) for claim in CLAIMS if has_outcome(claim, records, outcome)]
        lists += ["\n".join([f"{outcome.capitalize()}:", "", *items])] if items else []
    return "\n\n".join(lists)


def has_outcome(claim: Claim, records: Mapping[str, Record], outcome: str) -> bool:
    """Whether the runs of a claim gave this outcome."""
    return claim.name in records and records[claim.name]["verdict"]["outcome"] == outcome


def short(name: str, record: Record) -> str:
    """A claim in a few words, linked to its details, and the first measured quantity without its name."""
    readings = record["verdict"]["readings"]
    measured = f": {format_reading(readings[0]).rpartition(': ')[2]}" if readings else ""
    return f"- [{README[name]}](docs/results/claims.md#{name}){measured}"


def controls(records: Mapping[str, Record]) -> str:
    """The studies that do not decide a claim."""
    header = ["claim", "study", "difference of", "bits (95% interval)", "seeds", "size", "tokens per run", "verdict"]
    lines = [list(row) for row in control_rows(records)]
    return markdown([header, *lines]) if lines else "Not yet run."


def gaps(records: Mapping[str, Record]) -> str:
    """How far Kuramoto attention is from standard attention, over the tokens of the longest runs."""
    study = next((r["studies"][LONG] for r in records.values() if LONG in r["studies"]), None)
    if study is None:
        return "Not yet run."
    header = ["training tokens", *(f"`{arm['arm']}`" for arm in study["arms"][1:])]
    lines = [[f"{tokens:,}", *(f"{gap:+.4f}" for gap in values)] for tokens, values in gap_rows(study)]
    return markdown([header, *lines])


def arms(records: Mapping[str, Record]) -> str:
    """For each claim, what every arm of its studies was trained with and reached."""
    parts = []
    for claim in CLAIMS:
        if (record := records.get(claim.name)) is None:
            continue
        parts += [f"### {claim.name}", "", f"Claim {claim.number}: {claim.text}. Source: {claim.source}.", ""]
        if claim.unclear:
            parts += [f"Unclear in the paper: {claim.unclear}.", ""]
        parts += [f"- {format_reading(reading)}: {reading['outcome']}" for reading in record["verdict"]["readings"]]
        header = ["study", "arm", "learning rate", "trials", "seeds", "mean"]
        lines = [
            [
                f"{name} ({study['data']})",
                f"`{arm['arm']}`",
                f"{arm['learning_rate']:g}",
                str(len(arm["tuning"])),
                str(len(arm["seeds"])),
                _mean(arm),
            ]
            for name, study in record["studies"].items()
            for arm in study["arms"]
        ]
        parts += ["", markdown([header, *lines]), ""]
    return "\n".join(parts).strip()


def _mean(arm: Record) -> str:
    """The mean loss in bits, or the means of a task's metrics."""
    if losses := arm.get("losses"):
        return f"{sum(losses) / len(losses):.4f} bits"
    names = {"performance": "accuracy", "mass": "mass on the rationale", "comprehensiveness": "comprehensiveness"}
    values = {label: arm[key] for key, label in names.items() if arm.get(key)}
    return ", ".join(f"{label} {sum(numbers) / len(numbers):.3f}" for label, numbers in values.items())


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first row is the header."""
    header, *lines = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *lines))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--add", metavar="FOLDER", help="folder of `qkflow reproduce --out`, whose outcomes are added")
    folder: str | None = parser.parse_args().add
    records: dict[str, Record] = json.loads(DATA.read_text()) if DATA.exists() else {}
    if folder:
        records = {**records, **json.loads((Path(folder) / FILE).read_text())}
        DATA.write_text(json.dumps(records, indent=1) + "\n")
    for name in PAGES:
        page = (ROOT / name).read_text()
        (ROOT / name).write_text(fill(page, records))


if __name__ == "__main__":
    main()
