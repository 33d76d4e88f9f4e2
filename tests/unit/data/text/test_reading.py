"""Compressed, archived and damaged files."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import random
import zipfile
from pathlib import Path

import pytest

from qkflow.data.text import reading
from qkflow.errors import UsageError

TEXT = random.Random(0).randbytes(20_000).hex().encode()
COMPRESS = {".txt": bytes, ".txt.gz": gzip.compress, ".txt.xz": lzma.compress, ".log.bz2": bz2.compress}


def write_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {file.label: b"".join(reading.iter_blocks(file)) for file in reading.iter_files(path)}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_all_compressions_give_the_same_text(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(COMPRESS[suffix](TEXT))
    assert contents(path) == {"": TEXT}


def test_lines_of_a_compressed_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one\n\ntwo\r\nthree"))
    file = next(reading.iter_files(path))
    assert list(reading.iter_lines(file)) == [b"one\n", b"\n", b"two\r\n", b"three"]


def test_folder_yields_text_files_in_path_order(tmp_path: Path) -> None:
    expected = ["b/c.md", "b.txt", "a.py", "z.jsonl.gz", "b/README"]
    others = [".hidden.txt", ".git/config.txt", "picture.png", "b/data.csv", "b/__pycache__/x.pyc"]
    for name in expected + others:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(gzip.compress(b"text") if name.endswith(".gz") else b"text")
    junk = {"__MACOSX/one.txt": b"x", "in/.one.txt": b"x"}
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    write_zip(
        tmp_path / "m.zip", {"in/one.txt": b"text", "in/two.png": b"x", "three.txt.gz": gzip.compress(b"text"), **junk}
    )
    labels = ["a.py", "b.txt", "b/README", "b/c.md", "m.zip/in/one.txt", "m.zip/three.txt", "z.jsonl"]
    assert contents(tmp_path) == dict.fromkeys(labels, b"text")
    assert list(contents(tmp_path)) == labels


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("suffix", [".txt.gz", ".txt.xz", ".log.bz2", ".zip"])
def test_truncated_file_raises_one_line_error(tmp_path: Path, suffix: str, keep: float) -> None:
    path = tmp_path / f"a{suffix}"
    if suffix == ".zip":
        write_zip(path, {"a.txt": TEXT})
    else:
        path.write_bytes(COMPRESS[suffix](TEXT))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(UsageError, match=rf"a{suffix} (is damaged or truncated|cannot be read).*again") as caught:
        contents(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zip"])
def test_file_with_the_wrong_suffix_raises(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"plain text, whatever the name")
    with pytest.raises(UsageError, match=rf"a{suffix} .*again"):
        contents(path)


def test_corrupt_zip_member_raises(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "a.zip", {"a.txt": TEXT})
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"a\.zip:a\.txt is damaged"):
        contents(path)


def test_encrypted_zip_raises(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "a.zip", {"a.txt": b"text"})
    data = bytearray(path.read_bytes())
    data[6] |= 1  # encryption flag in the member's header
    data[data.rindex(b"PK\x01\x02") + 8] |= 1  # and in the directory
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"cannot be unpacked .*first"):
        contents(path)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.parquet", "a.zst"])
def test_unsupported_suffix_raises(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UsageError, match="is not a text file: unpack it"):
        contents(tmp_path / name)


def test_deleted_file_raises(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x")
    file = next(reading.iter_files(tmp_path))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UsageError, match=r"a\.txt cannot be read \(No such file"):
        list(reading.iter_blocks(file))


def test_pipes_are_refused_only_where_a_file_would_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"text")
    for name in (".hidden.txt", "daemon.sock"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "dangling.txt").symlink_to("nowhere")
    assert contents(tmp_path) == {"a.txt": b"text"}
    os.mkfifo(tmp_path / "data.json")
    with pytest.raises(UsageError, match="not a regular file"):
        reading.read_json(tmp_path / "data.json", "an object")
    with pytest.raises(UsageError, match="not a regular file"):
        reading.files_with_suffix(tmp_path, ".json")


def test_a_json_file_of_several_blocks_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": "' + "x" * 100 + '"}')
    monkeypatch.setattr(reading, "BLOCK_BYTES", 8)
    assert reading.read_json(path, "an object") == {"a": "x" * 100}
    monkeypatch.setattr(reading, "MAX_JSON_BYTES", 100)
    with pytest.raises(UsageError, match="larger than 100 B: expected an object"):
        reading.read_json(path, "an object")
