"""Tasks written down in one line, and what is said of a line that cannot be read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.data import NAMES, TASKS, CorpusConfig, open_corpus
from qkflow.data.recall import MQAR, Needle, from_spec, is_task, to_spec
from qkflow.errors import UsageError


def test_a_spec_says_as_much_of_a_task_as_is_not_usual() -> None:
    assert from_spec("mqar") == MQAR()
    assert from_spec("mqar:") == MQAR()
    assert from_spec("mqar:pairs=4, length=32 ,train=1_000") == MQAR(pairs=(4,), length=32, train=1000)
    assert from_spec("s-niah-3") == Needle(kind=3)
    spec = "s-niah-2:length=64,lengths=64+128,depths=0+100,answer=word"
    assert from_spec(spec) == Needle(kind=2, length=64, lengths=(64, 128), depths=(0, 100), answer="word")


@settings(deadline=None, max_examples=25)
@given(
    name=st.sampled_from([name for name in TASKS if name != "mqar"]),
    lengths=st.none() | st.lists(st.integers(50, 99), min_size=1, unique=True).map(tuple),
    answer=st.sampled_from([None, "number", "id", "word"]),
    seed=st.integers(),
)
def test_a_task_written_down_is_read_as_it_was(
    name: str, lengths: tuple[int, ...] | None, answer: str | None, seed: int
) -> None:
    task = Needle(kind=int(name[-1]), lengths=lengths, answer=answer, seed=seed)  # type: ignore[arg-type]
    assert to_spec(task).partition(":")[0] == name
    assert from_spec(to_spec(task)) == task
    assert to_spec(from_spec(name)) == name


def test_a_task_is_known_by_its_name_and_not_by_a_likeness() -> None:
    assert [is_task(source) for source in ("mqar", "mqar:pairs=4", "s-niah-1:")] == [True] * 3
    assert [is_task(source) for source in ("", "mqar.txt", "folder/mqar", "hf:mqar", "s-niah")] == [False] * 5
    assert set(TASKS) <= set(NAMES)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("mqr", "unknown corpus 'mqr': did you mean 'mqar'"),
        ("mqr:pairs=4", "unknown corpus 'mqr': did you mean 'mqar'"),
        ("s-niah:length=64", "unknown corpus 's-niah': did you mean 's-niah-"),
        ("mqar:pair=4", "unknown option of mqar 'pair': did you mean 'pairs'"),
        ("mqar:pairs=x", r"mqar: pairs=x cannot be read: give whole numbers joined by \+"),
        ("mqar:pairs=", "mqar: pairs= cannot be read"),
        ("mqar:length=64+128", r"length=64\+128 cannot be read: give one whole number"),
        ("mqar:pairs=4,8", r"got '8'; the numbers of a list are joined by \+"),
        ("mqar:pairs", "expected key=value after the colon, got 'pairs'"),
        ("mqar:keys=9,keys=10", "gives keys twice"),
        ("s-niah-1:kind=2", "unknown option of s-niah-1 'kind'"),
        ("s-niah-1:answer=nmber", "unknown answer of s-niah-1 'nmber': did you mean 'number'"),
        ("s-niah-1:answer=", "unknown answer of s-niah-1 ''"),
        ("mqar:pairs=65,length=260", "65 pairs need 65 different keys"),
    ],
)
def test_a_line_that_cannot_be_read_is_told_in_one_line(source: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        open_corpus(CorpusConfig(source=source))
    assert "\n" not in str(caught.value)


def test_an_unknown_task_is_told_from_an_unknown_corpus() -> None:
    with pytest.raises(UsageError, match="unknown task 'mqr': did you mean 'mqar'"):
        from_spec("mqr")
