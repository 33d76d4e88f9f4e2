"""Record the losses that calibrate the statistics of studies: small runs that differ only in their seeds.

    python benchmarks/calibration.py --corpus python-stdlib --tokens 800k
    python benchmarks/calibration.py --corpus enwik8 --data-dir ~/data --tokens 500k --final-tokens 262144
    python benchmarks/calibration.py --quick                4 short runs; writes no file

Every data seed is trained with several initializations. Runs with the same data seed and different initializations act
as equal arms of a study: four of them make a family of three arms and a baseline. The output file has the loss of each
held-out document of each run (neighbours are summed to at most --documents groups) and the processor seconds of a run.
Finished runs are kept in --work, so an interrupted calibration continues with the same command.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from qkflow.cli.compare import parse_count
from qkflow.config import to_dict
from qkflow.data import CorpusConfig, open_corpus
from qkflow.models import size
from qkflow.training import TrainConfig, train

from short_runs import add_model_options, short_run_config

RECORDS = Path(__file__).parent.parent / "tests" / "unit" / "experiment" / "stats"


def main() -> None:
    """Train the runs that are missing and write their losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", default="python-stdlib")
    add_model_options(parser)
    parser.add_argument("--mechanism", default="standard")
    parser.add_argument("--steps", type=int, help="instead of --tokens")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--optimizer", default="muon", choices=("adamw", "muon", "sgd"))
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--beta2", default="200k", help="beta2, or its half-life in tokens")
    parser.add_argument("--decay", type=float, default=0.6, help="fraction of the steps with a decaying rate")
    parser.add_argument("--floor", type=float, default=0.0, help="final rate, as a fraction of the peak")
    parser.add_argument("--warmup", type=int, default=None, help="steps of warm-up; by default that of `train`")
    parser.add_argument("--split", default="test", choices=("test", "validation"), help="documents that are scored")
    parser.add_argument("--final-tokens", type=int, help="the most tokens that are scored; by default all")
    parser.add_argument("--data-seeds", type=int, default=12)
    parser.add_argument("--initializations", type=int, default=4, help="initializations per data seed")
    parser.add_argument("--documents", type=int, default=100, help="the most documents or groups of them in the file")
    parser.add_argument("--work", type=Path, default=Path("runs/calibration"), help="where finished runs are kept")
    parser.add_argument("--out", type=Path, help="by default CORPUS-SIZE.npz with the tests")
    parser.add_argument("--quick", action="store_true", help="4 short runs; writes no file")
    args = parser.parse_args()
    if args.quick:
        args.data_seeds, args.initializations, args.steps = 2, 2, 20
        with tempfile.TemporaryDirectory() as folder:
            record(args, Path(folder))
    else:
        name = f"{Path(args.corpus).stem}-{args.size}"
        out = args.out or RECORDS / f"{name}.npz"
        losses, sizes, description = record(args, args.work / name)
        write(out, losses, sizes, description, args.documents)


