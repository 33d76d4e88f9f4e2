"""What the pages' Markdown has besides: formulas that browsers draw, and doctests of docstrings as code."""

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


def html(text: str) -> str:
    return markdown.markdown(text, extensions=["tables", "pymdownx.superfences", extensions.makeExtension()])


def test_a_formula_in_a_line_becomes_mathml() -> None:
    made = html("At $x_t^2$, and *then* $\\alpha$.")
    assert made.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline">') == 2
    assert "<em>then</em>" in made
    assert "$" not in made


def test_a_formula_of_its_own_stands_in_a_box_that_can_scroll() -> None:
    made = html("Before:\n\n$$S_t = \\sum_s v_s k_s^\\top\n\\qquad o_t = S_t q_t$$\n\nAfter.")
    assert '<div class="mathematics">' in made
    assert 'display="block"' in made
    assert made.endswith("<p>After.</p>")


def test_underscores_of_a_formula_are_no_emphasis_and_a_table_may_hold_one() -> None:
    made = html("| a | b |\n|---|---|\n| $q_t k_s$ | $v_t w_s$ |")
    assert "<em>" not in made
    assert made.count("<math") == 2


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
def test_a_dollar_that_is_none_of_a_formula_stays(text: str) -> None:
    assert "<math" not in html(text)
    assert "$" in html(text)


def test_commands_in_a_sentence_become_letters_and_those_in_code_or_unknown_stay() -> None:
    made = html("With \\beta_t = \\frac{1}{T}, k \\cdot x / \\sqrt{k} and \\nabla V; \\unheard.\n\n    \\beta\n")
    assert "With β_t = 1/T, k · x / √k and ∇ V; \\unheard." in made
    assert "<code>\\beta" in made


def test_a_doctest_is_code_and_not_a_quotation_in_a_quotation() -> None:
    made = html("One sentence.\n\n>>> for x in y:\n...     x\n1\n\nMore.\n\n>>> 2\n2")
    assert "blockquote" not in made
    assert made.count('<div class="highlight">') == 2
    assert "<p>More.</p>" in made


def test_a_doctest_inside_a_fence_stays_inside() -> None:
    assert html("```pycon\n>>> 1\n1\n```").count("highlight") == 1
