"""Specs of recall tasks, and errors for invalid ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data import CORPUS_NAMES, RECALL_TASKS, CorpusConfig, open_corpus
from qkflow.data.recall import MQAR, Needle, format_recall_spec, is_recall_task, parse_recall_spec
from qkflow.errors import UsageError


def test_spec_sets_options_that_differ_from_the_defaults() -> None:
    assert parse_recall_spec("mqar") == MQAR()
    assert parse_recall_spec("mqar:") == MQAR()
    assert parse_recall_spec("mqar:pairs=4, length=32 ,train=1_000") == MQAR(pairs=(4,), length=32, train=1000)
    assert parse_recall_spec("s-niah-3") == Needle(kind=3)
    spec = "s-niah-2:length=64,lengths=64+128,depths=0+100,answer=word"
    assert parse_recall_spec(spec) == Needle(kind=2, length=64, lengths=(64, 128), depths=(0, 100), answer="word")


@settings(deadline=None, max_examples=25)
@given(
    name=st.sampled_from([name for name in RECALL_TASKS if name != "mqar"]),
    lengths=st.none() | st.lists(st.integers(50, 99), min_size=1, unique=True).map(tuple),
    answer=st.sampled_from([None, "number", "id", "word"]),
    seed=st.integers(),
)
def test_spec_round_trip(name: str, lengths: tuple[int, ...] | None, answer: str | None, seed: int) -> None:
    task = Needle(kind=int(name[-1]), lengths=lengths, answer=answer, seed=seed)  # type: ignore[arg-type]
    assert format_recall_spec(task).partition(":")[0] == name
    assert parse_recall_spec(format_recall_spec(task)) == task
    assert format_recall_spec(parse_recall_spec(name)) == name


def test_is_task() -> None:
    assert [is_recall_task(source) for source in ("mqar", "mqar:pairs=4", "s-niah-1:")] == [True] * 3
    assert [is_recall_task(source) for source in ("", "mqar.txt", "folder/mqar", "hf:mqar", "s-niah")] == [False] * 5
    assert set(RECALL_TASKS) <= set(CORPUS_NAMES)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("mqr", "unknown corpus 'mqr': did you mean 'mqar'"),
        ("mqr:pairs=4", "unknown corpus 'mqr': did you mean 'mqar'"),
        ("s-niah:length=64", "unknown corpus 's-niah': did you mean 's-niah-"),
        ("mqar:pair=4", "unknown option of mqar 'pair': did you mean 'pairs'"),
        ("mqar:pairs=x", r"mqar: pairs=x is invalid: expected integers joined by \+"),
        ("mqar:pairs=", "mqar: pairs= is invalid"),
        ("mqar:length=64+128", r"length=64\+128 is invalid: expected one integer"),
        ("mqar:pairs=4,8", r"got '8'; join the numbers of a list with \+"),
        ("mqar:pairs", "expected key=value after the colon, got 'pairs'"),
        ("mqar:keys=9,keys=10", "sets keys twice"),
        ("s-niah-1:kind=2", "unknown option of s-niah-1 'kind'"),
        ("s-niah-1:answer=nmber", "unknown answer of s-niah-1 'nmber': did you mean 'number'"),
        ("s-niah-1:answer=", "unknown answer of s-niah-1 ''"),
        ("mqar:pairs=65,length=260", "65 pairs need 65 keys"),
    ],
)
def test_invalid_spec_raises_one_line_error(source: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        open_corpus(CorpusConfig(source=source))
    assert "\n" not in str(caught.value)


def test_unknown_task_raises() -> None:
    with pytest.raises(UsageError, match="unknown task 'mqr': did you mean 'mqar'"):
        parse_recall_spec("mqr")
