"""Run commands on damaged run folders, studies, exported models, corpora and tables.

    python benchmarks/fuzz_files.py --count 500

One file is truncated, has bits flipped, is swapped with another, changed to another JSON type, nested deeply, or
replaced by a folder, a pipe or a link. Then a command reads it in a folder of its own, with a time and a memory limit.
No command may show a traceback, crash or hang. One that succeeds on files with checksums gives the result of the
undamaged files, or says what it did not use. `--first 17 --count 1` repeats case 17.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked_commands
from forked_commands import Outcome
from fuzz_commands import CONFIG, TABLE, TEXT, link_kernels
from qkflow.io import checksum

TRAIN = ("--config", "tiny.json", "--out", "new")
INIT = ("train", "text.txt", "--config", "init.json", "--out", "new", "--init")
STUDY = (
    "compare",
    "lines.jsonl.gz",
    "--arms",
    "standard,differential",
    "--size",
    "100k",
    "--seeds",
    "2",
    "--out",
    "study",
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A file or folder that is damaged, and the commands that read it."""

    path: str
    commands: Sequence[Sequence[str]]
    has_checksums: bool = True
    """Whether a change of any byte must be detected, or leave the result as it is."""
    weight: int = 1


TARGETS = (
    Target(
        path="run",
        commands=(
            ["eval", "run"],
            ["generate", "run", "the", "--tokens", "8", "--temperature", "0"],
            ["probe", "run", "the quick", "--json"],
            ["export", "run", "new"],
            ["train", "--resume", "run"],
            [*INIT, "run"],
        ),
        weight=6,
    ),
    Target(path="half", commands=(["train", "--resume", "half"], ["eval", "half"]), weight=4),
    Target(path="bpe", commands=(["eval", "bpe"], ["generate", "bpe", "the", "--tokens", "8"]), weight=2),
    Target(path="text.txt", commands=(["eval", "run"], ["train", "--resume", "half"])),
    Target(
        path="lines.jsonl.gz",
        commands=(["eval", "run", "lines.jsonl.gz"], ["train", "lines.jsonl.gz", *TRAIN]),
        has_checksums=False,
    ),
    Target(path="exported", commands=([*INIT, "exported"],), has_checksums=False, weight=2),
    Target(path="table.csv", commands=(["judge", "table.csv"],), has_checksums=False),
    Target(path="tiny.json", commands=(["train", "text.txt", *TRAIN],), has_checksums=False),
)
STUDIES = (
    Target(path="study", commands=(*[["report", "study"]] * 4, ["compare", "--resume", "study"]), weight=5),
    Target(path="half-study", commands=(["compare", "--resume", "half-study"],)),
)
"""Their commands take seconds each, since they start processes and write pages."""


# ---- undamaged files


def write_files(folder: Path, *, studies: bool) -> None:
    """Everything that commands read."""

    def qkflow(*args: str) -> None:
        outcome = forked_commands.run(args, folder, seconds=300)
        assert outcome.code == 0, outcome

    (folder / "text.txt").write_text(TEXT)
    lines = "".join(json.dumps({"text": line * 9}) + "\n" for line in TEXT.splitlines())
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    (folder / "table.csv").write_text(TABLE)
    (folder / "tiny.json").write_text(json.dumps({**CONFIG, "checkpoint_every": 1}))
    (folder / "init.json").write_text(json.dumps({key: value for key, value in CONFIG.items() if key != "model"}))
    config = {**CONFIG, "data": {"tokens": "bpe", "vocabulary": 300}}
    (folder / "bpe.json").write_text(json.dumps(config))
    qkflow("train", "text.txt", "--config", "tiny.json", "--out", "run")
    qkflow("train", "text.txt", "--config", "bpe.json", "--out", "bpe")
    qkflow("train", "text.txt", "--config", "tiny.json", "--steps", "4", "--out", "half")
    last = sorted((folder / "half" / "checkpoints").iterdir())[-1]
    shutil.rmtree(last)
    for name in ("weights.safetensors", "documents.npy"):
        (folder / "half" / name).unlink()
    qkflow("export", "run", "exported")
    if studies:
        tokens = ("--train-tokens", "2k", "--context", "32", "--batch", "8", "--device", "cpu", "--passes", "100")
        qkflow(*STUDY, *tokens, "--out", "study")
        shutil.copytree(folder / "study", folder / "half-study")
        decisions = folder / "half-study" / "decisions.jsonl"
        records = decisions.read_text().splitlines(keepends=True)
        first_verdict = next(i for i, line in enumerate(records) if json.loads(line)["kind"] == "verdicts")
        last_run = json.loads(records[first_verdict - 1])["folder"]
        decisions.write_text("".join(records[: first_verdict - 1]))
        shutil.rmtree(folder / "half-study" / last_run)


