"""Markdown extensions for the documentation: formulas without JavaScript, and doctests in docstrings.

`$...$` and `$$...$$` become MathML when the site is built; GitHub renders the same source. In the prose of a docstring,
a LaTeX command such as `\\alpha` becomes its letter. Lines that start with `>>>` become a code block; Markdown would
render them as nested quotations.
"""

from __future__ import annotations

import re
from html import unescape
from xml.etree.ElementTree import Element, SubElement

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor

_INLINE = r"(?<![\\$\w])\$(?![\s$])([^$\n]+?)(?<![\s\\])\$(?![\w$])"
_COMMAND = r"\\(?:frac\{(\w+)\}\{(\w+)\}|sqrt\{(\w+)\}|([A-Za-z]{2,}))"
_LETTERS = {"cdot": "·", "cos": "cos", "sin": "sin"}
_BLOCK = re.compile(r"^\$\$\s*(.+?)\s*\$\$\s*$", re.DOTALL)


class _Inline(InlineProcessor):
    """Inline formulas: `$x$`."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # noqa: N802
        return self.md.htmlStash.store(convert(m[1])), m.start(0), m.end(0)


class _Letter(InlineProcessor):
    """LaTeX commands in prose: `\\alpha`; unknown commands are unchanged."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # noqa: N802
        if m[1] or m[3]:
            return f"{m[1]}/{m[2]}" if m[1] else f"√{m[3]}", m.start(0), m.end(0)
        letter = _LETTERS.get(m[4]) or unescape(f"&{m[4]};")  # most have the same name as an HTML entity
        return m[0] if letter.startswith("&") else letter, m.start(0), m.end(0)


class _Block(BlockProcessor):
    """Display formulas: a paragraph that consists of `$$...$$`."""

    def test(self, parent: Element, block: str) -> bool:
        return _BLOCK.match(block) is not None

    def run(self, parent: Element, blocks: list[str]) -> None:
        match = _BLOCK.match(blocks.pop(0))
        if match is not None:
            box = SubElement(parent, "div", {"class": "mathematics"})
            box.text = self.parser.md.htmlStash.store(convert(match[1], display="block"))


class _Doctests(Preprocessor):
    """Put the lines from `>>>` to the next empty line in a fence."""

    def run(self, lines: list[str]) -> list[str]:
        fenced_lines: list[str] = []
        in_fence = in_doctest = False
        for line in lines:
            in_fence ^= line.lstrip().startswith("```")
            if in_doctest and not line.strip():
                fenced_lines.append("```")
                in_doctest = False
            elif not in_doctest and not in_fence and line.startswith(">>> "):
                fenced_lines.append("```pycon")
                in_doctest = True
            fenced_lines.append(line)
        return [*fenced_lines, "```"] if in_doctest else fenced_lines


class _Pages(Extension):
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        md.inlinePatterns.register(_Inline(_INLINE, md), "mathematics", 185)  # after code, before escapes
        md.inlinePatterns.register(_Letter(_COMMAND, md), "letters", 184)
        md.parser.blockprocessors.register(_Block(md.parser), "mathematics", 75)  # after indented code
        md.preprocessors.register(_Doctests(md), "doctests", 27)  # before fences are extracted


def makeExtension() -> Extension:  # noqa: N802
    """The entry point that Markdown calls."""
    return _Pages()
