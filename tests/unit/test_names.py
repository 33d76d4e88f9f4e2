"""Names of the package: public classes are unique, and names that were replaced do not come back."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "qkflow"

REPLACED_MODULES = {
    "ops": {"alternate", "circle", "promises"},
    "mechanisms": {"sight", "observed", "synchrony", "synchrony_config", "delta_base"},
    "training": {"world", "meeting", "pieces", "start", "scores", "runtime"},
    "data": {"lesson", "mixing", "find", "saved", "survey", "named", "stored", "words"},
    "circuits": {"by_hand", "known", "parts"},
    "experiment": {"student", "notes", "attempts", "words", "wording"},
    "report": {"shell", "rows", "gallery", "probed", "picture", "wording"},
    "hub": {"plain", "common", "description"},
    "": {"harness", "flow", "study", "files"},
}
"""Module names of 0.1, by package; modules anywhere inside the package count."""

REPLACED_NAMES = {
    *("in_reach", "opened", "by_token", "one_late"),
    *("Exhibit", "Observed", "Pace", "Delayed", "tails", "evolve"),
    *("leads", "agreed", "sees", "spread"),
    *("Lesson", "Order", "Ending", "Done", "Need", "Yardstick", "Wish"),
}
"""Functions and classes of 0.1 that have other names now."""


def definitions() -> list[tuple[Path, ast.ClassDef | ast.FunctionDef]]:
    """Classes and functions at module level."""
    return [
        (path.relative_to(PACKAGE), node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    ]


def test_no_two_public_classes_share_a_name() -> None:
    modules = defaultdict(list)
    for path, node in definitions():
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            modules[node.name].append(str(path))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}


@pytest.mark.parametrize("package", REPLACED_MODULES)
def test_replaced_module_names_are_gone(package: str) -> None:
    folder = PACKAGE / package
    paths = folder.rglob("*") if package else folder.iterdir()
    names = {path.stem for path in paths if path.suffix in (".py", ".c", ".h") or path.is_dir()}
    assert names & REPLACED_MODULES[package] == set()


def test_replaced_functions_and_classes_are_gone() -> None:
    assert {f"{path}: {node.name}" for path, node in definitions() if node.name in REPLACED_NAMES} == set()
