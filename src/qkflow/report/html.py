"""Render a report as one self-contained HTML page: no network requests, and no text that becomes markup.

Untrusted text reaches the page through the template, which escapes it, or as JSON without `<`. The content security
policy forbids every request, and every script except the two that it lists by their hash. The script writes text with
`textContent` only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from qkflow.experiment.metrics.rationale import RationaleSummary
from qkflow.experiment.result import ExperimentResult
from qkflow.experiment.summary import example_runs
from qkflow.formatting import escape_unprintable, shorten
from qkflow.io import write_file
from qkflow.report import palette
from qkflow.report.attention_maps import load_maps
from qkflow.report.export import finite
from qkflow.report.sections import Figure, FigureGrid, MapViewer, ReportContent, Table
from qkflow.report.study import build_report

ICONS = {
    "better": ("M10 1.5A8.5 8.5 0 1 0 10.01 1.5Z", "M5.8 10.2 8.8 13.2 14.4 7.2"),
    "worse": ("M2 2H18V18H2Z", "M6.4 6.4 13.6 13.6M13.6 6.4 6.4 13.6"),
    "equivalent": ("M10 .8 18.4 5.4V14.6L10 19.2 1.6 14.6V5.4Z", "M6 8H14M6 12H14"),
    "undecided": (
        "M10 1.5A8.5 8.5 0 1 0 10.01 1.5Z",
        "M7.4 8.2C7.4 4.4 12.8 4.8 12.8 8.2 12.8 10 10 10.2 10 12M10 14.2V14.6",
    ),
}
"""The outline and the sign of each verdict, in a box of 20: they differ without colours."""


def write_report(
    result: ExperimentResult | RationaleSummary, path: Path, *, runs: Mapping[str, Path] | None = None
) -> Path:
    """Write the page of a study, finished or not; `runs` has one run folder per arm, for attention maps.

    By default these are the first finished runs in the study folder. The page lists what is missing.
    """
    maps = None
    if isinstance(result, ExperimentResult):
        folder = Path(result.folder)
        maps = load_maps([arm.name for arm in result.arms], folder, example_runs(folder) if runs is None else runs)
    write_file(path, render(build_report(result, maps)))
    return path


def render(report: ReportContent) -> str:
    """The page of a report."""
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    scripts = [_script(get_plotlyjs()), _script(_template("page.js"))]
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: escape_unprintable(value) if type(value) is str else value,
        loader=jinja2.FunctionLoader(_template),
    )
    environment.filters |= {
        "breakable": _breakable,
        "json": _pretty_json,
        "minus": minus_signs,
        "sentence": _sentence,
        "shorten": shorten,
        "strip": _strip,
    }
    arms = [  # the colour, dash and marker of each arm, for the buttons that show and hide them
        {
            "name": name,
            "color": palette.arm_color(n),
            "dash": palette.arm_dash(n).removeprefix("solid"),
            "outline": palette.OUTLINES[palette.arm_marker(n)],
        }
        for n, name in enumerate(report.arms)
    ]
    return environment.get_template("page.html").render(
        report=report,
        policy=policy(scripts),
        css=Markup(_template("page.css")),
        scripts=[Markup(text) for text in scripts],
        data=Markup(_embedded_json(_script_data(report))),
        icons=ICONS,
        light=palette.LIGHT,
        dark=palette.DARK,
        arms=arms,
    )


def policy(scripts: list[str]) -> str:
    """The content security policy: run these scripts, apply inline styles, show inline images; load nothing.

    >>> policy(["1"]).split("; ")[:2]
    ["default-src 'none'", "script-src 'sha256-a4ayc/80/OGda4BO/1o/V0etpOqiLx1JwB5S3beHW0s='"]
    """
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    rest = "style-src 'unsafe-inline'; img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; {rest}"


def minus_signs(text: str) -> str:
    """Replace the hyphen before a number by a minus sign.

    >>> minus_signs("-0.5 (-1 to 2)") == "\N{MINUS SIGN}0.5 (\N{MINUS SIGN}1 to 2)"
    True
    """
    return re.sub(r"(?<![\w.])-(?=[\d.])", "\N{MINUS SIGN}", text)


def _script_data(report: ReportContent) -> dict[str, Any]:
    """What the script draws: the variants of every figure, and the attention maps."""
    blocks = report.blocks()
    figures = [block for block in blocks if isinstance(block, Figure)]
    figures += [figure for block in blocks if isinstance(block, FigureGrid) for figure in block.figures]
    data: dict[str, Any] = {
        "figures": {figure.name: list(figure.charts.values()) for figure in figures if figure.has_data},
        "maps": [],
        "excerpts": [],
    }
    for block in blocks:
        if isinstance(block, MapViewer):
            data["maps"] = [{**arm, "name": shorten(arm["name"], 60)} for arm in block.maps.arms]
            data["excerpts"] = block.maps.excerpts
            data["token"] = block.token
    return data


def _strip(table: Table, values: tuple[float | None, ...]) -> dict[str, Any] | None:
    """Positions of an estimate, its interval and the margin on a strip that is 200 wide; None without an estimate."""
    if (estimate := values[0]) is None:
        return None
    drawn = [values for row in table.rows for column, values in table.cells(row) if column.style == "interval"]
    ends = [abs(value) for values in drawn for value in values if isinstance(value, int | float)]
    reach = 1.08 * max(table.margin, *ends) or 1.0
    low, middle, high = (
        None if value is None else round(100 + 96 * value / reach, 2) for value in (*values[1:2], estimate, *values[2:])
    )
    return {"mean": middle, "low": low, "high": high, "margin": round(96 * table.margin / reach, 2)}


def _embedded_json(value: Any) -> str:
    """JSON inside a script element: no text in it can end the element or begin a comment."""
    text = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _script(text: str) -> str:
    """A script inside its element: `</script` and `<!--` occur only in strings, where `\\` changes nothing."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _sentence(text: str) -> Any:
    """Text with minus signs, and code between backticks; short words of code are not broken."""
    from markupsafe import Markup, escape

    parts = []
    for n, part in enumerate(text.split("`")):
        if n % 2 == 0:
            parts.append(escape(minus_signs(escape_unprintable(part))))
            continue
        words = [
            Markup("<span>{}</span>").format(escape_unprintable(word)) if len(word) < 30 else escape_unprintable(word)
            for word in part.split(" ")
        ]
        parts.append(Markup("<code>{}</code>").format(Markup(" ").join(words)))
    return Markup("").join(parts)


def _breakable(text: str) -> Any:
    """A name with line breaks allowed after its punctuation; very long names lose their middle."""
    from markupsafe import Markup, escape

    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[:,=+/_])", shorten(text, 96)))


def _pretty_json(value: Any) -> Any:
    from markupsafe import Markup, escape

    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, default=str)
    return Markup("\n").join(escape(escape_unprintable(line)) for line in text.split("\n"))


def _template(name: str) -> str:
    return resources.files("qkflow.report").joinpath("templates", name).read_text(encoding="utf-8")
