"""The Markdown extensions of the documentation: formulas as MathML, and doctests as code blocks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import markdown
import pytest

_SPEC = importlib.util.spec_from_file_location("pages_extensions", Path(__file__).parents[2] / "docs/extensions.py")
assert _SPEC is not None
assert _SPEC.loader is not None
extensions = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(extensions)


def render(text: str) -> str:
    return markdown.markdown(text, extensions=["tables", "pymdownx.superfences", extensions.makeExtension()])


def test_inline_formula_becomes_mathml() -> None:
    html = render("At $x_t^2$, and *then* $\\alpha$.")
    assert html.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline">') == 2
    assert "<em>then</em>" in html
    assert "$" not in html


def test_display_formula_is_in_a_scrollable_box() -> None:
    html = render("Before:\n\n$$S_t = \\sum_s v_s k_s^\\top\n\\qquad o_t = S_t q_t$$\n\nAfter.")
    assert '<div class="mathematics">' in html
    assert 'display="block"' in html
    assert html.endswith("<p>After.</p>")


def test_formulas_in_a_table_keep_their_underscores() -> None:
    html = render("| a | b |\n|---|---|\n| $q_t k_s$ | $v_t w_s$ |")
    assert "<em>" not in html
    assert html.count("<math") == 2


@pytest.mark.parametrize(
    "text",
    [
        "`$x$` in code",
        "it costs $5 and then $6",
        "```sh\necho $HOME $PATH\n```",
        "    $ indented $",
        "a \\$x\\$ b",
    ],
)
def test_other_dollar_signs_are_unchanged(text: str) -> None:
    assert "<math" not in render(text)
    assert "$" in render(text)


def test_latex_commands_in_prose_become_letters_except_in_code() -> None:
    html = render("With \\beta_t = \\frac{1}{T}, k \\cdot x / \\sqrt{k} and \\nabla V; \\unknown.\n\n    \\beta\n")
    assert "With β_t = 1/T, k · x / √k and ∇ V; \\unknown." in html
    assert "<code>\\beta" in html


def test_doctest_becomes_a_code_block() -> None:
    html = render("One sentence.\n\n>>> for x in y:\n...     x\n1\n\nMore.\n\n>>> 2\n2")
    assert "blockquote" not in html
    assert html.count('<div class="highlight">') == 2
    assert "<p>More.</p>" in html


def test_doctest_in_a_fence_is_unchanged() -> None:
    assert render("```pycon\n>>> 1\n1\n```").count("highlight") == 1
