"""What stands `like this` in a sentence or a table of README.md and docs/ is there: nothing is named that was renamed.

| a word                     | what is asked of it                                                                     |
|----------------------------|-----------------------------------------------------------------------------------------|
| `qkflow ...`, `python ...` | a command like those in blocks; CAPITALS stand for what the reader has                  |
| `--flag`, `--flag value`   | a flag of a command (or of torchrun, or of a benchmark) that may have this value        |
| `src/...`, `examples/...`  | a file or a folder                                                                      |
| `qkflow.name`, `name(...)` | importable; arguments fit the signature                                                 |
| `standard:key=value`       | a mechanism                                                                             |
| `QKFLOW_NAME`              | a variable that the source reads                                                        |

A table of options names every option of its config, with its default.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from torch.distributed.run import get_args_parser

import qkflow
from qkflow import cli, probes
from qkflow.data import MQAR, Needle
from qkflow.experiment.arm import parse_arm
from qkflow.mechanisms import mechanism, mechanisms
from qkflow.recipes import RECIPES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MECHANISM = rf"({'|'.join(mechanisms())})[+:]\w"
Check = Callable[[list[str], str], None]


def words(text: str) -> Iterator[str]:
    """What stands between single backquotes outside of fenced blocks, on one line."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (" ".join(word.split()) for word in re.findall(r"`([^`]+)`", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_word_names_what_is_there(page: Path, check: Check) -> None:
    for word in words(page.read_text()):
        there(word, f"{page.name}: {word}", check)


def there(word: str, where: str, check: Check) -> None:
    """Fail if what a word names is not there."""
    if re.match(r"(qkflow|python|make|pip|torchrun) ", word):
        command(shlex.split(word), where, check)
    elif word.startswith("--"):
        flags(word.split(), where)
    elif re.fullmatch(r"(src|tests|examples|benchmarks|docs|tools)/[\w./-]*", word):
        assert (ROOT / word).exists(), where
    elif word.startswith("QKFLOW_"):
        assert re.search(rf"\b{word.partition('=')[0]}\b", source()), where
    elif re.match(MECHANISM, word):
        mechanism(parse_arm(word)[0])
    elif re.fullmatch(r"(with )?qkflow(\.\w+)+(\(.*\))?|\w+\(.*\)", word):
        name(word.removeprefix("with "), where)


def command(given: list[str], where: str, check: Check) -> None:
    """A whole command, or one that is only mentioned: by its name, by a flag whose value is left out or CAPITALS."""
    if given[0] == "python" and given[1] != "-m":
        assert (ROOT / given[1]).is_file(), where
        return flags(given[2:], where)
    if given[0] != "qkflow":
        return check(given, where)
    if given[1].startswith("--"):
        assert given[1:] == ["--help"], where
        return None
    fields = {field.name for field in dataclasses.fields(cli.COMMANDS[given[1]])}
    asked = [word for word in given[2:] if word.startswith("--") and word != "--help"]
    assert {word[2:].replace("-", "_") for word in asked} <= fields, where
    if given[2:] and not given[-1].startswith("--") and not any(re.fullmatch("[A-Z]+", word) for word in given):
        check(given, where)
    return None


def flags(given: list[str], where: str) -> None:
    """Flags, each perhaps with a value, of whichever command has them."""
    for flag, value in zip(given, [*given, "--"][1:], strict=True):
        if not flag.startswith("--"):
            continue
        hints = [get_type_hints(command) for command in cli.COMMANDS.values()]
        kinds = [hint[name] for hint in hints if (name := flag[2:].replace("-", "_")) in hint]
        assert kinds or flag in others(), where
        if kinds and not value.startswith("--") and not value.isupper():
            assert any(value in taken(kind) or str in taken(kind) for kind in kinds), where


def taken(kind: Any) -> set[Any]:
    """What a type is made of: the values of a Literal, and plain types, however deep they lie."""
    inner = get_args(kind)
    return {kind}.union(*map(taken, inner)) if inner else {kind}


@cache
def others() -> set[str]:
    """Flags of torchrun and of the benchmarks."""
    theirs = {option for action in get_args_parser()._actions for option in action.option_strings}
    return theirs.union(*(re.findall(r"\"(--[\w-]+)\"", path.read_text()) for path in ROOT.glob("benchmarks/*.py")))


@cache
def source() -> str:
    """All of the package, as text."""
    return "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))


def name(word: str, where: str) -> None:
    """A name with its whole path; or a call of a public function, by it or by its path, whose arguments fit."""
    path, _, call = word.partition("(")
    first, *rest = path.split(".")
    found = qkflow if rest else next((vars(place)[first] for place in (qkflow, probes) if first in vars(place)), None)
    for number, part in enumerate(rest):  # a function may have the name of its module
        found = getattr(found, part, None) or import_module(".".join((first, *rest[: number + 1])))
    if not call or "..." in call or not callable(found):
        return
    made = ast.parse(word, mode="eval").body
    assert isinstance(made, ast.Call), where
    given = {str(keyword.arg): 0 for keyword in made.keywords}
    try:
        inspect.signature(found).bind(*made.args, **given)
    except TypeError as error:
        pytest.fail(f"{where}: {error}")


OPTIONS: dict[str, tuple[type[Any], ...]] = {
    "coupled.md": (qkflow.CouplingConfig,),
    "kuramoto.md": (qkflow.KuramotoConfig,),
    "qdelta.md": (qkflow.QDeltaConfig,),
    "recall.md": (MQAR, Needle),
    "standard.md": (qkflow.StandardConfig, qkflow.DifferentialConfig),
}
"""The configs whose options a page has a table of."""
NAMED = {"dynamics", "kind"}
"""Options that are part of a mechanism's or a task's name."""


@pytest.mark.parametrize("page", OPTIONS)
def test_a_table_of_options_has_all_of_them_with_their_defaults(page: str) -> None:
    told = dict(options((ROOT / "docs" / page).read_text()))
    for config in OPTIONS[page]:
        for field in dataclasses.fields(config):
            assert field.name in {*told, *NAMED}, f"{page} does not tell {field.name} of {config.__name__}"
            if field.name in told and isinstance(field.default, bool | int | float | str | tuple):
                assert written(field.default) in told[field.name], f"{page}: {field.name} is {field.default}"
    fields = {field.name for config in OPTIONS[page] for field in dataclasses.fields(config)} | {"heads"}
    assert {*told} <= fields, f"{page} tells of options that are not there: {sorted({*told} - fields)}"


def options(text: str) -> Iterator[tuple[str, set[str]]]:
    """The options of a page's tables, and what stands in the column of defaults for each, in any of the tables."""
    told: dict[str, set[str]] = {}
    for table in re.findall(r"^\| option.*\n(?:\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table.splitlines())
        for row in rows:
            names = re.findall(r"`(\w+)`", row[0])
            defaults = re.split(", ", row[head.index("default")].replace("`", ""))
            for number, each in enumerate(names):
                some = defaults if len(names) == 1 else [defaults[min(number, len(defaults) - 1)]]
                told.setdefault(each, set()).update(some)
    yield from told.items()


