"""The page of a study: one HTML file that holds everything it needs and asks for nothing.

Three things keep it so. Text of others reaches the page through the template, which escapes it, or as JSON without a
`<` in it. The policy in its head forbids every request, and every script but the two that are named there by their
hash. And the script writes text with `textContent` only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from qkflow.files import write_file
from qkflow.report import figures, palette, rows
from qkflow.report.exhibits import Group, exhibit_groups
from qkflow.report.export import finite
from qkflow.report.gallery import Gallery, gather
from qkflow.report.wording import MISSING, brief, count, fixed, interval, probability, short, signed, visible
from qkflow.study.summary import Comparison, Summary

OWN = "its own spread"
"""What the smallest effect rests on unless said."""
ICONS = {
    "better": ("M10 1.5A8.5 8.5 0 1 0 10.01 1.5Z", "M5.8 10.2 8.8 13.2 14.4 7.2"),
    "worse": ("M2 2H18V18H2Z", "M6.4 6.4 13.6 13.6M13.6 6.4 6.4 13.6"),
    "equivalent": ("M10 .8 18.4 5.4V14.6L10 19.2 1.6 14.6V5.4Z", "M6 8H14M6 12H14"),
    "undecided": (
        "M10 1.5A8.5 8.5 0 1 0 10.01 1.5Z",
        "M7.4 8.2C7.4 4.4 12.8 4.8 12.8 8.2 12.8 10 10 10.2 10 12M10 14.2V14.6",
    ),
}
"""Each verdict's shape and the sign in it, in a box of 20: told apart without colour."""


def write_report(summary: Summary, folder: Path, out: Path, *, runs: Mapping[str, Path]) -> Path:
    """Write the page of the study in `folder` to `out`; `runs` has a finished run of each arm, for its attention maps.

    What is missing (weights, excerpts, whole arms) is said on the page, and the rest is shown.
    """
    gallery = gather([arm.name for arm in summary.arms], folder, runs)
    write_file(out, page(summary, gallery))
    return out


def page(summary: Summary, gallery: Gallery) -> str:
    """The page as text."""
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    scripts = [_script(get_plotlyjs()), _script(_part("page.js"))]
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
        loader=jinja2.FunctionLoader(_part),
    )
    environment.filters |= {
        "breaking": _breaking,
        "pre": _pre,
        "sentence": _sentence,
        "short": short,
        "typeset": typeset,
    }
    trusted = {
        "css": Markup(_part("page.css")),
        "scripts": [Markup(text) for text in scripts],
    }
    tokens = gallery.excerpts[0]["tokens"] if gallery.excerpts else ()
    groups = exhibit_groups(gallery.exhibits, [arm.name for arm in summary.arms], tokens)
    content, drawn = _content(summary, gallery, groups), _data(summary, gallery, groups)
    content["has"] = {name: bool(figure["data"]) for name, figure in drawn["figures"].items()}
    content["has"]["curves"] = bool(drawn["curves"]["tokens-loss"]["data"])
    data = Markup(_json(drawn))
    text = environment.get_template("page.html").render(policy=policy(scripts), data=data, **trusted, **content)
    return text.lstrip()  # what the macros leave before the doctype


def policy(scripts: list[str]) -> str:
    """What the page may do: run the scripts given, style itself, and show pictures it made. It may load nothing.

    >>> policy(["1"]).split("; ")[:2]
    ["default-src 'none'", "script-src 'sha256-a4ayc/80/OGda4BO/1o/V0etpOqiLx1JwB5S3beHW0s='"]
    """
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    rest = "style-src 'unsafe-inline'; img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; {rest}"


def typeset(text: str) -> str:
    """A figure with a true minus sign.

    >>> typeset("-0.5 (-1 to 2)") == "\N{MINUS SIGN}0.5 (\N{MINUS SIGN}1 to 2)"
    True
    """
    return re.sub(r"(?<![\w.])-(?=[\d.])", "\N{MINUS SIGN}", text)


def _content(summary: Summary, gallery: Gallery, groups: list[Group]) -> dict[str, Any]:
    """What the template writes into the page as text."""
    names = [arm.name for arm in summary.arms]
    shown = names[1] if len(names) == 2 else f"{len(names) - 1} arms"
    levels = [item.difference.level for item in summary.comparisons if item.difference is not None]
    return {
        "summary": summary,
        "title": f"{shown} against {summary.baseline} on {summary.corpus}",
        "answer": rows.answer(summary),
        "facts": _facts(summary),
        "verdicts": [_verdict(summary, item) for item in summary.comparisons],
        "standing": _standing(summary),
        "confidence": f"{100 * max(levels):.4g} % " if levels else "",
        "error_rate": f"{100 * summary.error_rate:.3g} %",
        "tables": {
            "losses": rows.losses(summary),
            "differences": rows.differences(summary),
            "spreads": rows.spreads(summary),
            "readings": rows.readings(summary),
            "costs": rows.costs(summary),
            "tuning": rows.tuning(summary),
            "curves": rows.learning(summary),
        },
        "failures": [(arm.name, line) for arm in summary.arms for line in arm.failures],
        "gallery": gallery,
        "groups": groups,
        "keys": [_key(index, name) for index, name in enumerate(names)],
        "icons": ICONS,
        "missing": MISSING,
        "light": palette.LIGHT,
        "dark": palette.DARK,
        "command": shlex.join(summary.command),
        "records": _records(summary, gallery),
    }


