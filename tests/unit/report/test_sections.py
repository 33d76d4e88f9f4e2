import pytest

from qkflow.formatting import format_interval
from qkflow.report.sections import Column, Table, number_column, text_column

COLUMNS = (
    text_column("arm"),
    Column(title="interval", keys=("low", "high"), format=format_interval),
    number_column("steps", "steps", is_setting=True),
)


def table(*rows: tuple[str | float | None, ...]) -> Table:
    return Table(caption="Arms", columns=COLUMNS, rows=rows)


def test_rows_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 4 values"):
        table(("a", 1.0, 2.0))


def test_columns_are_selected_with_all_their_values() -> None:
    selected = table(("a", 1.0, 2.0, 30), ("b", None, None, 40)).select(["low", "arm"])
    assert selected.rows == ((1.0, 2.0, "a"), (None, None, "b"))
    assert selected.texts() == [("+1.0000 to +2.0000", "a"), ("no interval", "b")]


def test_a_setting_that_is_the_same_in_every_row_moves_to_the_caption() -> None:
    same = table(("a", 1.0, 2.0, 30), ("b", 1.0, 2.0, 30), ("c", 1.0, 2.0, None)).without_settings()
    assert same.caption == "Arms (steps: 30)"
    assert [column.title for column in same.columns] == ["arm", "interval"]  # a result stays, even if constant
    different = table(("a", 1.0, 2.0, 30), ("b", 1.0, 2.0, 40))
    assert different.without_settings() == different
