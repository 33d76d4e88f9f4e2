import io
from types import ModuleType

import pytest
from rich.console import Console

from qkflow.experiment.summary import ExperimentResult
from qkflow.report import rows, terminal

EIGHT = (
    "standard",
    "differential",
    "coupled",
    "qdelta",
    "kuramoto",
    "a+b",
    "standard:window=64",
    "differential:window=64",
)


def printed(summary: ExperimentResult, width: int = 80, *, colours: bool = False) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=colours, color_system="standard" if colours else None).print(
        terminal(summary)
    )
    return out.getvalue()


@pytest.mark.parametrize("seeds", [0, 1, 2, 10])
def test_the_terminal_table_fits_eighty_columns(synthetic: ModuleType, seeds: int) -> None:
    text = printed(synthetic.study(EIGHT, seeds=seeds, failed=[("qdelta", 0)]))
    assert max(len(line) for line in text.splitlines()) <= 80
    for name in EIGHT:
        assert name[:8] in text


def test_the_terminal_shows_what_the_page_shows(synthetic: ModuleType) -> None:
    summary = synthetic.study(EIGHT, seeds=5)
    text = printed(summary, 200)
    for _, kind, mean, ends, p, _ in rows.verdicts(summary).rows:
        assert kind in text
        assert f"{mean} ({ends})" in text
        assert p in text
    for verdict in summary.verdicts:
        assert verdict.sentence in text
    for row in rows.costs(summary).rows:
        assert row[1] in text


def test_without_a_terminal_it_is_plain(synthetic: ModuleType) -> None:
    assert "\x1b" not in printed(synthetic.study(EIGHT))
    assert "\x1b" in printed(synthetic.study(EIGHT), colours=True)


def test_names_cannot_write_to_the_terminal(synthetic: ModuleType) -> None:
    text = printed(synthetic.study(("standard", *synthetic.HOSTILE), seeds=2))
    assert not {"\x1b", "\x00", "\x07", "\u202e"} & set(text)
    assert "[bold red]" in text  # markup is text


def test_failures_remarks_and_what_is_unfinished_are_said(synthetic: ModuleType) -> None:
    text = printed(synthetic.study(EIGHT[:2], seeds=1, unfinished=True, failed=[("differential", 0)]), 200)
    assert "differential: seed 0: the loss was not finite" in text
    assert "One seed only" in text
    assert "unfinished: 0 of 2 runs" in text


def test_the_answer_is_one_line_whatever_the_arms(synthetic: ModuleType) -> None:
    assert rows.answer(synthetic.study()).startswith("differential is worse than standard")
    many = rows.answer(synthetic.study(EIGHT, seeds=10))
    assert many.startswith("Better than standard: coupled")
    assert all(name in many for name in EIGHT[1:])
    assert rows.answer(synthetic.study(("standard",))) == "There is no verdict yet."


def test_what_could_not_be_measured_is_said_in_words(synthetic: ModuleType) -> None:
    none = synthetic.study(EIGHT[:2], seeds=0)
    assert rows.verdicts(none).rows[0][3] == "no pair of runs"
    assert rows.spreads(none).rows[0][4] == "too few seeds"
    one = synthetic.study(EIGHT[:2], seeds=1)
    assert rows.verdicts(one).rows[0][3] == "no interval"


def test_tuning_shows_every_rate_and_which_failed(synthetic: ModuleType) -> None:
    assert rows.tuning(synthetic.study()) is None
    table = rows.tuning(synthetic.study(tuned=True))
    assert table is not None
    assert table.columns == ("arm", "chosen", "0.001", "0.003", "0.01")
    assert table.rows[0] == ("standard", "0.003", "2.4000", "2.3100", "failed")


def test_a_table_with_a_crooked_row_is_refused() -> None:
    with pytest.raises(ValueError, match="2 cells"):
        rows.Table(caption="x", columns=("a", "b"), rows=(("1",),))