def written(value: Any) -> str:
    """A default as a page writes it."""
    if isinstance(value, tuple):
        return "+".join(str(each) for each in value)
    return f"{value:,.15g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def test_every_recipe_is_on_its_page() -> None:
    rows = re.findall(r"^\| `([\w.-]+)` \|", (ROOT / "docs/reproduce.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(RECIPES)


def test_every_section_of_a_report_is_explained_in_its_order() -> None:
    page = (ROOT / "src/qkflow/report/page.html").read_text()
    navigation = page.partition("{% block content %}")[0]
    sections = re.findall(r"<li><a href=\"#\w+\">(?:{{[^}]* else \")?(\w+)(?:\" }})?</a>", navigation)
    assert len(sections) == navigation.count("<li>")
    told = re.findall(r"^\| \*\*(\w+)", (ROOT / "docs/howto/report.md").read_text(), re.MULTILINE)
    assert sections == told


@pytest.mark.parametrize(
    "word",
    [
        "qkflow trian",
        "qkflow train --initial",
        "qkflow compare my.txt --arms standard,couplet",
        "--tokens saved",
        "--inits",
        "src/qkflow/nothing.py",
        "qkflow.nothing",
        "circuit_groups(model, lr, ratio=20)",
        "qkflow.experiment.summarise()",
        "standard:windows=3",
        "QKFLOW_CACHES",
    ],
)
def test_a_word_that_names_nothing_is_found(word: str, check: Check) -> None:
    with pytest.raises((Exception, pytest.fail.Exception)):
        there(word, word, check)
