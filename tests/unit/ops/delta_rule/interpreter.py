"""Triton's interpreter without what makes it slow: for tests that load this file by its path."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest


@contextmanager
def quick() -> Iterator[None]:
    """Exchange the language's functions for the interpreter's once, not anew for each function that a kernel calls."""
    language = pytest.importorskip("triton.language")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch, builder, scopes = interpreter._patch_lang, interpreter.interpreter_builder, {}

    def once(function: Any) -> Any:
        seen = frozenset(id(x) for x in function.__globals__.values() if x is language or x is language.core)
        if seen not in scopes:
            scopes[seen] = patch(function)
        return interpreter._LangPatchScope()

    unchecked = dataclasses.replace(builder.options, sanitize_overflow=False)
    with mock.patch.object(interpreter, "_patch_lang", once), mock.patch.object(builder, "options", unchecked):
        yield
    for scope in reversed(scopes.values()):
        scope.restore()
