"""`Inline code` in README.md, CONTRIBUTING.md and docs/ names things that exist.

| inline code                | check                                                                                   |
|----------------------------|-----------------------------------------------------------------------------------------|
| `qkflow ...`, `python ...` | a valid command; CAPITALS stand for values of the reader                                |
| `--flag`, `--flag value`   | an option of a command (or of torchrun, or of a benchmark) that accepts this value      |
| `src/...`, `examples/...`  | an existing file or folder                                                              |
| `qkflow.name`, `name(...)` | importable; the arguments fit the signature                                             |
| `standard:key=value`       | a valid mechanism                                                                       |
| `QKFLOW_NAME`              | a variable that the source reads                                                        |

A table of options lists every option of its config, with its default.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import pytest
from torch.distributed.run import get_args_parser

import qkflow
from qkflow import cli, probes
from qkflow.data import MQAR, Needle
from qkflow.experiment.spec import parse_arm
from qkflow.mechanisms import mechanism, mechanisms
from qkflow.mechanisms.delta_family import CombaConfig
from qkflow.probes.diagnostics import Diagnostic
from qkflow.recipes import CLAIMS, RECIPES
from qkflow.report import build_report
from qkflow.report.attention_maps import AttentionMaps

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MECHANISM = rf"({'|'.join(mechanisms())})[+:]\w"
CheckCommand = Callable[[list[str], str], None]


def inline_code(text: str) -> Iterator[str]:
    """The text between single backticks outside of fenced blocks, on one line."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_inline_code(page: Path, check_command: CheckCommand) -> None:
    for code in inline_code(page.read_text()):
        check_code(code, f"{page.name}: {code}", check_command)


def check_code(code: str, where: str, check_command: CheckCommand) -> None:
    """Fail if the thing that inline code names does not exist."""
    if re.match(r"(qkflow|python|make|pip|torchrun) ", code):
        check_mentioned_command(shlex.split(code), where, check_command)
    elif code.startswith("--"):
        check_options(code.split(), where)
    elif re.fullmatch(r"(src|tests|examples|benchmarks|docs|tools)/[\w./-]*", code):
        assert (ROOT / code).exists(), where
    elif code.startswith("QKFLOW_"):
        assert re.search(rf"\b{code.partition('=')[0]}\b", package_source()), where
    elif re.match(MECHANISM, code):
        mechanism(parse_arm(code)[0])
    elif re.fullmatch(r"(with )?qkflow(\.\w+)+(\(.*\))?|\w+\(.*\)", code):
        check_name(code.removeprefix("with "), where)


def check_mentioned_command(words: list[str], where: str, check_command: CheckCommand) -> None:
    """A whole command, or a mention of one: its name, an option without a value, or a value in CAPITALS."""
    if words[0] == "python" and words[1] != "-m":
        assert (ROOT / words[1]).is_file(), where
        return check_options(words[2:], where)
    if words[0] != "qkflow":
        return check_command(words, where)
    if words[1].startswith("--"):
        assert words[1:] == ["--help"], where
        return None
    fields = {field.name for field in dataclasses.fields(cli.COMMANDS[words[1]])}
    options = [word for word in words[2:] if word.startswith("--") and word != "--help"]
    assert {option[2:].replace("-", "_") for option in options} <= fields, where
    if words[2:] and not words[-1].startswith("--") and not any(re.fullmatch("[A-Z]+", word) for word in words):
        check_command(words, where)
    return None


def check_options(words: list[str], where: str) -> None:
    """Options, each with or without a value, of any command."""
    for option, value in zip(words, [*words, "--"][1:], strict=True):
        if not option.startswith("--"):
            continue
        hints = [get_type_hints(command) for command in cli.COMMANDS.values()]
        types = [hint[name] for hint in hints if (name := option[2:].replace("-", "_")) in hint]
        assert types or option in other_options(), where
        if types and not value.startswith("--") and not value.isupper():
            assert any(accepts(type_arguments(kind), value) for kind in types), where


def accepts(arguments: set[Any], value: str) -> bool:
    return value in arguments or str in arguments or (int in arguments and value.isdigit())


def type_arguments(kind: Any) -> set[Any]:
    """The values of a Literal and the plain types in a type, at any depth."""
    arguments = get_args(kind)
    return {kind}.union(*map(type_arguments, arguments)) if arguments else {kind}


@cache
def other_options() -> set[str]:
    """The options of torchrun and of the benchmarks."""
    torchrun = {option for action in get_args_parser()._actions for option in action.option_strings}
    return torchrun.union(*(re.findall(r"\"(--[\w-]+)\"", path.read_text()) for path in ROOT.glob("benchmarks/*.py")))


@cache
def package_source() -> str:
    """The source of the package as one string."""
    return "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))


