"""Statistics and excerpts of corpora."""

import random
from pathlib import Path

import numpy as np
import pytest

from qkflow.data import Corpus, CorpusConfig, Split, open_corpus
from qkflow.experiment.corpus_stats import EXCERPT, describe_corpus, excerpts, similarity, vocabulary_growth


def notes(corpus: Corpus) -> list[dict[str, str]]:
    return describe_corpus(corpus)["notes"]


def corpus_of(folder: Path, documents: list[str]) -> Corpus:
    folder.mkdir()
    for number, document in enumerate(documents):
        (folder / f"{number:03}.txt").write_text(document)
    return open_corpus(CorpusConfig(source=str(folder)))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "cache"))


def words(seed: int, count: int, distinct: int) -> str:
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(distinct)}" for _ in range(count))


def figure(description: list[dict[str, str]], name: str) -> float:
    return float(next(note["value"] for note in description if note["name"] == name).split()[0])


def test_a_repetitive_text_compresses_further_and_grows_less_than_a_random_one(tmp_path: Path) -> None:
    same = notes(corpus_of(tmp_path / "same", ["the same line again\n" * 60] * 30))
    random_words = notes(corpus_of(tmp_path / "random", [words(seed, 300, 5000) for seed in range(30)]))
    assert figure(same, "compressibility") < figure(random_words, "compressibility") / 4
    assert figure(same, "vocabulary growth") < 0.1 < figure(random_words, "vocabulary growth")
    assert figure(same, "document similarity") == pytest.approx(1)
    assert figure(random_words, "document similarity") < 0.3


def test_vocabulary_growth_recovers_a_known_exponent() -> None:
    exponent, text, seen = 0.6, [], 0
    for position in range(1, 50_001):
        new = int(position**exponent) > seen
        seen += new
        text.append(b"%d" % (seen if new else 1))
    assert vocabulary_growth(text) == pytest.approx(exponent, abs=0.02)


def test_too_little_text_has_no_statistics() -> None:
    assert vocabulary_growth([b"a"] * 99) is None
    assert similarity([b"one document"]) is None
    assert similarity([b"words", b" \n ", b"!?"]) is None


def test_words_in_other_alphabets_count_as_words() -> None:
    assert similarity(["привет мир".encode(), "привет мир".encode()]) == pytest.approx(1)


def test_excerpts_are_held_out_tokens_inside_one_document() -> None:
    split = Split(
        tokens=np.arange(400), documents=np.array([[1, 100], [101, 110], [111, 400]]), sizes=np.array([99, 9, 289])
    )
    description = excerpts(split)
    assert [len(tokens) for tokens in description] == [EXCERPT, 9, EXCERPT]
    for tokens, (begin, end) in zip(description, split.documents, strict=True):
        assert begin <= tokens[0]
        assert tokens[-1] < end
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))


def test_a_recall_task_is_described_by_instances_vocabulary_and_chance() -> None:
    corpus = open_corpus(CorpusConfig(source="mqar:pairs=2+4,length=24,keys=8,values=8,train=300,validation=30,each=5"))
    description = {note["name"]: note["value"] for note in notes(corpus)}
    assert description["instances"] == "300 for training, 30 held out, 10 for testing"
    assert description["test grid"] == "2 cells by pairs"
    assert description["vocabulary"] == f"{corpus.vocabulary} tokens"
    assert description["chance"] == "12.5 %"
    rare = open_corpus(CorpusConfig(source="s-niah-3:length=48,lengths=48,train=4,validation=2,each=1"))
    assert {note["name"]: note["value"] for note in notes(rare)}["chance"] == "1 in 281,474,976,710,656"
    assert "compressibility" not in description


def test_excerpts_of_a_recall_task_contain_question_and_needle() -> None:
    corpus = open_corpus(CorpusConfig(source="s-niah-1:length=96,lengths=96,train=50,validation=20,each=2"))
    ends = {int(end) for _, end in corpus.validation.documents}
    for tokens in excerpts(corpus.validation):
        text = corpus.decode(tokens)
        answer = text.rsplit(b"it is ", 1)[1]
        assert len(tokens) == EXCERPT
        assert text.count(answer) == 2  # in the needle, and as the answer
        assert any(corpus.validation.tokens[end - EXCERPT : end].tolist() == tokens for end in ends)


def test_the_description_is_json_and_deterministic(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "text", [words(seed, 200, 50) for seed in range(30)])
    description = describe_corpus(corpus)
    assert description == describe_corpus(corpus)
    assert {type(token) for excerpt in description["excerpts"] for token in excerpt["tokens"]} == {int}
    assert all(isinstance(value, str) for note in description["notes"] for value in note.values())
