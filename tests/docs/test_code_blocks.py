"""Every code block in README.md, CONTRIBUTING.md and docs/ is run or checked; one test per page, in page order.

| fence                   | check                                                                                     |
|-------------------------|-------------------------------------------------------------------------------------------|
| python                  | run; the blocks of a page share a namespace and a temporary directory; warnings are errors |
| python title="src/FILE" | a quotation: found in src/FILE verbatim; a line of three dots stands for omitted lines    |
| pycon                   | run as a doctest                                                                          |
| sh                      | commands are checked; `qkflow` commands of index.md and howto/ are also run               |
| console                 | lines after `$ ` are commands: checked, not run; other lines are output                   |
| toml, json              | parsed                                                                                    |
| text, none              | output and drawings: no line may look like a command, except `srun`, which is checked     |

Any other fence fails, as does code that is indented or marked up in another way. test_inline_code.py checks
`inline code`; conftest.py says how commands are checked.
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

pytestmark = pytest.mark.usefixtures("workdir")

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES_WITH_COMMANDS_TO_RUN = {"docs/index.md", *(f"docs/howto/{page.name}" for page in ROOT.glob("docs/howto/*.md"))}
COMPILED_PAGES = {"add_a_mechanism.md"}  # runtime shape checks would break its compiled graph

CheckCommand = Callable[[list[str], str], None]


class Block(NamedTuple):
    """A fenced block and the line of its opening fence."""

    kind: str
    title: str
    text: str
    line: int


def read_blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page; indented code is an error."""
    opening, content, after_empty_line = None, [], True
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if opening is not None:
            if line.strip() == "```":
                yield Block(*opening[:2], "\n".join(content) + "\n", opening[2])
                opening = None
            else:
                content.append(line)
            continue
        if match := re.fullmatch(r"```(\w*)(?: title=\"([^\"]*)\")?", line):
            opening, content = (match[1], match[2] or "", number), []
        elif re.search(r"```|~~~|<pre|<code", line) or (after_empty_line and re.match(r" *\t|    ", line)):
            pytest.fail(f"{page.name}:{number}: put code in a fenced block that starts at the left margin: {line!r}")
        after_empty_line = not line.strip()
    assert opening is None, f"{page.name}: the fence at line {opening[2]} is not closed"


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.compiled if page.name in COMPILED_PAGES else ()) for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_code_blocks(page: Path, check_command: CheckCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    check_page(page, str(page.relative_to(ROOT)), check_command, monkeypatch)


def check_page(page: Path, name: str, check_command: CheckCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply the table in the docstring of this file to a page."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in read_blocks(page):
        where = f"{name}:{block.line}"
        match block.kind:
            case "python" if block.title:
                assert block.title.startswith("src/"), f"{where}: only quotations of src/ have a title"
                assert is_quotation(block.text, (ROOT / block.title).read_text()), f"{where}: not in {block.title}"
            case "python":
                exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
            case "pycon":
                test = doctest.DocTestParser().get_doctest(block.text, namespace, where, name, block.line)
                assert doctest.DocTestRunner().run(test, clear_globs=False).failed == 0, where
            case "sh" | "console":
                for words in read_commands(block):
                    check_command(words, where)
                    if block.kind == "sh" and name in PAGES_WITH_COMMANDS_TO_RUN and words[0] == "qkflow":
                        monkeypatch.setattr(sys, "argv", words)
                        assert cli.main(words[1:]) == 0, f"{where}: {shlex.join(words)}"
            case "toml" | "json":
                (tomllib if block.kind == "toml" else json).loads(block.text)
            case "" | "text":
                assert not re.search(r"^\s*(\$|qkflow|python|pip|make|torchrun|>>>) ", block.text, re.MULTILINE), (
                    f"{where}: put commands in a block of sh or console"
                )
                for words in read_commands(block):
                    if words[0] == "srun":
                        check_command(words[1:], where)
            case kind:
                pytest.fail(f"{where}: no rule for blocks of {kind!r}; see the docstring of this file")


def is_quotation(text: str, source: str) -> bool:
    """Whether the parts of a quotation are in the source, in this order."""
    start = 0
    for part in re.split(r"^ *\.\.\.\n", text, flags=re.MULTILINE):
        index = source.find(part, start)
        if index < 0 or not part.strip():
            return False
        start = index + len(part)
    return True


def read_commands(block: Block) -> Iterator[list[str]]:
    """The words of each command, without comments and environment variables."""
    text = block.text.replace("\\\n", "")
    if block.kind == "console":
        text = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
        assert text, f"line {block.line}: a console block needs a line that starts with $"
    for line in re.sub(r"\$\([^)]*\)", "it", text).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # an apostrophe in a drawing
            assert block.kind not in ("sh", "console"), line
            continue
        while words and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", words[0]):
            words.pop(0)
        if words:
            yield words


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```sh\nqkflow train --sizes 100k\n```", "does not accept"),
        ("```sh\nqkflow compare my.txt --arms standard,couplet\n```", "couplet"),
        ("```console\n$ qkflow compare my.txt \\\n    --arm standard\n```", "does not accept"),
        ("```console\n$ qkflow check standard --law causalty\n```", "causalty"),
        ("```sh\nqkflow reproduce coupled-61m\n```", "coupled-61m"),
        ("```sh\nqkflow train mqar:pears=4\n```", "pears"),
        ("```sh\ntorchrun --nproc-per-mode 2 -m qkflow train\n```", "torchrun does not accept"),
        ("```sh\ntorchrun -m qkflow train --stepps 2\n```", "does not accept"),
        ("```sh\npython benchmarks/flow.py pathss\n```", "flow.py pathss"),
        ("```sh\npython benchmarks/floww.py\n```", "benchmarks/floww.py not found"),
        ("```sh\nmake teste\n```", "no target"),
        ("```sh\npip install 'qkflow[hff]'\n```", "unknown extras"),
        ("```sh\ncurl example.org\n```", "no rule for 'curl'"),
        ("```\n$ qkflow train\n```", "put commands in a block"),
        ("```rust\nfn main() {}\n```", "no rule for blocks of 'rust'"),
        ("Text:\n\n    qkflow train\n", "fenced block"),
        ("```sh\nqkflow train\n", "not closed"),
        ('```python title="src/qkflow/errors.py"\nclass NoSuchError(Exception):\n```', "not in"),
        ('```python title="docs/index.md"\n1 / 0\n```', "only quotations"),
        ('```python title="src/qkflow/errors.py"\n...\n```', "not in"),
        ("~~~python\n1 / 0\n~~~", "fenced block"),
        ("<pre>qkflow train</pre>", "fenced block"),
        ("Text:\n\n\tqkflow train\n", "fenced block"),
        ("```text\nsrun torchrun --nnodes 2 -m qkflow train \\\n  --stepps 3\n```", "does not accept"),
        ("```python\n1 / 0\n```", "division by zero"),
        ("```python\nimport warnings\nwarnings.warn('old')\n```", "old"),
        ("```pycon\n>>> 1 + 1\n3\n```", "page.md:3"),
        ("```toml\na = \n```", "Invalid value"),
    ],
)
def test_wrong_block_fails(
    text: str, message: str, tmp_path: Path, check_command: CheckCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.md").write_text(f"# Title\n\n{text}\n")
    with pytest.raises((Exception, pytest.fail.Exception), match=message):
        check_page(tmp_path / "page.md", "page.md", check_command, monkeypatch)
