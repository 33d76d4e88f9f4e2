"""Held-out loss of one language model under many training regimes: batch, optimizer, rate, beta2, decay, warm-up.

    python benchmarks/regime.py --size 100k --tokens 1M --batch 4,16 --optimizer adamw,muon --lr 2e-3,4e-3,8e-3

Every combination of the lists is one run. Results are appended to a .jsonl file; combinations it holds are skipped, so
an interrupted grid continues with the same command. --show prints the file as a table, the best run first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from qkflow.cli.compare import parse_count, split_arms
from qkflow.data import CorpusConfig, open_corpus
from qkflow.models import matched, parameters, size
from qkflow.training import train

from short_runs import add_model_options, short_run_config

EVALUATED_TOKENS = 2**18


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpora", nargs="*", default=["python-stdlib"])
    add_model_options(parser)
    parser.add_argument("--mechanisms", default="standard")
    parser.add_argument("--batch", default="4", help="sequences per step, a list")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--lr", default="3e-3")
    parser.add_argument("--beta2", default="200k", help="beta2, or its half-life in tokens; a list")
    parser.add_argument("--decay", default="0.4", help="fraction of the steps with a decaying rate")
    parser.add_argument("--floor", default="0.0", help="final rate, as a fraction of the peak")
    parser.add_argument("--warmup", default="100", help="steps of warm-up")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--out", type=Path, default=Path("runs/regime.jsonl"))
    parser.add_argument("--show", action="store_true", help="print the file and exit")
    options = parser.parse_args()
    if not options.show:
        run_grid(options)
    show(options.out)


def run_grid(options: argparse.Namespace) -> None:
    """Train every combination that the file does not hold."""
    lists = {
        "corpus": options.corpora,
        "mechanism": list(split_arms(options.mechanisms)),
        "batch": [int(text) for text in options.batch.split(",")],
        "optimizer": options.optimizer.split(","),
        "lr": [float(text) for text in options.lr.split(",")],
        "beta2": options.beta2.split(","),
        "decay": [float(text) for text in options.decay.split(",")],
        "floor": [float(text) for text in options.floor.split(",")],
        "warmup": [int(text) for text in options.warmup.split(",")],
        "seed": [int(text) for text in options.seeds.split(",")],
    }
    shared = {"size": options.size, "context": options.context, "tokens": parse_count(options.tokens)}
    cells = [shared | dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
    known = [row["cell"] for row in read(options.out)]
    cells = [cell for cell in cells if cell not in known]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool, options.out.open("a") as file:
        runs = [pool.submit(run_cell, cell, options.data_dir, options.field) for cell in cells]
        for run in as_completed(runs):
            row = run.result()
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(json.dumps(row), flush=True)


def run_cell(cell: dict[str, Any], data_dir: str | None, field: str) -> dict[str, Any]:
    """Train one combination; its held-out bits per byte and processor seconds."""
    data = CorpusConfig(source=cell["corpus"], data_dir=data_dir, field=field)
    base = size(cell["size"], vocabulary=open_corpus(data).vocabulary)
    model = replace(base, mechanism=cell["mechanism"])
    model = matched(model, parameters(base))
    config = short_run_config(
        data=data,
        model=model,
        steps=cell["tokens"] // (cell["batch"] * cell["context"]),
        context=cell["context"],
        batch=cell["batch"],
        optimizer=cell["optimizer"],
        lr=cell["lr"],
        beta2=cell["beta2"],
        decay=cell["decay"],
        floor=cell["floor"],
        warmup=cell["warmup"],
        seed=cell["seed"],
        data_seed=cell["seed"],
        evaluate_tokens=8192,
        final_tokens=EVALUATED_TOKENS,
    )
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        result = train(config, Path(folder) / "run")
        seconds = time.process_time() - started
    return {
        "cell": cell,
        "steps": config.steps,
        "bits_per_byte": result.metrics["bits_per_byte"],
        "cpu_seconds": round(seconds, 1),
    }


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a results file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def show(path: Path) -> None:
    """Print the results, grouped by corpus, size, tokens and mechanism, the best first."""
    rows = read(path)
    names = ("corpus", "size", "tokens", "mechanism")
    rows.sort(key=lambda row: (*(str(row["cell"][name]) for name in names), row["bits_per_byte"]))
    columns = [*names, "optimizer", "batch", "lr", "beta2", "decay", "floor", "warmup", "seed"]
    table = Table(*columns, "steps", "bits per byte", "cpu s")
    for row in rows:
        cells = [str(row["cell"][column]) for column in columns]
        table.add_row(*cells, str(row["steps"]), f"{row['bits_per_byte']:.4f}", f"{row['cpu_seconds']:.0f}")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
