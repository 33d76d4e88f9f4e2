"""Commands as a page names them, each checked by the parser that would read it; and a place to run them in.

`qkflow` (then its mechanisms, sizes, times and names by their own readers), `torchrun`, `python FILE` (which must be
there; given options, by FILE's own parser), `make` (the target), `pip` (the extras). Anything else fails.
"""

from __future__ import annotations

import argparse
import os
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
from qkflow.cli.compare import count, split_arms
from qkflow.cli.options import RATES, numbers, seconds
from qkflow.data import NAMES, from_spec, is_task
from qkflow.experiment.arm import parse_arm
from qkflow.laws import LAWS
from qkflow.mechanisms import mechanism, registry
from qkflow.models import size
from qkflow.ops import csrc
from qkflow.recipes import recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, a cache of its own in which kernels are built already, and no name left registered behind."""
    csrc.prepare()
    kernels = Path(os.environ["QKFLOW_CACHE"]) / "native"
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/native").symlink_to(kernels.absolute())
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("QKFLOW_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(registry, "_BUILT_IN", dict(registry._BUILT_IN))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str], str], None]:
    """Fails unless a command, told where it stands, would be understood by those it is meant for."""
    return partial(_check, monkeypatch)


class Parsed(Exception):
    """A program has read its options, and need not go on."""


def _check(monkeypatch: pytest.MonkeyPatch, words: list[str], where: str) -> None:
    program, rest = words[0], words[1:]
    if program == "qkflow":
        understood(rest, where)
    elif program == "torchrun":
        try:
            options = get_args_parser().parse_args(rest)
        except SystemExit:
            pytest.fail(f"{where}: torchrun does not understand {shlex.join(rest)}")
        assert options.module, f"{where}: torchrun runs qkflow with -m"
        assert options.training_script == "qkflow", where
        understood(options.training_script_args, where)
    elif program == "python" and rest[:2] == ["-m", "qkflow"]:
        understood(rest[2:], where)
    elif program == "python" and rest[:2] == ["-m", "qkflow.lm_eval"]:
        assert (ROOT / "src/qkflow/harness/__main__.py").is_file(), where  # lm-eval reads the rest
    elif program == "python" and rest[0] != "-m":
        file = ROOT / rest[0]
        assert file.is_file(), f"{where}: there is no {rest[0]}"
        if rest[1:] and has_parser(file):
            with monkeypatch.context() as patch:
                assert reads(file, rest[1:], patch), f"{where}: {shlex.join(words)}"
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {*rest} <= {*targets}, f"{where}: Makefile has no {rest}"
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = [name for group in re.findall(r"\[([\w,-]+)\]", " ".join(rest)) for name in group.split(",")]
        assert {*asked} <= {*extras}, f"{where}: there are no extras {asked}"
        assert all((ROOT / rest[i + 1]).is_file() for i, word in enumerate(rest) if word in ("-c", "-r")), where
    else:
        pytest.fail(f"{where}: no rule for {program!r}: see the head of this file")


def understood(args: list[str], where: str) -> None:
    """Read a command of qkflow as its command line does, and every value that it would only look at later."""
    try:
        command = tyro.extras.subcommand_cli_from_dict(cli.COMMANDS, prog="qkflow", args=args)
    except SystemExit:
        pytest.fail(f"{where}: qkflow does not understand {shlex.join(args)}")
    for name, value in vars(command).items():
        if name in VALUES and value not in (None, [], ()):
            VALUES[name](value)


def has_parser(file: Path) -> bool:
    """Whether a program reads its options by argparse, itself or through a neighbour."""
    text = file.read_text()
    names = re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)
    near = [path for name in names if (path := file.with_name(f"{name}.py")).is_file()]
    return "argparse" in names or any(map(has_parser, near))


def reads(file: Path, args: list[str], patch: pytest.MonkeyPatch) -> bool:
    """Whether a program's own parser takes these options; it ends there."""
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *given: Any, **options: Any) -> None:
        parse(self, *given, **options)
        raise Parsed

    patch.setattr(argparse.ArgumentParser, "parse_args", stop)
    patch.setattr(sys, "argv", [str(file), *args])
    patch.syspath_prepend(str(file.parent))
    known = {*sys.modules}
    try:
        runpy.run_path(str(file), run_name="__main__")
        return False
    except (Parsed, SystemExit) as end:
        return isinstance(end, Parsed)
    finally:  # its neighbours have names that others may have, too
        near = {path.stem for path in file.parent.glob("*.py")}
        for name in ({*sys.modules} - known) & near:
            del sys.modules[name]


def source(text: str) -> None:
    """A task with its options, a corpus by name, or a path, which has no colon."""
    assert from_spec(text) if is_task(text) else text in NAMES or text.startswith("hf:") or ":" not in text, text


def factory(text: str) -> None:
    """A mechanism by name; or `package.module:name`, which is the reader's own."""
    name, colon, attribute = text.partition(":")
    if not colon or "=" in attribute:
        mechanism(text)
    else:
        assert all(part.isidentifier() for part in (*name.split("."), attribute)), text


VALUES: dict[str, Callable[[Any], object]] = {
    "arms": lambda text: [mechanism(parse_arm(arm)[0]) for arm in split_arms(text)],
    "budget": seconds,
    "config": lambda path: (ROOT / path).read_text(),
    "corpus": source,
    "factory": factory,
    "law": lambda names: [LAWS[name] for name in names],
    "mechanism": lambda text: mechanism(parse_arm(text)[0]),
    "name": recipe,
    "rates": lambda text: numbers(text, RATES),
    "ratios": lambda text: numbers(text, ("", "")),
    "size": size,
    "train_tokens": count,
}
"""What reads a value, by the name of its flag."""
