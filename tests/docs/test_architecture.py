"""docs/architecture.md names existing files, keeps its paths short, and its picture shows every package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()


def files_in_table(heading: str) -> list[str]:
    """The files in the table below a heading."""
    section = re.split(r"^#+ ", PAGE.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^\| `(src/[^`]+)` \|", section, re.MULTILINE)


def test_every_file_exists() -> None:
    missing = [path for path in re.findall(r"`((?:src|tests)/[^`]+)`", PAGE) if not (ROOT / path).exists()]
    assert not missing, f"docs/architecture.md names missing files: {missing}"


@pytest.mark.parametrize(
    ("heading", "most"),
    [
        ("The path of `qkflow compare`", 12),
        ("Standard and differential attention", 6),
        ("Coupled attention", 6),
        ("Delta-rule mechanisms", 6),
        ("Kuramoto and group attention", 6),
    ],
)
def test_paths_are_short(heading: str, most: int) -> None:
    assert 3 <= len(files_in_table(heading)) <= most


def test_the_picture_shows_every_package() -> None:
    picture = (ROOT / "docs/architecture.svg").read_text()
    shown = set(re.findall(r"\w+", " ".join(re.findall(r'class="name">([^<]+)<', picture))))
    paths = [path for path in (ROOT / "src/qkflow").iterdir() if path.suffix in ("", ".py")]
    assert shown == {path.stem for path in paths if not path.stem.startswith("_")}
