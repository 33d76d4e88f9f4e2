"""Built-in corpora: where they are searched, and their usual splits."""

from __future__ import annotations

import bz2
import gzip
import lzma
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from qkflow.data import Corpus, CorpusConfig, open_corpus
from qkflow.data.text.resolve import HUB_BYTES, articles
from qkflow.errors import UsageError

TEXT = ("anarchism originated as a term of abuse " * 50).encode()[:2000]
ARTICLE = " \n = {title} = \n \n Words of {title} . \n \n = = Life = = \n \n More = words = \n"


@pytest.fixture
def no_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)


def split_texts(corpus: Corpus) -> list[list[bytes]]:
    splits = (corpus.train, corpus.validation, corpus.test)
    return [[corpus.decode(split.tokens[a:b]) for a, b in split.documents] for split in splits]


def write_text8(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("text8", TEXT)
        return
    compress = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}.get(path.suffix, bytes)
    path.write_bytes(compress(TEXT))


@pytest.mark.parametrize(
    "name", ["text8", "text8.gz", "text8.xz", "text8.zip", "text8.txt", "text8/text8", "text8/text8.bz2"]
)
def test_all_file_forms_give_the_same_corpus(tmp_path: Path, name: str) -> None:
    write_text8(tmp_path / "data" / name)
    corpus = open_corpus(CorpusConfig(source="text8", data_dir=str(tmp_path / "data")))
    assert corpus.name == "text8"
    assert b"".join(text for split in split_texts(corpus) for text in split) == TEXT
    (tmp_path / "plain.txt").write_bytes(TEXT)
    assert corpus.digest == open_corpus(CorpusConfig(source=str(tmp_path / "plain.txt"))).digest


@pytest.mark.parametrize("name", ["enwik8", "text8"])
def test_builtin_texts_are_cut_at_exactly_90_and_95_percent(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes("é".encode() * 505)  # 1010 bytes: both cuts are odd, inside a character
    corpus = open_corpus(CorpusConfig(source=name, data_dir=str(tmp_path)))
    assert [split.bytes for split in (corpus.train, corpus.validation, corpus.test)] == [909, 50, 51]
    path = open_corpus(CorpusConfig(source=str(tmp_path / name)))
    assert [split.bytes for split in (path.train, path.validation, path.test)] == [910, 50, 50]
    words = open_corpus(CorpusConfig(source=name, data_dir=str(tmp_path), tokens="bpe", vocabulary=260))
    assert [split.bytes for split in (words.train, words.validation, words.test)] == [910, 50, 50]


def test_search_order_is_data_dir_environment_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_datasets: None
) -> None:
    for folder in ("first", "second", "third"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text8").write_bytes(f"{folder} ".encode() * 100)
    monkeypatch.chdir(tmp_path / "third")
    monkeypatch.setenv("QKFLOW_DATA", str(tmp_path / "second"))

    def first_word(data_dir: str | None) -> bytes:
        corpus = open_corpus(CorpusConfig(source="text8", data_dir=data_dir))
        return corpus.decode(corpus.train.tokens[1:7]).strip()

    assert first_word(str(tmp_path / "first")) == b"first"
    assert first_word(None) == b"second"
    assert first_word(str(tmp_path)) == b"second"
    monkeypatch.delenv("QKFLOW_DATA")
    assert first_word(None) == b"third"


def test_missing_corpus_error_says_where_to_put_it(tmp_path: Path, no_datasets: None) -> None:
    with pytest.raises(UsageError, match=r"enwik8 is not in --data-dir or QKFLOW_DATA.*pip install 'qkflow\[hf\]'"):
        open_corpus(CorpusConfig(source="enwik8"))
    with pytest.raises(UsageError, match=f"enwik8 is not in {tmp_path}") as caught:
        open_corpus(CorpusConfig(source="enwik8", data_dir=str(tmp_path)))
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="no folder '/nowhere'"):
        open_corpus(CorpusConfig(source="enwik8", data_dir="/nowhere"))


def write_wikitext(folder: Path, form: str = "tokens") -> dict[str, list[str]]:
    folder.mkdir(parents=True)
    titles = {"train": ["A", "B", "C"], "valid": ["D"], "test": ["E", "F"]}
    for split, names in titles.items():
        text = "".join(ARTICLE.format(title=name) for name in names)
        (folder / f"wiki.{split}.{form}").write_text(text)
    return titles


