import io
from types import ModuleType

import pytest
from rich.console import Console

from qkflow.experiment.summary import ExperimentResult
from qkflow.report import terminal
from qkflow.report.study import comparison_table, cost_table

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


def printed(result: ExperimentResult, width: int = 80, *, colors: bool = False) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=colors, color_system="standard" if colors else None).print(
        terminal(result)
    )
    return out.getvalue()


@pytest.mark.parametrize("seeds", [0, 1, 10])
def test_tables_fit_80_columns(synthetic: ModuleType, seeds: int) -> None:
    text = printed(synthetic.study(EIGHT, seeds=seeds, failed=[("qdelta", 0)]))
    assert max(len(line) for line in text.splitlines()) <= 80
    for name in EIGHT:
        assert name[:8] in text


def test_the_terminal_shows_the_rows_of_the_page(synthetic: ModuleType) -> None:
    result = synthetic.study(EIGHT, seeds=5)
    text = printed(result)
    table = comparison_table(result)
    for row in (*table.select(table.terminal).texts(), *cost_table(result).select(["name", "parameters"]).texts()):
        assert any(line.startswith(row[0][:12]) and all(c in line for c in row[1:]) for line in text.splitlines()), row
    for verdict in result.verdicts:
        assert verdict.sentence in " ".join(text.split())


def test_output_to_a_file_is_plain_text(synthetic: ModuleType) -> None:
    assert "\x1b" not in printed(synthetic.study(EIGHT))
    assert "\x1b" in printed(synthetic.study(EIGHT), colors=True)


def test_names_cannot_control_the_terminal(synthetic: ModuleType) -> None:
    text = printed(synthetic.study(("standard", *synthetic.HOSTILE), seeds=2))
    assert not {"\x1b", "\x00", "\x07", "\u202e"} & set(text)
    assert "[bold red]" in text  # markup is not interpreted


def test_failures_remarks_and_progress_are_shown(synthetic: ModuleType) -> None:
    text = printed(synthetic.study(EIGHT[:2], seeds=1, unfinished=True, failed=[("differential", 0)]), 200)
    assert "differential: seed 0: the loss was not finite" in text
    assert "One seed only" in text
    assert "0 of 2 runs are finished, 1 failed" in text