def check_name(code: str, where: str) -> None:
    """A full name, or a call of a public function whose arguments fit."""
    path, _, call = code.partition("(")
    first, *rest = path.split(".")
    value = (
        qkflow if rest else next((vars(module)[first] for module in (qkflow, probes) if first in vars(module)), None)
    )
    for number, name in enumerate(rest):  # a function may share its name with its module
        value = getattr(value, name, None) or import_module(".".join((first, *rest[: number + 1])))
    if not call or "..." in call or not callable(value):
        return
    expression = ast.parse(code, mode="eval").body
    assert isinstance(expression, ast.Call), where
    keywords = {str(keyword.arg): 0 for keyword in expression.keywords}
    try:
        inspect.signature(value).bind(*expression.args, **keywords)
    except TypeError as error:
        pytest.fail(f"{where}: {error}")


CONFIGS: dict[str, tuple[type[Any], ...]] = {
    "coupled.md": (qkflow.CouplingConfig,),
    "kuramoto.md": (qkflow.KuramotoConfig,),
    "qdelta.md": (qkflow.QDeltaConfig, CombaConfig),
    "recall.md": (MQAR, Needle),
    "standard.md": (qkflow.StandardConfig, qkflow.DifferentialConfig),
}
"""The configs whose options are in a table of a page."""
PART_OF_A_NAME = {"dynamics", "kind"}
"""Options that are part of the name of a mechanism or a task."""


@pytest.mark.parametrize("page", CONFIGS)
def test_option_tables_are_complete(page: str) -> None:
    defaults = option_defaults((ROOT / "docs" / page).read_text())
    for config in CONFIGS[page]:
        for field in dataclasses.fields(config):
            assert field.name in {*defaults, *PART_OF_A_NAME}, f"{page} lacks {field.name} of {config.__name__}"
            if field.name in defaults and isinstance(field.default, bool | int | float | str | tuple):
                assert format_default(field.default) in defaults[field.name], f"{page}: {field.name} is {field.default}"
    fields = {field.name for config in CONFIGS[page] for field in dataclasses.fields(config)} | {"heads"}
    assert {*defaults} <= fields, f"{page} has unknown options: {sorted({*defaults} - fields)}"


def option_defaults(text: str) -> dict[str, set[str]]:
    """The options in the tables of a page, each with its entries in the column of defaults."""
    defaults: dict[str, set[str]] = {}
    for table in re.findall(r"^\| option.*\n(?:\|.*\n)+", text, re.MULTILINE):
        header, _, *rows = ([cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table.splitlines())
        for row in rows:
            names = re.findall(r"`(\w+)`", row[0])
            entries = re.split(", ", row[header.index("default")].replace("`", ""))
            for number, name in enumerate(names):
                own = entries if len(names) == 1 else [entries[min(number, len(entries) - 1)]]
                defaults.setdefault(name, set()).update(own)
    return defaults


def format_default(value: Any) -> str:
    """A default as the pages write it."""
    if isinstance(value, tuple):
        return "+".join(str(item) for item in value)
    return f"{value:,.15g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def test_every_recipe_is_listed() -> None:
    listed = re.findall(r"^\| `([\w.-]+)` \|", (ROOT / "docs/reproduce.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(RECIPES)


def test_every_claim_is_listed_with_its_number_and_kind() -> None:
    page = (ROOT / "docs/reproduce.md").read_text()
    for claim in CLAIMS:
        (row,) = re.findall(rf"^\| {claim.number} \| `{claim.name}`.*$", page, re.MULTILINE)
        assert claim.kind.split(",")[0] in row


def test_report_sections_are_explained_in_order(synthetic: ModuleType) -> None:
    gate = Diagnostic(title="gate", kind="bars", x=("head 1",), series=("open",), values=((0.2,),))
    maps = AttentionMaps(diagnostics={"standard": [(gate,)]})
    report = build_report(replace(synthetic.task(tuned=True), unit="byte"), maps)
    sections = [section.nav for section in report.sections]
    explained = re.findall(r"^\| \*\*(\w+)", (ROOT / "docs/howto/report.md").read_text(), re.MULTILINE)
    assert sections == explained


@pytest.mark.parametrize(
    "code",
    [
        "qkflow trian",
        "qkflow train --initial",
        "qkflow compare my.txt --arms standard,couplet",
        "--tokens saved",
        "--inits",
        "src/qkflow/nothing.py",
        "qkflow.nothing",
        "circuit_groups(model, lr, ratio=20)",
        "qkflow.experiment.read_result()",
        "standard:windows=3",
        "QKFLOW_CACHES",
    ],
)
def test_wrong_inline_code_fails(code: str, check_command: CheckCommand) -> None:
    with pytest.raises((Exception, pytest.fail.Exception)):
        check_code(code, code, check_command)
