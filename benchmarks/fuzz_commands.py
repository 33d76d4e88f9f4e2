"""Run random command lines, most of them invalid, and check that each ends as documented.

    python benchmarks/fuzz_commands.py --count 500

A valid command line is changed at one to three places: extreme numbers, Unicode and control characters, missing and
odd files, repeated flags, nested mechanism specs. It runs in a new folder with a time and a memory limit. No command
may show a traceback, crash, hang or end with an exit code other than 0, 1, 2 or 130 (Ctrl-C); one that fails before it
has trained leaves no new file behind. `--first 17 --count 1` repeats command 17.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import os
import random
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import forked_commands
from forked_commands import Outcome
from qkflow.cli import COMMANDS

CONFIG = {
    "steps": 2,
    "context": 16,
    "batch": 4,
    "evaluate_every": 2,
    "evaluate_tokens": 64,
    "final_tokens": 64,
    "model": {"width": 16, "layers": 1, "heads": 4, "hidden": 24},
}
TEXT = "".join(f"line {i}: the quick brown fox number {i * i}\n" for i in range(400))
TABLE = "arm,seed,loss\n" + "".join(
    f"{arm},{seed},{2 + seed / 9 - 0.1 * (arm == 'b')}\n" for arm in "ab" for seed in range(4)
)

VALID: dict[str, list[list[str]]] = {
    "train": [
        ["train", "text.txt", "--config", "tiny.json", "--out", "new"],
        ["train", "text.txt", "--config", "tiny.json", "--mechanism", "qdelta", "--seed", "1", "--lr", "0.01"],
        ["train", "lines.jsonl", "--field", "text", "--config", "tiny.json", "--optimizer", "adamw", "--qk-ratio", "2"],
        ["train", "--resume", "run"],
        ["train", "text.txt", "--config", "init.json", "--init", "run", "--out", "new"],
    ],
    "eval": [["eval", "run"], ["eval", "run", "text.txt", "--split", "train", "--limit", "100", "--json"]],
    "generate": [["generate", "run", "the", "--tokens", "3", "--temperature", "0.5", "--top-p", "0.9", "--stop", "x"]],
    "probe": [["probe", "run", "the quick", "--tokens", "8", "--out", "page.html"]],
    "export": [["export", "run", "exported", "--shard-size", "5MB"]],
    "judge": [["judge", "table.csv", "--baseline", "a", "--margin", "0.01", "--look", "1", "--out", "page.html"]],
    "check": [["check", "standard", "--law", "causality", "--width", "16", "--heads", "4", "--backend", "eager"]],
    "report": [["report", "study"]],
    "compare": [
        [
            *("compare", "lines.jsonl", "--arms", "standard,differential", "--size", "100k", "--seeds", "2"),
            *("--train-tokens", "2k", "--context", "32", "--batch", "8", "--out", "new"),
        ]
    ],
    "sharpen": [["sharpen", "--task", "agreement", "--ratios", "1,5", "--steps", "2", "--train", "20", "--out", "new"]],
    "reproduce": [["reproduce", "--list"]],
}
FAST = ("train", "eval", "generate", "probe", "export", "judge", "check", "report")
STUDIES = ("compare", "sharpen", "reproduce")
WORK = ("--steps", "--tokens", "--train-tokens", "--budget", "--seeds", "--train", "--width", "--batch", "--context")
"""Flags that may turn a command into hours of work, which Ctrl-C must end."""
IDLE = 0.25
"""A command that was busy for less than this fraction of its time limit has waited for something."""

INTEGERS = ("0", "-1", "1", str(2**31), str(2**63 - 1), str(2**63), str(2**64), "9" * 400, "1e3", "0x10", "1_000", "٣")
FLOATS = ("nan", "inf", "-inf", "1e400", "1e308", "-0.0", "5e-324", "1e-30", "1e30", ".", "1,5")
TEXTS = (
    *(
        "",
        " ",
        "-",
        "--",
        "=",
        "a=b",
        "x" * 300,
        "x" * 5000,
        "\\n",
        "%s%n",
        "$HOME",
        "~",
        "~nobody",
        "*",
        "[red]",
        "[/]",
    ),
    *(
        "é",
        "文字",
        "\u202eabc",
        "\U0001f600",
        "a\x1b[31mb",
        "a\nb",
        "a\tb",
        "\x9b",
        "\udcff",
        "\x7f",
        "'\"",
        "NaN",
        "null",
    ),
)
SPECS = (
    *(
        "standard:",
        "standard:window=",
        "standard:window=-1",
        "standard:window=4,window=5",
        "standard::",
        "standard+",
        "+",
    ),
    *("standard+hamiltonian+affine", "coupled:steps=0", f"coupled:steps={10**9}", "qdelta:lam=nan", "standard:r=1e400"),
    *("standard:r=0", "standard:r=-1", "group:group=so(0)", "kuramoto:delay=-1", "os:system", "sys:exit", "json:dumps"),
    *("standard:conv=100000", "standard:width=3", "mqar:pairs=0", "mqar:pairs=4+8", "s-niah-1:lengths=1", "mqar:x=1"),
    *(
        "differential+affine:r=20",
        "standard:qk_norm=maybe",
        "kda:heads=0",
        "standard,standard",
        "hf:",
        "hf:../..",
        "enwik8",
    ),
    *("standard:" + ",".join(f"a{i}=1" for i in range(200)), "standard" + "+affine" * 50, "STANDARD", "standard\0"),
)
DURATIONS = ("0s", "1s", "-1s", "1e9d", "99999999999999999999d", "1.5", "s", "nan s", "5 m", "1s1s")
FILES = (
    *("missing", "missing/x", ".", "..", "/dev/null", "/dev/full", "/proc/self/mem", "/proc/x", "text.txt/x", "run"),
    *("pipe", "loop", "dangling", "empty.txt", "folder", "folder.txt", "run/config.json", "run/weights.safetensors"),
    *(
        "nul.txt",
        "binary.txt",
        "utf16.txt",
        "broken.gz",
        "broken.jsonl.gz",
        "half.zip",
        "deep.json",
        "list.json",
        "nan.json",
    ),
    *("broken.toml", "long.jsonl", "numbers.jsonl", "a\nb.txt", "a\x1b[31mb.txt", "\udcff.txt", "empty.csv", "nan.csv"),
    *("wide.csv", "wrong.csv", "tiny.json", "text.txt", "lines.jsonl", "table.csv", "//text.txt", "./run/", "pipes"),
)


def write_files(folder: Path) -> None:
    """The files that command lines name: valid ones, and odd ones."""

    def write(name: str, content: str | bytes) -> None:
        (folder / name).write_bytes(content.encode(errors="surrogateescape") if isinstance(content, str) else content)

    noise = random.Random(0).randbytes(20_000)
    write("text.txt", TEXT)
    write("lines.jsonl", "".join(json.dumps({"text": line * 9}) + "\n" for line in TEXT.splitlines()))
    write("tiny.json", json.dumps(CONFIG))
    write("init.json", json.dumps({key: value for key, value in CONFIG.items() if key != "model"}))
    write("table.csv", TABLE)
    for name in ("empty.txt", "empty.csv"):
        write(name, "")
    write("nul.txt", bytes(20_000))
    write("binary.txt", noise)
    write("utf16.txt", TEXT.encode("utf-16"))
    write("broken.gz", gzip.compress(TEXT.encode())[:-20])
    write("broken.jsonl.gz", gzip.compress(noise)[:200] + noise[:500])
    write("half.zip", b"PK\x03\x04" + noise[:300])
    write("deep.json", '{"a":' * 50_000)
    write("list.json", "[1, 2]")
    write("nan.json", '{"lr": NaN, "steps": Infinity}')
    write("broken.toml", "a = [")
    write("long.jsonl", '{"text": "' + "x" * 500_000 + '"}\n')
    write("numbers.jsonl", '1\n{"text": 3}\n[]\n')
    for name in ("a\nb.txt", "a\x1b[31mb.txt", "\udcff.txt"):
        write(name, TEXT)
    write("nan.csv", TABLE.replace("2.0", "nan"))
    write("wide.csv", "arm,seed,loss," + ",".join(map(str, range(2000))) + "\na,0,1\n")
    write("wrong.csv", "arm;seed;loss\n\x00\x1b,é,=1+1\n")
    for name in ("folder", "folder.txt", "pipes"):
        (folder / name).mkdir()
    for name in ("pipe", "pipes/config.json", "pipes/design.json"):
        os.mkfifo(folder / name)
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")


def command_line(number: int, names: Sequence[str]) -> list[str]:
    """The command line with this number."""
    rng = random.Random(number)
    args = list(rng.choice(VALID[rng.choice(names)]))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice(MUTATIONS)(rng, args)
    return args


def odd_value(rng: random.Random, kind: str = "") -> str:
    pools: list[Sequence[str]] = [INTEGERS, FLOATS, TEXTS, SPECS, DURATIONS, FILES]
    likely: list[Sequence[str]] = [INTEGERS, FLOATS] if "int" in kind or "float" in kind else [TEXTS, SPECS, FILES]
    return rng.choice(rng.choice(likely if rng.random() < 0.7 else pools))


def set_flag(rng: random.Random, args: list[str]) -> None:
    """Add a flag of the command, or an unknown one, with an odd value."""
    if args[0] not in COMMANDS:
        return
    field = rng.choice(dataclasses.fields(COMMANDS[args[0]]))
    name = "--" + field.name.replace("_", "-") if rng.random() < 0.95 else "--" + odd_value(rng)
    if "bool" in str(field.type):
        args.append(name)
    elif rng.random() < 0.3:
        args.append(f"{name}={odd_value(rng, str(field.type))}")
    else:
        args += [name, odd_value(rng, str(field.type))]


def replace_argument(rng: random.Random, args: list[str]) -> None:
    args[rng.randrange(1 if rng.random() < 0.95 else 0, len(args)) if len(args) > 1 else 0] = odd_value(rng)


def replace_number(rng: random.Random, args: list[str]) -> None:
    numbers = [i for i, arg in enumerate(args) if arg.replace(".", "").isdigit()]
    if numbers:
        args[rng.choice(numbers)] = odd_value(rng, "int")


def name_file(rng: random.Random, args: list[str]) -> None:
    names = [
        i for i, arg in enumerate(args) if arg.split(".")[0] in ("text", "lines", "run", "tiny", "table", "new", "page")
    ]
    if names:
        args[rng.choice(names)] = rng.choice(FILES)


def repeat(rng: random.Random, args: list[str]) -> None:
    flags = [i for i, arg in enumerate(args[:-1]) if arg.startswith("--")]
    if flags:
        i = rng.choice(flags)
        args += [args[i], args[i + 1] if rng.random() < 0.5 else odd_value(rng)]


def drop(rng: random.Random, args: list[str]) -> None:
    if len(args) > 1:
        del args[rng.randrange(1, len(args))]


def insert(rng: random.Random, args: list[str]) -> None:
    args.insert(rng.randrange(1, len(args) + 1), odd_value(rng))


def set_mechanism(rng: random.Random, args: list[str]) -> None:
    flag = {"compare": "--arms", "check": "", "train": "--mechanism", "sharpen": "--mechanism"}.get(args[0])
    if flag == "" and len(args) > 1:
        args[1] = rng.choice(SPECS)
    elif flag:
        args += [flag, rng.choice(SPECS)]


MUTATIONS: tuple[Callable[[random.Random, list[str]], None], ...] = (
    *(set_flag, set_flag, set_flag, replace_argument, replace_number, name_file, name_file),
    *(repeat, drop, insert, set_mechanism),
)


def without_nul(args: Sequence[str]) -> list[str]:
    """The operating system does not pass NUL characters on."""
    return [arg.split("\0")[0] for arg in args]


def entries(folder: Path) -> set[str]:
    found = os.walk(folder)
    return {os.path.relpath(Path(root, name), folder) for root, folders, files in found for name in folders + files}


def left_behind(before: set[str], folder: Path, outcome: Outcome) -> list[str]:
    """The new files of a command that failed, unless it has trained: such a run is kept to be resumed or inspected."""
    new = sorted(entries(folder) - before)
    has_trained = any(name.endswith(("metrics.jsonl", "decisions.jsonl")) for name in new)
    if outcome.code == 0 or outcome.was_interrupted or (outcome.code == 1 and has_trained):
        return []
    return [name for name in new if not name.startswith("run" + os.sep)]


def hangs(args: Sequence[str], outcome: Outcome, seconds: float) -> bool:
    """Whether a command that reached the time limit of `seconds` has waited, or had no reason to work that long."""
    has_work = args[0] in STUDIES or bool(set(WORK) & {arg.split("=")[0] for arg in args})
    return outcome.was_interrupted and (not has_work or outcome.busy_seconds < IDLE * seconds)


def fuzz(
    first: int, count: int, names: Sequence[str], *, seconds: float, verbose: bool = False
) -> tuple[list[str], Any]:
    """Run commands. Returns a line per failure, and how often each exit code occurred."""
    failures: list[str] = []
    codes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as root:
        os.environ["QKFLOW_CACHE"] = link_kernels(Path(root))
        start = Path(root, "start")
        start.mkdir()
        write_files(start)
        trained = forked_commands.run(["train", "text.txt", "--config", "tiny.json", "--out", "run"], start)
        assert trained.code == 0, trained
        for number in range(first, first + count):
            folder = Path(root, str(number))
            folder.mkdir()
            write_files(folder)
            shutil.copytree(start / "run", folder / "run")
            args, before = without_nul(command_line(number, names)), entries(folder)
            outcome = forked_commands.run(args, folder, seconds=seconds)
            problems = outcome.problems()
            if hangs(args, outcome, seconds):
                problems.append(f"hangs ({outcome.busy_seconds:.1f} s busy)")
            problems += [f"left {name!r} behind" for name in left_behind(before, folder, outcome)[:3]]
            codes["interrupted" if outcome.was_interrupted else str(outcome.code)] += 1
            line = f"command {number}: qkflow {shlex.join(args)!r:.300} ({outcome.seconds:.1f} s, {outcome.code})"
            if verbose:
                print(line, repr(outcome.err[-300:]), flush=True)
            if problems:
                failures.append(f"{line}: {', '.join(problems)}\n{outcome.err[-1500:]!r}")
                print(failures[-1], flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    return failures, dict(sorted(codes.items()))


def link_kernels(root: Path) -> str:
    """A new cache with a link to the compiled kernels."""
    from qkflow.io import cache_folder

    native = cache_folder() / "native"
    (root / "cache").mkdir()
    if native.is_dir():
        (root / "cache" / "native").symlink_to(native.absolute())
    return str(root / "cache")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="number of the first command line")
    parser.add_argument("--count", type=int, default=500, help="command lines")
    parser.add_argument("--seconds", type=float, default=60, help="time limit of a command")
    parser.add_argument("--fast", action="store_true", help="without commands that run studies")
    parser.add_argument("--verbose", action="store_true", help="print every command")
    args = parser.parse_args()
    forked_commands.prepare()
    names = FAST if args.fast else (*FAST, *STUDIES)
    failures, codes = fuzz(args.first, args.count, names, seconds=args.seconds, verbose=args.verbose)
    print(f"{args.count} command lines, exit codes {codes}, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