def record(args: argparse.Namespace, work: Path) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Train the runs that `work` does not hold.

    Returns nats [data seeds, initializations, documents], the bytes of the documents, and the record of the runs.
    """
    cells = [(seed, start) for seed in range(args.data_seeds) for start in range(args.initializations)]
    first = run_config(args, 0, 0)
    regime = {key: value for key, value in to_dict(first).items() if key not in ("seed", "data_seed")}
    work.mkdir(parents=True, exist_ok=True)
    if (work / "config.json").exists() and json.loads((work / "config.json").read_text()) != json.loads(
        json.dumps(regime)
    ):
        raise SystemExit(f"{work} holds runs of another config: give another --work, or remove it")
    (work / "config.json").write_text(json.dumps(regime))
    missing = [cell for cell in cells if not run_file(work, *cell).exists()]
    print(f"{len(cells) - len(missing)} of {len(cells)} runs are finished", flush=True)
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("forkserver")) as pool:
        futures = [pool.submit(run, run_config(args, *cell), run_file(work, *cell)) for cell in missing]
        for number, future in enumerate(as_completed(futures), len(cells) - len(missing) + 1):
            print(f"{number:3} of {len(cells)}: {future.result():.4f} bits per byte", flush=True)
    files = [np.load(run_file(work, *cell)) for cell in cells]
    sizes, seconds = files[0]["bytes"], float(np.mean([file["cpu_seconds"] for file in files]))
    nats = np.stack([file["nats"] for file in files]).reshape(args.data_seeds, args.initializations, -1)
    per_byte = nats.sum(2) / math.log(2) / sizes.sum()
    print(f"mean {per_byte.mean():.4f}, standard deviation over initializations {per_byte.std(1, ddof=1).mean():.5f}")
    print(f"standard deviation over data seeds {per_byte.mean(1).std(ddof=1):.5f}, {seconds:.1f} CPU seconds per run")
    corpus = open_corpus(corpus_config(args))
    seeds = {"seed": "1000 (initialization + 1) + data_seed", "data_seed": "0 and up"}
    description = {
        "corpus": corpus.name,
        "digest": corpus.digest,
        "config": {**regime, **seeds},
        "cpu_seconds": seconds,
    }
    data = description["config"]["data"]
    data["source"], data["data_dir"] = Path(data["source"]).name, None  # no paths of this machine
    return nats, sizes, description


def corpus_config(args: argparse.Namespace) -> CorpusConfig:
    """The corpus of all runs."""
    return CorpusConfig(source=args.corpus, data_dir=args.data_dir, field=args.field)


def run_config(args: argparse.Namespace, data_seed: int, initialization: int) -> TrainConfig:
    """The config of one run; no two runs have the same initialization."""
    data = corpus_config(args)
    return short_run_config(
        data=data,
        model=size(args.size, vocabulary=open_corpus(data).vocabulary, mechanism=args.mechanism),
        steps=args.steps or parse_count(args.tokens) // (args.batch * args.context),
        context=args.context,
        batch=args.batch,
        optimizer=args.optimizer,
        lr=args.lr,
        beta2=args.beta2,
        warmup=args.warmup,
        decay=args.decay,
        floor=args.floor,
        seed=1000 * (initialization + 1) + data_seed,
        data_seed=data_seed,
        evaluate_tokens=4096,
        final_split=args.split,
        final_tokens=args.final_tokens,
    )


def run_file(work: Path, data_seed: int, initialization: int) -> Path:
    """The losses of a finished run."""
    return work / f"{data_seed}-{initialization}.npz"


def run(config: TrainConfig, path: Path) -> float:
    """Train one run, keep the losses of its documents, and return its bits per byte."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        started = time.process_time()
        documents = train(config, Path(folder) / "run").documents
        seconds = time.process_time() - started
        temporary = Path(folder) / path.name
        np.savez(temporary, nats=documents["nats"], bytes=documents["bytes"], cpu_seconds=seconds)
        shutil.move(temporary, path)
    return float(documents["nats"].sum() / math.log(2) / documents["bytes"].sum())


def write(path: Path, nats: np.ndarray, sizes: np.ndarray, description: dict[str, Any], most: int) -> None:
    """Write the record, with the documents summed in at most so many groups of neighbours."""
    starts = np.unique(np.linspace(0, len(sizes), min(most, len(sizes)), endpoint=False).astype(int))
    groups, group_sizes = (np.add.reduceat(x, starts, axis=-1) for x in (nats, sizes))
    path.parent.mkdir(parents=True, exist_ok=True)
    text = np.array(json.dumps(description))
    np.savez_compressed(path, nats=groups.astype(np.float32), bytes=group_sizes, record=text)
    print(f"{path}: {path.stat().st_size:,} bytes, {len(sizes)} documents in {len(starts)} groups")


if __name__ == "__main__":
    main()
