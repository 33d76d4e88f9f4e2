"""Fixtures for the documentation tests: a working directory, and a checker for commands.

Each command is checked by the parser that would read it: `qkflow` (with its mechanisms, sizes, durations and names),
`torchrun`, `python FILE` (the file exists; options are read by its own parser), `make` (the target exists) and `pip`
(the extras exist). Any other program fails.
"""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tyro
from torch.distributed.run import get_args_parser

from qkflow import cli
from qkflow.cli.compare import parse_count, split_arms
from qkflow.cli.options import parse_duration, parse_numbers
from qkflow.data import CORPUS_NAMES, is_recall_task, parse_recall_spec
from qkflow.experiment.spec import parse_arm
from qkflow.laws import LAWS
from qkflow.mechanisms import mechanism, registry
from qkflow.models import size
from qkflow.recipes import claim, is_claim, recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def workdir(tmp_path: Path, session_cache: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, a cache that all pages share, and a registry that is restored."""
    monkeypatch.setenv("QKFLOW_CACHE", session_cache)
    monkeypatch.delenv("QKFLOW_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def check_command(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str], str], None]:
    """A function that fails unless the words of a command are valid; its second argument is where the command is."""
    return partial(_check_command, monkeypatch)


def _check_command(monkeypatch: pytest.MonkeyPatch, words: list[str], where: str) -> None:
    program, args = words[0], words[1:]
    if Path(program).name == "python":
        program = "python"
    if program == "qkflow":
        _check_qkflow(args, where)
    elif program == "torchrun":
        try:
            options = get_args_parser().parse_args(args)
        except SystemExit:
            pytest.fail(f"{where}: torchrun does not accept {shlex.join(args)}")
        assert options.module, f"{where}: torchrun needs -m to run qkflow"
        assert options.training_script == "qkflow", where
        _check_qkflow(options.training_script_args, where)
    elif program == "python" and args[:2] == ["-m", "qkflow"]:
        _check_qkflow(args[2:], where)
    elif program == "python" and args[:2] == ["-m", "qkflow.lm_eval"]:
        assert (ROOT / "src/qkflow/lm_eval/__main__.py").is_file(), where  # lm-eval parses the options
    elif program == "python" and args[:2] == ["-m", "pytest"]:
        paths = [word for word in args[2:] if "/" in word]
        assert all((ROOT / path).exists() for path in paths), f"{where}: {paths} not found"
    elif program == "python" and args[0] != "-m":
        script = ROOT / args[0]
        assert script.is_file(), f"{where}: {args[0]} not found"
        if args[1:] and _uses_argparse(script):
            with monkeypatch.context() as patch:
                assert _script_accepts(script, args[1:], patch), f"{where}: {shlex.join(words)}"
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        named = {arg for arg in args if "=" not in arg}  # the others set variables
        assert named <= {*targets}, f"{where}: the Makefile has no target {args}"
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        names = [name for group in re.findall(r"\[([\w,-]+)\]", " ".join(args)) for name in group.split(",")]
        assert {*names} <= {*extras}, f"{where}: unknown extras {names}"
        assert all((ROOT / args[i + 1]).is_file() for i, word in enumerate(args) if word in ("-c", "-r")), where
    else:
        pytest.fail(f"{where}: no rule for {program!r}; see the docstring of tests/docs/conftest.py")


def _check_qkflow(args: list[str], where: str) -> None:
    """Parse a qkflow command, and every value that the command itself would parse later."""
    try:
        command = tyro.extras.subcommand_cli_from_dict(cli.COMMANDS, prog="qkflow", args=args)
    except SystemExit:
        pytest.fail(f"{where}: qkflow does not accept {shlex.join(args)}")
    for name, value in vars(command).items():
        if name in VALUE_PARSERS and value not in (None, [], ()):
            VALUE_PARSERS[name](value)


def _uses_argparse(script: Path) -> bool:
    """Whether a script uses argparse, directly or through a module beside it."""
    imports = re.findall(r"^(?:from|import) (\w+)", script.read_text(), re.MULTILINE)
    siblings = [path for name in imports if (path := script.with_name(f"{name}.py")).is_file()]
    return "argparse" in imports or any(map(_uses_argparse, siblings))


class _ArgumentsParsed(Exception):
    """Raised to stop a script after it has parsed its arguments."""


def _script_accepts(script: Path, args: list[str], patch: pytest.MonkeyPatch) -> bool:
    """Whether the argument parser of a script accepts these arguments; the script stops there."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parse_args(self, *args, **kwargs)
        raise _ArgumentsParsed

    patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    patch.setattr(sys, "argv", [str(script), *args])
    patch.syspath_prepend(str(script.parent))
    modules_before = {*sys.modules}
    try:
        runpy.run_path(str(script), run_name="__main__")
        return False
    except (_ArgumentsParsed, SystemExit) as stop:
        return isinstance(stop, _ArgumentsParsed)
    finally:  # modules beside the script may share their name with others
        siblings = {path.stem for path in script.parent.glob("*.py")}
        for name in ({*sys.modules} - modules_before) & siblings:
            del sys.modules[name]


def _corpus(text: str) -> None:
    """A task with its options, a named corpus, or a path (without a colon)."""
    assert (
        parse_recall_spec(text)
        if is_recall_task(text)
        else text in CORPUS_NAMES or text.startswith("hf:") or ":" not in text
    ), text


def _factory(text: str) -> None:
    """A mechanism by name, or `package.module:name` of the reader."""
    name, colon, attribute = text.partition(":")
    if not colon or "=" in attribute:
        mechanism(text)
    else:
        assert all(part.isidentifier() for part in (*name.split("."), attribute)), text


VALUE_PARSERS: dict[str, Callable[[Any], object]] = {
    "arms": lambda text: [mechanism(parse_arm(arm)[0]) for arm in split_arms(text)],
    "budget": parse_duration,
    "config": lambda path: (ROOT / path).read_text(),
    "corpus": _corpus,
    "factory": _factory,
    "law": lambda names: [LAWS[name] for name in names],
    "mechanism": lambda text: mechanism(parse_arm(text)[0]),
    "name": lambda name: claim(name) if is_claim(name) else recipe(name),
    "rates": lambda text: parse_numbers(text, "--rates", "1e-3,3e-3"),
    "ratios": lambda text: parse_numbers(text, "", ""),
    "size": size,
    "train_tokens": parse_count,
}
"""The parser of a value, by the name of its option."""
