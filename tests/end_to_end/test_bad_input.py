"""Input that nobody expects: one line and exit code 2, no traceback, and no folder left behind."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qkflow.cli import main
from qkflow.data.text import reading
from qkflow.training.reproducibility import threads

Command = Callable[..., str]
pytestmark = pytest.mark.usefixtures("workspace")
TRAIN = ("train", "text.txt", "--config", "tiny.json")
LONG = "x" * 300
PIPES = (
    *("pipe.txt", "pipe.gz", "pipe.zip", "pipe.tar", "pipes/pipe.md", "bare/pipe", "sst2/train.tsv"),
    "squad/train.json",
)


def write_config(name: str, **changes: Any) -> str:
    """`tiny.json` with some settings changed."""
    Path(name).write_text(json.dumps({**json.loads(Path("tiny.json").read_text()), **changes}))
    return name


CALLS = {
    "too many threads in a config": ([*TRAIN[:2], "--config", "threads.json"], "threads must be at most"),
    "too many threads of a study": (["compare", "text.txt", "--threads", "100000000"], "threads must be at most"),
    "seed of 65 bits": ([*TRAIN, "--seed", str(2**64)], "--seed must be between -2^63 and 2^63"),
    "seed of 65 bits in a config": ([*TRAIN[:2], "--config", "seed.json"], "between -2^63 and 2^63"),
    "seed of 65 bits of a sample": (["generate", "run", "--seed", str(2**64)], "--seed must be between"),
    "first seed of 63 bits": (["compare", "text.txt", "--first-seed", str(2**63 - 1)], "first_seed must be"),
    "long corpus": (["train", LONG], "name too long"),
    "long config": (["train", "--config", LONG + ".json"], "name too long"),
    "long output folder": ([*TRAIN, "--out", f"new/{LONG}"], "name too long"),
    "long run": (["eval", LONG], "name too long"),
    "long study": (["report", LONG], "name too long"),
    "long table": (["judge", LONG], "name too long"),
    "deeply nested JSON": ([*TRAIN[:2], "--config", "deep.json"], "deep.json cannot be read"),
    "deeply nested TOML": ([*TRAIN[:2], "--config", "deep.toml"], "deep.toml cannot be read"),
    "NUL in a path": (["train", "--config", "nul.json"], "without NUL"),
    "width of zero": (["check", "standard", "--width", "0"], "width and heads must be at least 1"),
    "callable that makes no module": (["check", "os:system"], "cannot build a layer: system("),
    "module of another kind": (["check", "returns_three:make"], "returned int, expected an nn.Module"),
    "option given twice": (["check", "standard:window=4,window=5"], "window twice"),
    "infinite temperature": (["generate", "run", "--temperature=inf"], "--temperature must be between -2^63 and 2^63"),
    "empty stop string": (["generate", "run", "--stop="], "--stop is empty"),
    "empty output folder": ([*TRAIN[:4], "--out", ""], "--out is empty"),
    "empty corpus": (["train", ""], "an argument is empty"),
    "empty corpus after a switch": (["train", "--binary", ""], "an argument is empty"),
    "empty run": (["generate", "--tokens", "3", ""], "an argument is empty"),
    "empty option with an underscore": ([*TRAIN, "--data_dir", ""], "--data_dir is empty"),
    "not a finite number": (["generate", "run", "--top-p", "nan"], "--top-p must be between -2^63 and 2^63"),
    "only NUL bytes": (["train", "nul.txt", *TRAIN[2:]], "--binary"),
    "NUL bytes in a folder": (
        ["train", "nul", *TRAIN[2:]],
        "nul/b.txt is not text (66.7% of the bytes of nul are NUL)",
    ),
    "UTF-16": (["train", "utf16.txt", *TRAIN[2:]], "utf16.txt is UTF-16"),
    "UTF-32": (["train", "utf32.txt", *TRAIN[2:]], "utf32.txt is UTF-32"),
    "binary file": (["train", "binary.txt", *TRAIN[2:]], "--binary"),
    "pipe as a corpus": (["train", "pipe.txt"], "pipe.txt is not a regular file"),
    "pipe as a compressed corpus": (["train", "pipe.gz"], "pipe.gz is not a regular file"),
    "pipe as an archive": (["train", "pipe.zip"], "pipe.zip is not a regular file"),
    "pipe in a corpus folder": (["train", "pipes"], "pipes/pipe.md is not a regular file"),
    "pipe without a suffix in a folder": (["compare", "bare"], "bare/pipe is not a regular file"),
    "pipe as agreement data": (["sharpen", "--data", "pipe.txt"], "pipe.txt is not a regular file"),
    "pipe as a BLiMP archive": (["sharpen", "--data", "pipe.tar"], "pipe.tar is not a regular file"),
    "pipe as SST-2": (["sharpen", "--task", "sst2", "--data", "sst2"], "train.tsv is not a regular file"),
    "pipe as SQuAD": (["sharpen", "--task", "squad", "--data", "squad"], "train.json is not a regular file"),
    "pipe as a config": ([*TRAIN[:2], "--config", "pipe.txt"], "pipe.txt is not a regular file"),
    "pipe as a table": (["judge", "pipe.txt"], "pipe.txt is not a regular file"),
}


@pytest.mark.parametrize("case", CALLS)
def test_bad_input_is_refused_with_one_line(usage_error: Command, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # importing a module creates no __pycache__
    write_config("threads.json", threads=100_000_000)
    write_config("seed.json", seed=2**64)
    write_config("nul.json", data={"source": "enwik8", "data_dir": "a\0b"})
    Path("deep.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    Path("deep.toml").write_text("a = " + "[" * 100_000 + "]" * 100_000)
    Path("returns_three.py").write_text("def make(width, heads, layer, layers):\n    return 3\n")
    Path("nul.txt").write_bytes(b"\0" * 20_000)
    Path("nul").mkdir()
    for name, content in {"a.txt": b"a\0" * 5000, "b.txt": bytes(15_000), "c.txt": b"c" * 5000}.items():
        Path("nul", name).write_bytes(content)
    for encoding in ("utf-16", "utf-32"):
        Path(f"{encoding.replace('-', '')}.txt").write_bytes("文字\n".encode(encoding) * 2000)
    Path("binary.txt").write_bytes(random.Random(0).randbytes(20_000))
    for name in PIPES:
        Path(name).parent.mkdir(exist_ok=True)
        os.mkfifo(name)
    before = set(Path().iterdir())
    args, expected = CALLS[case]
    is_new_run = args[0] == "train" and "--out" not in args
    assert expected in usage_error(*args, *(["--out", "new/run"] if is_new_run else []))
    assert set(Path().iterdir()) == before


def test_values_with_an_equals_sign_and_empty_prompts_are_accepted(qkflow: Command, run_copy: str) -> None:
    for args in (["--stop=="], ["--stop=a="], ["", "--temperature=0"], ["--", "", "--x="], ["--seed", "1", ""]):
        qkflow("generate", run_copy, "--tokens", "1", *args)


def test_an_empty_prompt_after_an_unknown_flag_is_not_its_value(usage_error: Command, run_copy: str) -> None:
    assert "--json" in usage_error("generate", run_copy, "--json", "")


def test_a_failed_start_removes_the_folders_that_it_created() -> None:
    Path("mine").mkdir()
    huge = write_config("huge.json", model={"width": 10**8, "layers": 1, "heads": 1, "hidden": 8})
    for out in ("new/run", "mine/run", "mine"):
        assert main(["train", "text.txt", "--config", huge, "--out", out]) == 1
    assert not Path("new").exists()
    assert Path("mine").is_dir()
    assert not Path("mine/run").exists()


def test_out_of_memory_is_one_line_that_says_what_to_reduce(capsys: pytest.CaptureFixture[str]) -> None:
    huge = write_config("huge.json", model={"width": 10**8, "layers": 1, "heads": 1, "hidden": 8})
    assert main(["train", "text.txt", "--config", huge, "--out", "run"]) == 1
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0
    assert "out of memory" in error
    assert "--batch, --context or --size" in error


def test_the_threads_of_an_altered_run_are_refused(usage_error: Command, run_copy: str) -> None:
    Path(run_copy, "weights.safetensors").unlink()
    path = Path(run_copy, "environment.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "threads": 10**8}))
    assert "threads must be at most" in usage_error("train", "--resume", run_copy)
    with threads(1):
        pass


@pytest.mark.parametrize("name", ["metrics.jsonl", "weights.safetensors", "environment.json", "checkpoints/pipe"])
def test_a_pipe_in_a_run_folder_is_refused(usage_error: Command, run_copy: str, name: str) -> None:
    Path(run_copy, name).unlink(missing_ok=True)
    os.mkfifo(Path(run_copy, name))
    for command in (["train", "--resume"], ["eval"], ["generate"], ["probe"]):
        assert f"{name} is not a regular file" in usage_error(*command, run_copy)


def test_probe_refuses_a_pipe(usage_error: Command, run_copy: str) -> None:
    os.mkfifo("pipe")
    assert "pipe is not a regular file" in usage_error("probe", run_copy, "--file", "pipe")


@pytest.mark.parametrize("out", [".", "/", "folder"])
def test_a_page_is_not_written_over_a_folder(usage_error: Command, run_copy: str, out: str) -> None:
    Path("folder").mkdir()
    assert f"could not write {out}" in usage_error("probe", run_copy, "the fox", "--out", out)


CHANGES = {
    "config.json": (
        b'"norm_eps": 1e-05',
        b'"norm_eps": 1e-01',
        (["eval"], ["generate"], ["probe"], ["train", "--init"]),
    ),
    "tokenizer.json": (b"}", b" }", (["eval"], ["generate"])),
    "metrics.jsonl": (b'"bits_per_byte": 8', b'"bits_per_byte": 9', (["train", "--resume"],)),
    "documents.npy": (b"\x00\x00\x00\x00\x00\x00", b"\x00\x00\x01\x00\x00\x00", (["train", "--resume"],)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_file_of_a_run_is_refused(usage_error: Command, run_copy: str, name: str) -> None:
    path = Path(run_copy, name)
    old, new, commands = CHANGES[name]
    assert old in path.read_bytes()
    path.write_bytes(new.join(path.read_bytes().rsplit(old, 1)))
    for command in commands:
        assert f"{name} does not match its checksum" in usage_error(*command, run_copy)


def test_changed_data_and_metrics_give_a_note(run_copy: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(json.loads(Path(run_copy, "config.json").read_text())["data"]["source"])
    text = source.read_text()
    try:
        source.write_text(text.replace("fox", "cat"))
        assert main(["eval", run_copy]) == 0
    finally:
        source.write_text(text)
    assert "text has changed since the run was trained on it (its SHA-256 was " in capsys.readouterr().err
    Path(run_copy, "weights.safetensors").unlink()
    metrics = Path(run_copy, "metrics.jsonl")
    metrics.write_text(metrics.read_text().replace("8.0", "9.0", 1) + '{"a":' * 100_000)
    assert main(["train", "--resume", run_copy]) == 0
    captured = capsys.readouterr()
    assert "metrics.jsonl was changed" in captured.out + captured.err


def test_a_long_line_in_a_small_archive_is_refused(usage_error: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole line is never read."""
    reads: list[int] = []

    class Line(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            reads.append(len(buffer))
            assert sum(reads) < 1 << 20
            buffer[:] = b"x" * len(buffer)
            return len(buffer)

    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 1 << 16)
    Path("line.jsonl.gz").write_bytes(gzip.compress(b'{"text": "' + b"x" * (1 << 20) + b'"}\n'))
    assert "line 1 is longer than 64 KiB" in usage_error("train", "line.jsonl.gz", *TRAIN[2:])
    monkeypatch.setitem(reading.COMPRESSIONS, ".gz", lambda *_: io.BufferedReader(Line()))
    assert "line 1 is longer than 64 KiB" in usage_error("train", "line.jsonl.gz", *TRAIN[2:])


