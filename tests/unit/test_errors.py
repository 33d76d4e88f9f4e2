from __future__ import annotations

import pytest

from qkflow.errors import BusyError, CheckpointError, DiskError, UsageError, unknown


def test_an_unknown_name_is_answered_with_the_nearest_known_one() -> None:
    error = unknown("size", "1mm", ["5m", "1m", "150m"])
    assert isinstance(error, UsageError)
    assert str(error) == "unknown size '1mm': did you mean '1m'? Known: 150m, 1m, 5m"


def test_a_name_near_to_none_is_answered_with_the_known_ones_alone() -> None:
    assert str(unknown("law", "xyz", ["padding", "packing"])) == "unknown law 'xyz': Known: packing, padding"


def test_an_unknown_name_among_none_is_still_one_line() -> None:
    assert "\n" not in str(unknown("run", "a", []))


@pytest.mark.parametrize("kind", [CheckpointError, BusyError])
def test_what_a_user_can_put_right_is_a_usage_error_and_a_value_error(kind: type[Exception]) -> None:
    assert issubclass(kind, UsageError)
    assert issubclass(kind, ValueError)


def test_a_full_disk_is_not_the_users_mistake() -> None:
    assert issubclass(DiskError, OSError)
    assert not issubclass(DiskError, UsageError)
