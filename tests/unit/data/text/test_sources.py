"""Documents of files and folders, and errors for invalid sources."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from qkflow.data import CorpusConfig, open_corpus
from qkflow.data.text.resolve import find_source
from qkflow.data.text.sources import Document, from_path, standard_library
from qkflow.errors import UsageError


def texts(path: Path, field: str = "text") -> list[bytes]:
    return [b"".join(document.blocks) for document in from_path(path, field).documents()]


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_standard_library_excludes_its_tests() -> None:
    labels = [document.label for document in read_all(standard_library().documents)]
    assert {"json/decoder.py", "argparse.py", "asyncio/tasks.py"} <= set(labels)
    assert labels == sorted(labels)
    folders = {folder for label in labels for folder in label.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def read_all(documents: Callable[[], object]) -> list[Document]:
    documents_read = []
    for document in documents():  # type: ignore[attr-defined]
        assert any(document.blocks)
        documents_read.append(document)
    return documents_read


def test_each_nonempty_file_is_a_document(tmp_path: Path) -> None:
    for name, text in {"b.txt": "two", "a/x.md": "one", "c.txt": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert texts(tmp_path) == [b"one", b"two"]


def test_each_nonempty_jsonl_line_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n\n{"text": ""}\n{"text": null}\n{"text": "tw\\u00f6\\n"}')
    assert texts(path) == [b"one", "twö\n".encode()]


def test_unpaired_surrogate_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b"}')
    assert texts(path) == [b"a?b"]


def test_nested_fields_and_lists(tmp_path: Path) -> None:
    row = {"a": {"b": "deep"}, "parts": [{"t": "x"}, {"t": "y"}], "words": ["p", "q"], "a.b": "its own name"}
    path = lines(tmp_path / "a.jsonl", row)
    assert texts(path, "a.b") == [b"its own name"]
    assert texts(path, "parts.t") == [b"x\ny"]
    assert texts(path, "words") == [b"p\nq"]
    assert texts(lines(tmp_path / "b.jsonl", {"a": {"b": "deep"}}), "a.b") == [b"deep"]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("{'text': 1}", r"a\.jsonl, line 2 is not valid JSON .*one JSON object per line"),
        ('{"text": "un', r"a\.jsonl, line 2 is not valid JSON .*one JSON object per line"),
        ('{"title": "x", "body": "y"}', r"line 2 has no field 'text': choose .* --field \(title, body\)"),
        ('{"text": 3}', r"line 2: field 'text' is a number, not text"),
        ('{"text": [{"inner": "x"}]}', r"line 2: field 'text' is a list, .*text\.inner"),
        ("[" * 100_000, r"line 2 is not valid JSON"),
        ('["text"]', r"line 2: expected an object with a field 'text', got a list"),
    ],
)
def test_invalid_line_error_names_the_line(tmp_path: Path, second: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + second + "\n")
    with pytest.raises(UsageError, match=message) as caught:
        texts(path)
    assert "\n" not in str(caught.value)


def test_line_that_is_not_utf8_raises(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(UsageError, match=r"a\.jsonl, line 1 is not valid JSON \(not UTF-8 text\)"):
        texts(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("enwik9", "unknown corpus 'enwik9': did you mean 'enwik8'.*no file or folder has that name"),
        ("python-stdlb", "did you mean 'python-stdlib'"),
        ("", "unknown corpus ''"),
        ("nowhere/text.txt", "no file or folder 'nowhere/text.txt': use a path or one of python-stdlib"),
        ("notse.txt", "no file or folder 'notse.txt': did you mean 'notes.txt'"),
        ("hf:", "is not a dataset name: use hf:NAME"),
        ("hf:a/b/c/d", "is not a dataset name: use hf:NAME"),
    ],
)
def test_unknown_source_error_suggests_a_similar_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("x")
    with pytest.raises(UsageError, match=message) as caught:
        find_source(CorpusConfig(source=source))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz"])
def test_empty_file_raises(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UsageError, match=rf"{name} is empty: use a file"):
        open_corpus(CorpusConfig(source=str(tmp_path / name)))


def test_folder_without_text_raises(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"pictures contains no text files: expected \.txt"):
        open_corpus(CorpusConfig(source=str(folder)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tokens": "byte"}, "'bytes'"),
        ({"vocabulary": 200}, "at least 257"),
        ({"passage": 0}, "at least 1"),
    ],
)
def test_invalid_config_raises(config: dict[str, object], message: str) -> None:
    with pytest.raises((UsageError, TypeError), match=message):  # a TypeError where types are checked at run time
        CorpusConfig(**config)  # type: ignore[arg-type]
