"""What Markdown lacks for these pages: mathematics that needs no script, and doctests in docstrings.

`$...$` and `$$...$$` become MathML while the site is built: browsers draw it themselves. GitHub reads the same text.
Docstrings are written to be read as they are: in a sentence of one, `\\alpha` becomes its letter. Their `>>>` lines
become a block of code, where Markdown would see quotations in quotations.
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
_OTHERWISE = {"cdot": "·", "cos": "cos", "sin": "sin"}
_BLOCK = re.compile(r"^\$\$\s*(.+?)\s*\$\$\s*$", re.DOTALL)


class _Inline(InlineProcessor):
    """`$x$` in a line of text."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # noqa: N802
        return self.md.htmlStash.store(convert(m[1])), m.start(0), m.end(0)


class _Letter(InlineProcessor):
    """`\\alpha` in a line of text; a command that is not known stays as it is."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # noqa: N802
        if m[1] or m[3]:
            return f"{m[1]}/{m[2]}" if m[1] else f"√{m[3]}", m.start(0), m.end(0)
        letter = _OTHERWISE.get(m[4]) or unescape(f"&{m[4]};")  # most have the same name in HTML
        return m[0] if letter.startswith("&") else letter, m.start(0), m.end(0)


class _Block(BlockProcessor):
    """A paragraph that is `$$...$$` and nothing else."""

    def test(self, parent: Element, block: str) -> bool:
        return _BLOCK.match(block) is not None

    def run(self, parent: Element, blocks: list[str]) -> None:
        found = _BLOCK.match(blocks.pop(0))
        if found is not None:
            box = SubElement(parent, "div", {"class": "mathematics"})
            box.text = self.parser.md.htmlStash.store(convert(found[1], display="block"))


class _Doctests(Preprocessor):
    """Runs of lines from `>>>` to the next empty one, fenced."""

    def run(self, lines: list[str]) -> list[str]:
        made: list[str] = []
        fenced = inside = False
        for line in lines:
            fenced ^= line.lstrip().startswith("```")
            if inside and not line.strip():
                made.append("```")
                inside = False
            elif not inside and not fenced and line.startswith(">>> "):
                made.append("```pycon")
                inside = True
            made.append(line)
        return [*made, "```"] if inside else made


class _Pages(Extension):
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        md.inlinePatterns.register(_Inline(_INLINE, md), "mathematics", 185)  # after code, before escapes
        md.inlinePatterns.register(_Letter(_COMMAND, md), "letters", 184)
        md.parser.blockprocessors.register(_Block(md.parser), "mathematics", 75)  # after indented code
        md.preprocessors.register(_Doctests(md), "doctests", 27)  # before fences are taken away


def makeExtension() -> Extension:  # noqa: N802
    """What Markdown asks a module of extensions for."""
    return _Pages()