# ---- damages


def truncate(rng: random.Random, path: Path) -> None:
    os.truncate(path, rng.choice((0, rng.randrange(path.stat().st_size + 1))))


def flip_bits(rng: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes() or b"\0")
    for _ in range(rng.choice((1, 1, 1, 20))):
        content[rng.randrange(min(len(content), rng.choice((200, 10**9))))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def overwrite(rng: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes() or b"\0")
    begin = rng.randrange(len(content))
    content[begin : begin + 100] = rng.choice((bytes(100), rng.randbytes(100), b"\xff" * 100, b""))
    path.write_bytes(content)


def append(rng: random.Random, path: Path) -> None:
    path.write_bytes(
        path.read_bytes() + rng.choice((b"\0", b"\n", b"{}\n", b'{"a": 1', rng.randbytes(50), b"x" * 10**6))
    )


def remove(rng: random.Random, path: Path) -> None:
    path.unlink()


def replace_by_folder(rng: random.Random, path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_pipe(rng: random.Random, path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_link(rng: random.Random, path: Path) -> None:
    path.unlink()
    path.symlink_to(rng.choice((path.name, "nowhere", "..", "/dev/zero", ".", "/proc/self/mem")))


def swap(rng: random.Random, path: Path) -> None:
    others = sorted(file for file in WORK.rglob("*") if file.is_file() and file != path)
    other = rng.choice([file for file in others if file.suffix == path.suffix] or others)
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


def write_odd_text(rng: random.Random, path: Path) -> None:
    texts = (
        "[]",
        "null",
        "3",
        '"x"',
        "{}",
        "NaN",
        '{"a":' * 60_000,
        "[" * 60_000,
        "{" + '"a":1,' * 9 + '"a":2}',
        "\ufeff{}",
    )
    path.write_text(rng.choice(texts))


def change_value(rng: random.Random, path: Path) -> None:
    """Change one value of a JSON file, or of a line of it."""
    lines = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
    number = rng.randrange(len(lines))
    value = json.loads(lines[number])
    _change_leaf(rng, value)
    lines[number] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")


def _change_leaf(rng: random.Random, value: Any) -> None:
    keys = [*value] if isinstance(value, dict) else [*range(len(value))] if isinstance(value, list) else []
    if not keys:
        return
    key = rng.choice(keys)
    if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.9:
        _change_leaf(rng, value[key])
        return
    old = value[key]
    number = [old + 1, old * 2, -old] if isinstance(old, int | float) and not isinstance(old, bool) else []
    value[key] = rng.choice(
        number or [None, -1, 0, 10**30, 1e308, float("nan"), "", "x", "\x1b[31m", [], {}, [[[]]], True]
    )


def change_lines(rng: random.Random, path: Path) -> None:
    lines = path.read_bytes().split(b"\n")
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    choice = rng.randrange(3)
    if choice == 0:
        lines[i], lines[j] = lines[j], lines[i]
    elif choice == 1:
        lines.insert(i, lines[j])
    else:
        del lines[i]
    path.write_bytes(b"\n".join(lines))


DAMAGES: tuple[Callable[[random.Random, Path], None], ...] = (
    *(truncate, truncate, flip_bits, flip_bits, flip_bits, overwrite, append, remove, change_lines),
    *(replace_by_folder, replace_by_pipe, replace_by_link, swap, write_odd_text, change_value, change_value),
)
WORK = Path()
"""The folder of the damaged files, at the same path in every case: runs record the path of their corpus."""


def damage(rng: random.Random, target: Path) -> str:
    """Damage one file of the target. Returns what was done."""
    files = [target] if target.is_file() else sorted(file for file in target.rglob("*") if file.is_file())
    path = rng.choice([file for file in files if file.name != "lock"])
    names = [d for d in DAMAGES if d is not change_value or path.suffix in (".json", ".jsonl")]
    function = rng.choice(names)
    function(rng, path)
    return f"{function.__name__} {path.relative_to(WORK)}"


# ---- results


def result(args: Sequence[str], outcome: Outcome) -> list[str]:
    """What a command has computed: its output without times and notes, and the checksums of what it wrote."""
    text = re.sub(r"[\d.,]+ ?(s|ms|min|seconds|MB|tokens/s)\b|\d+:\d+", "TIME", outcome.out)
    lines = [re.sub(r"\s+", " ", line) for line in text.splitlines() if not line.startswith("note")]
    if args[0] == "train":
        lines = [line for line in lines if line.startswith("held-out")]
    elif args[0] in ("report", "compare"):
        lines = lines[next((i for i, line in enumerate(lines) if line.startswith("Each arm")), 0) :]
    folder = WORK / (args[2] if args[1] == "--resume" else "new")
    names = (
        "weights.safetensors",
        "documents.npy",
        "model.safetensors",
        "results.csv",
        "tokenizer.json",
        "config.json",
    )
    return lines + [
        f"{name} {checksum(folder / name)}" for name in names if args[0] != "eval" and (folder / name).is_file()
    ]


def is_announced(outcome: Outcome) -> bool:
    """Whether the command said that it did not use a file, or that a file has changed."""
    return bool(re.search(r"^note: ", outcome.err + outcome.out, re.MULTILINE))


def fuzz(
    first: int, count: int, targets: Sequence[Target], *, seconds: float, verbose: bool = False
) -> tuple[list[str], Any]:
    """Run cases. Returns a line per failure, and how often each ending occurred."""
    global WORK
    failures: list[str] = []
    endings: Counter[str] = Counter()
    expected: dict[tuple[str, ...], list[str]] = {}
    with tempfile.TemporaryDirectory() as root:
        os.environ["QKFLOW_CACHE"] = link_kernels(Path(root))
        WORK, clean = Path(root, "work"), Path(root, "clean")
        WORK.mkdir()
        write_files(WORK, studies=any(target in STUDIES for target in targets))
        shutil.move(WORK, clean)
        for number in range(first, first + count):
            rng = random.Random(number)
            target = rng.choices(targets, [target.weight for target in targets])[0]
            args = rng.choice(target.commands)
            if tuple(args) not in expected:
                shutil.copytree(clean, WORK)
                outcome = forked_commands.run(args, WORK, seconds=300)
                assert outcome.code == 0, outcome
                expected[tuple(args)] = result(args, outcome)
                shutil.rmtree(WORK)
            shutil.copytree(clean, WORK)
            done = damage(rng, WORK / target.path)
            outcome = forked_commands.run(args, WORK, seconds=seconds)
            problems = outcome.problems() + ["hangs"] * outcome.was_interrupted
            ending = f"exit code {outcome.code}"
            if outcome.code == 0:
                is_same = result(args, outcome) == expected[tuple(args)]
                ending = "same result" if is_same else "note" if is_announced(outcome) else "other result"
                if target.has_checksums and ending == "other result":
                    problems.append("the result has changed without a note")
            endings[ending] += 1
            line = f"case {number}: {done}; qkflow {' '.join(args)} ({outcome.seconds:.1f} s, {ending})"
            if verbose:
                print(line, repr(outcome.err[-300:]), flush=True)
            if problems:
                failures.append(f"{line}: {', '.join(problems)}\n{outcome.err[-1500:]}{outcome.out[-500:]}")
                print(failures[-1], flush=True)
            shutil.rmtree(WORK)
    return failures, dict(sorted(endings.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--count", type=int, default=500, help="cases")
    parser.add_argument("--seconds", type=float, default=120, help="time limit of a command")
    parser.add_argument("--fast", action="store_true", help="without studies")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    args = parser.parse_args()
    forked_commands.prepare()
    targets = TARGETS if args.fast else TARGETS + STUDIES
    failures, endings = fuzz(args.first, args.count, targets, seconds=args.seconds, verbose=args.verbose)
    print(f"{args.count} damaged files, {endings}, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