def _standing(summary: Summary) -> str:
    """What is missing of the study; nothing where it is whole."""
    failed = sum(len(arm.failures) for arm in summary.arms)
    if summary.finished >= summary.runs:
        return ""
    told = f"{summary.finished} of {summary.runs} runs are finished" + (f", {failed} failed" if failed else "")
    return f"{told}." if summary.finished + failed >= summary.runs else f"{told}: what follows is provisional."


def _facts(summary: Summary) -> list[tuple[str, str]]:
    first = summary.arms[0] if summary.arms else None
    seeds = {len(arm.seeds) for arm in summary.arms}
    told = f"{min(seeds)}" if len(seeds) == 1 else f"{min(seeds, default=0)} to {max(seeds, default=0)}"
    return [
        ("corpus", f"{short(summary.corpus, 60)} ({summary.digest[:12]})"),
        ("size", f"{summary.size}, context {count(summary.context)}"),
        ("tokens a run", MISSING if first is None else brief(first.tokens)),
        ("arms \N{MULTIPLICATION SIGN} seeds", f"{len(summary.arms)} \N{MULTIPLICATION SIGN} {told}"),
        ("runs finished", f"{summary.finished} of {summary.runs}"),
        ("matched in", "parameters and " + summary.match),
        ("margin", f"\N{PLUS-MINUS SIGN}{summary.margin:.4f} bits per byte"),
        ("error rate", f"{100 * summary.error_rate:.3g} % over all arms"),
    ]


def _verdict(summary: Summary, item: Comparison) -> dict[str, Any]:
    """A row of the verdict table, with its interval as positions on a strip 200 wide."""
    verdict, found = rows.verdict_of(summary, item.arm), item.difference
    strip: dict[str, Any] | None = None
    if found is not None:
        known = [other.difference for other in summary.comparisons if other.difference is not None]
        ends = [end for other in known for end in (other.mean, other.low, other.high) if end is not None]
        reach = 1.08 * max(summary.margin, *(abs(end) for end in ends))

        def at(value: float) -> float:
            return round(100 + 96 * value / reach, 2)

        strip = {"mean": at(found.mean), "margin": (at(-summary.margin), at(summary.margin)), "ends": None}
        if found.low is not None and found.high is not None:
            strip["ends"] = (at(found.low), at(found.high))
    return {
        "arm": item.arm,
        "verdict": verdict,
        "strip": strip,
        "mean": MISSING if found is None else signed(found.mean),
        "interval": "no pair of runs" if found is None else interval(found.low, found.high),
        "p": probability(item.p_holm),
        "smallest": MISSING if found is None else fixed(found.smallest),
        "rests_on": found.smallest_rests_on if found is not None and found.smallest_rests_on != OWN else "",
    }


def _key(index: int, name: str) -> dict[str, Any]:
    outline = palette.OUTLINES[palette.marker(index)]
    return {"name": name, "colour": palette.colour(index), "dash": palette.dash(index), "outline": outline}


def _records(summary: Summary, gallery: Gallery) -> list[tuple[str, str]]:
    """Everything on record, as JSON to read."""
    kept = [("Design (design.json)", summary.design), ("Environment (environment.json)", summary.environment)]
    kept += [(f"Config of {short(name, 60)} (config.json)", config) for name, config in gallery.configs.items()]
    return [(title, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)) for title, value in kept]


def _data(summary: Summary, gallery: Gallery, groups: list[Group]) -> dict[str, Any]:
    """What the script draws."""
    drawn = {"forest": figures.forest(summary), "strips": figures.strips(summary), "reach": figures.reach(summary)}
    return {
        "figures": {**drawn, **{f"exhibit-{n}": group.figures[0] for n, group in enumerate(groups)}},
        "curves": figures.curves(summary),
        "exhibits": [group.figures for group in groups],
        "excerpts": gallery.excerpts,
        "maps": [{**arm, "name": visible(arm["name"])} for arm in gallery.arms],
    }


def _json(value: Any) -> str:
    """JSON that can lie inside a script element: no text in it can end the element or begin a comment."""
    text = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _script(text: str) -> str:
    """A script that can lie inside its element; inside a string, the only place for it, `<\\/` is `</`."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _sentence(text: str) -> Any:
    """A sentence with true minus signs, and what stands between backticks as code whose words stay whole."""
    from markupsafe import Markup, escape

    parts = []
    for n, part in enumerate(text.split("`")):
        if n % 2 == 0:
            parts.append(escape(typeset(visible(part))))
            continue
        words = [
            Markup("<span>{}</span>").format(visible(word)) if len(word) < 30 else visible(word)
            for word in part.split(" ")
        ]
        parts.append(Markup("<code>{}</code>").format(Markup(" ").join(words)))
    return Markup("").join(parts)


def _breaking(text: str) -> Any:
    """A name that may be broken after its signs; one of absurd length loses its middle."""
    from markupsafe import Markup, escape

    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[:,=+/_])", short(text, 96)))


def _pre(text: str) -> Any:
    """Lines as they are, each with nothing hidden in it."""
    from markupsafe import Markup, escape

    return Markup("\n").join(escape(visible(line)) for line in text.split("\n"))


def _part(name: str) -> str:
    return resources.files("qkflow.report").joinpath(name).read_text(encoding="utf-8")
