"""Every block of code in README.md and docs/ is run or checked; one test a page, in the order of the page.

| fence                   | what happens to it                                                                        |
|-------------------------|-------------------------------------------------------------------------------------------|
| python                  | run, all blocks of a page in one namespace, in a temporary folder, warnings are errors    |
| python title="src/FILE" | a quotation: found in src/FILE word for word; a line of three dots leaves lines out       |
| pycon                   | a doctest                                                                                 |
| sh                      | commands, checked; on index.md and in howto/ `qkflow` is run for real, in the same folder |
| console                 | lines after `$ ` are commands, checked and never run                                      |
| toml, json              | parsed                                                                                    |
| text, none              | output and drawings: no line may look like a command, but `srun`, whose own is checked    |

Any other fence fails, and so does code that is indented or marked up instead of fenced: nothing slips past. What stands
`like this` in a sentence is checked by test_words.py; how commands are checked is said in conftest.py.
"""

from __future__ import annotations

import doctest
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from qkflow import cli

pytestmark = pytest.mark.usefixtures("workplace")

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = {"docs/index.md", *(f"docs/howto/{path.name}" for path in (ROOT / "docs/howto").glob("*.md"))}
COMPILED = {"add_a_mechanism.md"}  # it compiles a graph, which shape checks at run time would break


Check = Callable[[list[str], str], None]


class Block(NamedTuple):
    """A fenced block, and the line of its fence."""

    kind: str
    title: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page; code that is only indented is an error."""
    fence, inside, empty = None, [], True
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if fence is not None:
            if line.strip() == "```":
                yield Block(*fence[:2], "\n".join(inside) + "\n", fence[2])
                fence = None
            else:
                inside.append(line)
            continue
        if found := re.fullmatch(r"```(\w*)(?: title=\"([^\"]*)\")?", line):
            fence, inside = (found[1], found[2] or "", number), []
        elif re.search(r"```|~~~|<pre|<code", line) or (empty and re.match(r" *\t|    ", line)):
            pytest.fail(f"{page.name}:{number}: code must stand between fences of its own, at the left: {line!r}")
        empty = not line.strip()
    assert fence is None, f"{page.name}: the fence at line {fence[2]} is never closed"


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.compiled if page.name in COMPILED else ()) for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_block_runs_or_says_what_is_there(page: Path, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    judge(page, str(page.relative_to(ROOT)), check, monkeypatch)


def judge(page: Path, name: str, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go through a page by the rules at the head of this file."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        where = f"{name}:{block.line}"
        match block.kind:
            case "python" if block.title:
                assert block.title.startswith("src/"), f"{where}: what is no quotation of src/ has no title, and is run"
                assert quoted(block.text, (ROOT / block.title).read_text()), f"{where}: {block.title} has it otherwise"
            case "python":
                exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
            case "pycon":
                test = doctest.DocTestParser().get_doctest(block.text, names, where, name, block.line)
                assert doctest.DocTestRunner().run(test, clear_globs=False).failed == 0, where
            case "sh" | "console":
                for words in commands(block):
                    check(words, where)
                    if block.kind == "sh" and name in RUN and words[0] == "qkflow":
                        monkeypatch.setattr(sys, "argv", words)
                        assert cli.main(words[1:]) == 0, f"{where}: {shlex.join(words)}"
            case "toml" | "json":
                (tomllib if block.kind == "toml" else json).loads(block.text)
            case "" | "text":
                assert not re.search(r"^\s*(\$|qkflow|python|pip|make|torchrun|>>>) ", block.text, re.MULTILINE), (
                    f"{where}: commands belong into a block of sh or console"
                )
                for words in commands(block):
                    if words[0] == "srun":
                        check(words[1:], where)
            case other:
                pytest.fail(f"{where}: no rule for blocks of {other!r}: see the head of this file")


def quoted(text: str, source: str) -> bool:
    """Whether all parts of a quotation stand in the source, in this order."""
    place = 0
    for part in re.split(r"^ *\.\.\.\n", text, flags=re.MULTILINE):
        found = source.find(part, place)
        if found < 0 or not part.strip():
            return False
        place = found + len(part)
    return True


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command, without remarks and variables that are set for it."""
    text = block.text
    if block.kind == "console":
        text = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
        assert text, f"line {block.line}: a block of console has at least one line that begins with $"
    for line in re.sub(r"\$\([^)]*\)", "it", text.replace("\\\n", "")).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # an apostrophe of a sentence in a drawing
            assert block.kind not in ("sh", "console"), line
            continue
        while words and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", words[0]):
            words.pop(0)
        if words:
            yield words


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("```sh\nqkflow train --sizes 100k\n```", "does not understand"),
        ("```sh\nqkflow compare my.txt --arms standard,couplet\n```", "unknown mechanism 'couplet'"),
        ("```console\n$ qkflow check standard --law causalty\n```", "causalty"),
        ("```sh\nqkflow reproduce coupled-61m\n```", "unknown recipe 'coupled-61m'"),
        ("```sh\nqkflow train mqar:pears=4\n```", "pears"),
        ("```sh\ntorchrun --nproc-per-mode 2 -m qkflow train\n```", "torchrun does not understand"),
        ("```sh\ntorchrun -m qkflow train --stepps 2\n```", "does not understand"),
        ("```sh\npython benchmarks/flow.py pathss\n```", "flow.py pathss"),
        ("```sh\npython benchmarks/floww.py\n```", "there is no benchmarks/floww.py"),
        ("```sh\nmake teste\n```", "Makefile has no"),
        ("```sh\npip install 'qkflow[hff]'\n```", "there are no extras"),
        ("```sh\ncurl example.org\n```", "no rule for 'curl'"),
        ("```\n$ qkflow train\n```", "belong into a block"),
        ("```rust\nfn main() {}\n```", "no rule for blocks of 'rust'"),
        ("Text:\n\n    qkflow train\n", "between fences"),
        ("```sh\nqkflow train\n", "never closed"),
        ('```python title="src/qkflow/ops/coupled.py"\ndef leapfrog(k, q):\n```', "has it otherwise"),
        ('```python title="docs/index.md"\n1 / 0\n```', "has no title"),
        ('```python title="src/qkflow/ops/coupled.py"\n...\n```', "has it otherwise"),
        ("~~~python\n1 / 0\n~~~", "between fences"),
        ("<pre>qkflow train</pre>", "between fences"),
        ("Text:\n\n\tqkflow train\n", "between fences"),
        ("```text\nsrun torchrun --nnodes 2 -m qkflow train \\\n  --stepps 3\n```", "does not understand"),
        ("```python\n1 / 0\n```", "division by zero"),
        ("```python\nimport warnings\nwarnings.warn('old')\n```", "old"),
        ("```pycon\n>>> 1 + 1\n3\n```", "page.md:3"),
        ("```toml\na = \n```", "Invalid value"),
    ],
)
def test_a_block_that_is_wrong_is_found(
    text: str, told: str, tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.md").write_text(f"# Title\n\n{text}\n")
    with pytest.raises((Exception, pytest.fail.Exception), match=told):
        judge(tmp_path / "page.md", "page.md", check, monkeypatch)
