"""Prepared recall tasks: cached, identical on every machine, with disjoint splits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from qkflow.data import (
    CELL_DTYPE,
    ByteTokenizer,
    Corpus,
    CorpusConfig,
    Split,
    WordTokenizer,
    get_batch,
    open_corpus,
    windows,
)
from qkflow.data.recall import prepare
from qkflow.data.text.batches import scored
from qkflow.errors import UsageError

MQAR = "mqar:pairs=2+4,length=20,train=60,validation=10,each=5"
NEEDLE = "s-niah-2:length=48,lengths=48+96,depths=0+50+100,train=30,validation=6,each=2"
PINNED = {
    MQAR: "6c2276f22d2baea9b03a2424901141723a3ca5b58164c9d3d40d9aed9b9d9131",
    NEEDLE: "d9227946d7ead173e976b4c3de4d8e0089b79e9b35a6dfa1ba79bcdc4f9395a2",
}


def open_spec(source: str) -> Corpus:
    return open_corpus(CorpusConfig(source=source))


def splits(corpus: Corpus) -> dict[str, Split]:
    return {"train": corpus.train, "validation": corpus.validation, "test": corpus.test}


def rows(split: Split) -> list[bytes]:
    return [split.tokens[begin:end].tobytes() for begin, end in split.documents]


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("source", [MQAR, NEEDLE])
def test_instances_are_separated_by_end_tokens_and_have_answers(source: str) -> None:
    corpus = open_spec(source)
    for name, split in splits(corpus).items():
        begins, ends = split.documents.T
        assert begins.tolist() == [1, *(ends[:-1] + 1)]
        assert np.flatnonzero(split.tokens == corpus.tokenizer.end).tolist() == [0, *ends]
        assert len(split.tokens) == corpus.record["parts"][name]["tokens"] == ends[-1] + 1
        assert split.answers is not None
        assert split.cells is not None
        assert split.cells.dtype == CELL_DTYPE
        assert (ends - begins == split.cells["length"]).all()
        assert (split.answers[1:, 0] >= split.answers[:-1, 1]).all()
        owner = np.searchsorted(begins, split.answers[:, 0], side="right") - 1
        assert (split.answers[:, 1] <= ends[owner]).all()
        assert np.bincount(owner, weights=np.diff(split.answers).ravel()).tolist() == split.sizes.tolist()
        if name != "test":
            assert (split.cells["length"] == corpus.context).all()


def test_test_split_is_the_grid_in_order() -> None:
    mqar, needle = open_spec(MQAR), open_spec(NEEDLE)
    assert mqar.test.cells is not None
    assert needle.test.cells is not None
    assert mqar.test.cells.tolist() == [(pairs, 20, -1) for pairs in (2, 4) for _ in range(5)]
    grid = [(-1, length, depth) for length in (48, 96) for depth in (0, 50, 100) for _ in range(2)]
    assert needle.test.cells.tolist() == grid
    assert (len(mqar.train.documents), len(mqar.validation.documents)) == (60, 10)


def test_record_describes_the_task(tmp_path: Path) -> None:
    corpus = open_spec(MQAR)
    assert (corpus.name, corpus.context, corpus.chance, corpus.unit) == (MQAR, 20, 1 / 64, "answer token")
    assert corpus.task is not None
    assert (corpus.task["spec"], corpus.task["axes"]) == (MQAR, ["pairs"])
    assert open_spec(NEEDLE).task["axes"] == ["length", "depth"]  # type: ignore[index]
    (tmp_path / "text.txt").write_text("some text that is long enough\n" * 400)
    text = open_spec(str(tmp_path / "text.txt"))
    assert (text.task, text.context, text.chance, text.unit) == (None, None, None, "byte")
    assert (text.train.answers, text.train.cells) == (None, None)
    assert not list(text.folder.glob("*.answers.npy"))


@pytest.mark.parametrize("source", [MQAR, NEEDLE])
def test_spec_gives_pinned_tokens(source: str) -> None:
    assert open_spec(source).digest == PINNED[source]


@pytest.mark.parametrize("source", [MQAR, NEEDLE])
def test_files_do_not_depend_on_the_block_size(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_spec(source)
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(prepare, "BLOCK_TOKENS", 100)
    second = open_spec(source)
    assert first.folder.name == second.folder.name
    assert content(first.folder) == content(second.folder)


def test_digest_depends_on_every_relevant_option() -> None:
    digests = {
        open_spec(f"{MQAR}{option}").digest for option in ("", ",seed=1", ",keys=65", ",values=65", ",fillers=2")
    }
    assert len(digests) == 5


@pytest.mark.parametrize(
    "source", ["mqar:pairs=1,length=5,keys=3,values=4,train=200,validation=3,each=4", MQAR, NEEDLE]
)
def test_splits_are_disjoint_even_for_few_instances(source: str) -> None:
    train, validation, test = (Counter(rows(split)) for split in splits(open_spec(source)).values())
    assert not train.keys() & validation.keys()
    assert not train.keys() & test.keys()
    assert not validation.keys() & test.keys()


def test_task_with_too_few_instances_raises() -> None:
    with pytest.raises(UsageError, match=r"too few different instances for 512 new ones in validation"):
        open_spec("mqar:pairs=1,length=4,keys=1,values=2")


@pytest.mark.parametrize("name", ["train.tokens", "test.answers.npy", "corpus.json"])
def test_damaged_folder_is_prepared_again(name: str) -> None:
    corpus = open_spec(MQAR)
    before = content(corpus.folder)
    (corpus.folder / name).write_bytes(b"truncated")
    assert content(open_spec(MQAR).folder) == before
    assert not [path for path in corpus.folder.parent.iterdir() if path.suffix == ".tmp"]


def test_epoch_visits_every_instance_once_and_scores_its_answers() -> None:
    train = open_spec(MQAR).train
    begins = train.documents[:, 0].tolist()
    answers = {tuple(train.tokens[at - 1 : at + 20].tolist()): scored(train, at - 1, 20).tolist() for at in begins}
    steps = [get_batch(train, seed=3, step=step, batch_size=8, context=20) for step in range(30)]
    drawn = np.concatenate([step.tokens for step in steps])
    masks = np.concatenate([step.scored for step in steps if step.scored is not None])
    orders = [[tuple(row) for row in drawn[60 * epoch : 60 * epoch + 60].tolist()] for epoch in range(4)]
    for order in orders:
        assert sorted(order) == sorted(answers)
    assert len({tuple(order) for order in orders}) == 4
    assert masks.shape == (240, 20)
    assert masks.tolist() == [answers[tuple(row)] for row in drawn.tolist()]


def test_only_answers_are_scored() -> None:
    corpus = open_spec(NEEDLE)
    for split in (corpus.validation, corpus.test):
        split_windows = windows(split, context=96)
        assert [window.document for window in split_windows] == list(range(len(split.documents)))
        for window in split_windows:
            mask = scored(split, window.begin, window.length)
            assert np.flatnonzero(mask).tolist() == list(range(window.length - 5, window.length))
    assert scored(corpus.test, 0, 200).sum() == 20


def test_batch_needs_the_task_length_and_enough_instances() -> None:
    corpus = open_spec(NEEDLE)
    with pytest.raises(UsageError, match=r"context is 64, but the task's instances have 48 tokens: .*--context 48"):
        get_batch(corpus.train, seed=0, step=0, batch_size=2, context=64)
    with pytest.raises(UsageError, match="have 48 or 96 tokens"):
        get_batch(corpus.test, seed=0, step=0, batch_size=2, context=48)
    with pytest.raises(UsageError, match=r"batch size 31 is too large .* 30 training instances.*lower --batch"):
        get_batch(corpus.train, seed=0, step=0, batch_size=31, context=48)
    with pytest.raises(UsageError, match="batch size must be at least 1, got 0"):
        get_batch(corpus.train, seed=0, step=0, batch_size=0, context=48)


def test_task_requires_its_own_tokenizer(tmp_path: Path) -> None:
    corpus = open_spec(MQAR)
    other = "mqar:pairs=3,length=40,train=20,validation=5,each=5"
    assert open_corpus(CorpusConfig(source=other), tokenizer=corpus.tokenizer).vocabulary == corpus.vocabulary
    for tokenizer, hint in ((ByteTokenizer(), "on text"), (WordTokenizer(["k0", "v0"]), "on a task .* trained on")):
        with pytest.raises(UsageError, match=rf"differs from the 130 tokens of mqar:.*evaluate the model {hint}$"):
            open_corpus(CorpusConfig(source=MQAR), tokenizer=tokenizer)
    with pytest.raises(UsageError, match="mqar has its own word tokenizer, got --tokens bpe"):
        open_corpus(CorpusConfig(source=MQAR, tokens="bpe"))
    (tmp_path / "text.txt").write_text("k0 v0 " * 2000)
    with pytest.raises(UsageError, match=r"text.txt is text, which the word list of a recall task cannot encode"):
        open_corpus(CorpusConfig(source=str(tmp_path / "text.txt")), tokenizer=corpus.tokenizer)


def test_task_decodes_to_its_words() -> None:
    corpus = open_spec(NEEDLE)
    begin, end = corpus.test.documents[0]
    text = corpus.decode(corpus.test.tokens[begin - 1 : end + 1]).decode()
    assert text.startswith("the number of ")
    assert corpus.tokenizer.encode(text.encode()) == corpus.test.tokens[begin:end].tolist()
