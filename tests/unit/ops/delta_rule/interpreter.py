"""A faster Triton interpreter. Tests load this file by its path."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest


@contextmanager
def quick() -> Iterator[None]:
    """Patch Triton's functions once instead of for every function that a kernel calls."""
    language = pytest.importorskip("triton.language")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch, builder, scopes = interpreter._patch_lang, interpreter.interpreter_builder, {}

    def once(function: Any) -> Any:
        language_ids = frozenset(id(x) for x in function.__globals__.values() if x is language or x is language.core)
        if language_ids not in scopes:
            scopes[language_ids] = patch(function)
        return interpreter._LangPatchScope()

    unchecked = dataclasses.replace(builder.options, sanitize_overflow=False)
    with mock.patch.object(interpreter, "_patch_lang", once), mock.patch.object(builder, "options", unchecked):
        yield
    for scope in reversed(scopes.values()):
        scope.restore()