@pytest.mark.parametrize("folder", ["wikitext-103", "wikitext-103-raw", "."])
@pytest.mark.parametrize("form", ["raw", "tokens"])
def test_wikitext_keeps_official_splits_and_articles(tmp_path: Path, folder: str, form: str) -> None:
    titles = write_wikitext(tmp_path / "data" / folder, form)
    write_wikitext(tmp_path / "data" / folder / "wikitext-2", form)
    corpus = open_corpus(CorpusConfig(source="wikitext-103", data_dir=str(tmp_path / "data"), passage=10**6))
    for split, names in zip(split_texts(corpus), titles.values(), strict=True):
        assert b"".join(split).decode() == "".join(ARTICLE.format(title=name) for name in names)
        assert len(split) == len(names)
        for text, name in zip(split, names, strict=True):
            assert f" = {name} = \n".encode() in text
    assert corpus.record["split"]["rule"] == "official"


def test_wikitext_zip_prefers_raw_files(tmp_path: Path) -> None:
    write_wikitext(tmp_path / "raw", "raw")
    with zipfile.ZipFile(tmp_path / "wikitext-103.zip", "w") as archive:
        for path in sorted((tmp_path / "raw").iterdir()):
            archive.write(path, f"wikitext-103/{path.name}")
            archive.writestr(f"wikitext-103/{path.stem}.tokens", "other text")
    corpus = open_corpus(CorpusConfig(source="wikitext-103", data_dir=str(tmp_path), passage=10**6))
    assert [len(split) for split in split_texts(corpus)] == [3, 1, 2]


def test_wikitext_without_a_split_raises(tmp_path: Path) -> None:
    write_wikitext(tmp_path / "wikitext-103")
    (tmp_path / "wikitext-103" / "wiki.train.tokens").unlink()
    with pytest.raises(UsageError, match=r"wikitext-103 is incomplete.*wiki\.train"):
        open_corpus(CorpusConfig(source="wikitext-103", data_dir=str(tmp_path)))


def fake_datasets(monkeypatch: pytest.MonkeyPatch, splits: dict[str, list[dict[str, str]]]) -> list[tuple[str, ...]]:
    requests: list[tuple[str, ...]] = []
    library = types.ModuleType("datasets")
    library.load_dataset = lambda *names: requests.append(names) or splits  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    return requests


def test_text8_from_the_hub_has_the_usual_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [TEXT[:1800], TEXT[1800:1900], TEXT[1900:]]
    splits = dict(zip(("train", "validation", "test"), ([{"text": text.decode()}] for text in pieces), strict=True))
    monkeypatch.setitem(HUB_BYTES, "text8", 2000)
    requests = fake_datasets(monkeypatch, splits)
    corpus = open_corpus(CorpusConfig(source="text8"))
    assert requests == [("afmck/text8",)]
    assert [b"".join(split) for split in split_texts(corpus)] == pieces
    assert corpus.validation.tokens[0] == corpus.train.tokens[-1]


def test_hub_text_of_another_size_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_datasets(monkeypatch, {"train": [{"text": TEXT.decode()}]})
    with pytest.raises(UsageError, match="has 2000 bytes, expected 100000000"):
        open_corpus(CorpusConfig(source="text8"))


def test_wikitext_from_the_hub_is_divided_into_articles(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(*titles: str) -> list[dict[str, str]]:
        text = "".join(ARTICLE.format(title=title) for title in titles)
        return [{"text": line if line.strip() else ""} for line in text.splitlines(keepends=True)]

    requests = fake_datasets(
        monkeypatch, {"test": rows("E", "F"), "train": rows("A", "B", "C"), "validation": rows("D", "G")}
    )
    corpus = open_corpus(CorpusConfig(source="wikitext-103"))
    assert requests == [("Salesforce/wikitext", "wikitext-103-raw-v1")]
    assert [len(split) for split in split_texts(corpus)] == [3, 2, 2]


def test_wikitext_2_has_60_articles(real: Callable[[str], Path]) -> None:
    for name in ("wikitext2/wiki.valid.tokens", "wikitext2/wiki.test.tokens"):
        with open(real(name), "rb") as file:
            assert len(list(articles(file))) == 60
