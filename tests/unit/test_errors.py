from __future__ import annotations

import pytest

from qkflow.errors import BusyError, CheckpointError, DiskError, UsageError, unknown


def test_unknown_suggests_a_similar_name() -> None:
    error = unknown("size", "1mm", ["5m", "1m", "150m"])
    assert isinstance(error, UsageError)
    assert str(error) == "unknown size '1mm': did you mean '1m'? Known: 150m, 1m, 5m"


def test_unknown_without_similar_name_lists_the_known_ones() -> None:
    assert str(unknown("law", "xyz", ["padding", "packing"])) == "unknown law 'xyz': Known: packing, padding"


def test_unknown_without_known_names_is_one_line() -> None:
    assert "\n" not in str(unknown("run", "a", []))


@pytest.mark.parametrize("kind", [CheckpointError, BusyError])
def test_user_errors_are_value_errors(kind: type[Exception]) -> None:
    assert issubclass(kind, UsageError)
    assert issubclass(kind, ValueError)


def test_disk_error_is_not_a_usage_error() -> None:
    assert issubclass(DiskError, OSError)
    assert not issubclass(DiskError, UsageError)
