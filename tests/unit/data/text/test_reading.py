"""Compressed, packed and damaged files."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
import zipfile
from pathlib import Path

import pytest

from qkflow.data.text import reading
from qkflow.errors import UsageError

TEXT = random.Random(0).randbytes(20_000).hex().encode()
PACK = {".txt": bytes, ".txt.gz": gzip.compress, ".txt.xz": lzma.compress, ".log.bz2": bz2.compress}


def packed(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {entry.label: b"".join(reading.blocks(entry)) for entry in reading.entries(path)}


@pytest.mark.parametrize("ending", PACK)
def test_every_compression_gives_the_same_text(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    path.write_bytes(PACK[ending](TEXT))
    assert contents(path) == {"": TEXT}


def test_lines_and_blocks_are_the_same_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one\n\ntwo\r\nthree"))
    entry = next(reading.entries(path))
    assert list(reading.lines(entry)) == [b"one\n", b"\n", b"two\r\n", b"three"]


def test_a_folder_gives_its_texts_in_order_of_path_and_nothing_else(tmp_path: Path) -> None:
    wanted = ["b/c.md", "b.txt", "a.py", "z.jsonl.gz", "b/README"]
    others = [".hidden.txt", ".git/config.txt", "picture.png", "b/data.csv", "b/__pycache__/x.pyc"]
    for name in wanted + others:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(gzip.compress(b"text") if name.endswith(".gz") else b"text")
    junk = {"__MACOSX/one.txt": b"x", "in/.one.txt": b"x"}
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    packed(
        tmp_path / "m.zip", {"in/one.txt": b"text", "in/two.png": b"x", "three.txt.gz": gzip.compress(b"text"), **junk}
    )
    labels = ["a.py", "b.txt", "b/README", "b/c.md", "m.zip/in/one.txt", "m.zip/three.txt", "z.jsonl"]
    assert contents(tmp_path) == dict.fromkeys(labels, b"text")
    assert list(contents(tmp_path)) == labels


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("ending", [".txt.gz", ".txt.xz", ".log.bz2", ".zip"])
def test_a_truncated_file_is_named_in_one_line(tmp_path: Path, ending: str, keep: float) -> None:
    path = tmp_path / f"a{ending}"
    if ending == ".zip":
        packed(path, {"a.txt": TEXT})
    else:
        path.write_bytes(PACK[ending](TEXT))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(UsageError, match=rf"a{ending} (is damaged or truncated|cannot be read).*again") as caught:
        contents(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2", ".zip"])
def test_a_file_that_is_not_what_it_says_is_named(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    path.write_bytes(b"plain text, whatever the name")
    with pytest.raises(UsageError, match=rf"a{ending} .*again"):
        contents(path)


def test_an_altered_member_of_a_zip_is_refused(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.zip", {"a.txt": TEXT})
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"a\.zip:a\.txt is damaged"):
        contents(path)


def test_a_zip_with_a_password_is_refused(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.zip", {"a.txt": b"text"})
    data = bytearray(path.read_bytes())
    data[6] |= 1  # the flag of encryption, in the member's header
    data[data.rindex(b"PK\x01\x02") + 8] |= 1  # and in the directory
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"cannot be unpacked here .*unpack it first"):
        contents(path)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.parquet", "a.zst"])
def test_what_is_not_text_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UsageError, match="is not text: unpack it first"):
        contents(tmp_path / name)


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x")
    entry = next(reading.entries(tmp_path))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UsageError, match=r"a\.txt cannot be read \(No such file"):
        list(reading.blocks(entry))


def test_a_python_built_without_a_compression_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"x"))
    monkeypatch.setitem(reading.COMPRESSIONS, ".xz", "not_a_module")
    with pytest.raises(UsageError, match="built without not_a_module: unpack the file first"):
        contents(tmp_path / "a.txt.xz")