def test_binary_data_is_read_with_an_option_and_other_encodings_with_a_note(qkflow: Command) -> None:
    Path("binary.txt").write_bytes(random.Random(0).randbytes(20_000))
    assert "not UTF-8" not in qkflow("train", "binary.txt", *TRAIN[2:], "--binary", "--out", "binary")
    assert "bits per byte" in qkflow("eval", "binary")  # the run remembers the option
    Path("latin.txt").write_bytes("café crème\n".encode("latin-1") * 2000)
    output = qkflow("train", "latin.txt", *TRAIN[2:], "--out", "latin")
    assert "latin.txt is not UTF-8 at byte 3" in output


def test_control_characters_of_file_names_are_escaped(qkflow: Command, usage_error: Command) -> None:
    name = "a\x1b[31m\x9b\nb"
    assert "a\\x1b[31m\\x9b\\nb" in usage_error("eval", name)
    assert "a\\x1b[31m\\x9b" in usage_error("eval", "run", "text.txt", name)
    output = qkflow(*TRAIN, "--out", name)
    assert "saved in a\\x1b[31m\\x9b\\nb" in output
    assert "\x1b" not in output
    Path(f"{name}.txt").write_text(Path("text.txt").read_text())
    assert "\x1b" not in qkflow("eval", name, f"{name}.txt")


def test_a_terminal_without_unicode_gets_replacements(trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["generate", str(trained_run), "caf\N{EM DASH}é", "--tokens", "3"]) == 0
    assert main(["check", "standard", "--law", "causality"]) == 0
    stream.flush()
    assert stream.buffer.getvalue().startswith(b"caf??")  # type: ignore[attr-defined]
