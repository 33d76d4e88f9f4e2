"""A separate cache for every test, and corpora that several tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from qkflow.data import Corpus, CorpusConfig, open_corpus

REAL = os.environ.get("QKFLOW_DATA")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("QKFLOW_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QKFLOW_CACHE", str(tmp_path_factory.mktemp("stdlib")))
        return open_corpus(CorpusConfig())


@pytest.fixture
def real() -> Callable[[str], Path]:
    """A file in the folder named by QKFLOW_DATA; without it, the test is skipped."""

    def find(name: str) -> Path:
        path = Path(REAL or "", name)
        if not REAL or not path.exists():
            pytest.skip(f"needs {name} in the folder QKFLOW_DATA")
        return path

    return find
