"""What every page of ours is made in: one HTML file that holds everything it needs and asks for nothing.

Three things keep it so. Text of others reaches a page through its template, which escapes it, or as JSON without a `<`
in it. The policy in its head forbids every request, and every script but the two that are named there by their hash.
And the script writes text with `textContent` only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from qkflow.report import palette
from qkflow.report.export import finite
from qkflow.report.wording import short, visible

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


def render(template: str, content: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """A page as text: `content` is what its template writes, `data` what the script draws."""
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
    environment.globals |= {
        "policy": policy(scripts),
        "css": Markup(_part("page.css")),
        "scripts": [Markup(text) for text in scripts],
        "data": Markup(_json(data)),
        "icons": ICONS,
        "light": palette.LIGHT,
        "dark": palette.DARK,
    }
    return environment.get_template(template).render(content)


def policy(scripts: list[str]) -> str:
    """What a page may do: run the scripts given, style itself, and show pictures it made. It may load nothing.

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


def key(index: int, name: str) -> dict[str, Any]:
    """An arm's name with its colour, dash and marker, for a button that hides it."""
    outline = palette.OUTLINES[palette.marker(index)]
    return {"name": name, "colour": palette.colour(index), "dash": palette.dash(index), "outline": outline}


def standing(finished: int, runs: int, failed: int = 0) -> str:
    """What is missing of a study; nothing where it is whole.

    >>> standing(3, 4)
    '3 of 4 runs are finished: what follows is provisional.'
    """
    if finished >= runs:
        return ""
    told = f"{finished} of {runs} runs are finished" + (f", {failed} failed" if failed else "")
    return f"{told}." if finished + failed >= runs else f"{told}: what follows is provisional."


def record(title: str, value: Any) -> tuple[str, str]:
    """Something on record, as JSON to read under its title."""
    return title, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, default=str)


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
