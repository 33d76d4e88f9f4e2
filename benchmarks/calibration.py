"""Record the losses that calibrate the statistics of studies: small runs that differ only in their seeds.

    python benchmarks/calibration.py            72 runs, about a quarter of an hour on two cores
    python benchmarks/calibration.py --quick    4 runs

Every data seed is trained with several initializations. Two runs with the same data seed and different initializations
act as two equal arms of a study. The output file has the loss of each held-out document of each run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from pathlib import Path

import numpy as np

from qkflow.config import to_dict
from qkflow.data import CorpusConfig, open_corpus
from qkflow.models import DecoderConfig
from qkflow.training import TrainConfig, train

OUT = Path(__file__).parent.parent / "tests" / "unit" / "experiment" / "stats" / "calibration.npz"
MODEL = DecoderConfig(width=64, layers=2, heads=4, hidden=132)


def config(data_seed: int, initialization: int, steps: int) -> TrainConfig:
    """Return the config of one run; no two runs have the same initialization."""
    return TrainConfig(
        data=CorpusConfig(),
        model=MODEL,
        steps=steps,
        context=128,
        batch=16,
        schedule="stable",
        seed=1000 * (initialization + 1) + data_seed,
        data_seed=data_seed,
        evaluate_every=10**9,
        evaluate_tokens=4096,
        checkpoint_every=None,
        threads=1,
    )


def document_losses(job: tuple[TrainConfig, str]) -> np.ndarray:
    """Train one run and return the losses of its held-out documents."""
    run, folder = job
    return train(run, Path(folder) / f"{run.data_seed}-{run.seed}").documents


def main() -> None:
    """Train all runs and write their losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 short runs; writes no file")
    parser.add_argument("--data-seeds", type=int, default=24)
    parser.add_argument("--initializations", type=int, default=3, help="initializations per data seed")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--jobs", type=int, default=2, help="runs in parallel")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    seeds, initializations, steps = (2, 2, 20) if args.quick else (args.data_seeds, args.initializations, args.steps)
    corpus = open_corpus(CorpusConfig())
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(config(seed, n, steps), folder) for seed in range(seeds) for n in range(initializations)]
        losses = []
        with multiprocessing.get_context("forkserver").Pool(args.jobs) as pool:
            for number, documents in enumerate(pool.imap(document_losses, jobs), 1):
                losses.append(documents)
                bits = documents["nats"].sum() / np.log(2) / documents["bytes"].sum()
                print(f"{number:3} of {len(jobs)}: {bits:.4f} bits per byte", flush=True)
    nats = np.stack([documents["nats"] for documents in losses]).reshape(seeds, initializations, -1)
    per_byte = nats.sum(2) / np.log(2) / losses[0]["bytes"].sum()
    print(f"mean {per_byte.mean():.4f}, standard deviation over initializations {per_byte.std(1, ddof=1).mean():.5f}")
    print(f"standard deviation over data seeds {per_byte.mean(1).std(ddof=1):.5f}")
    if not args.quick:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "corpus": corpus.name,
            "digest": corpus.digest,
            "config": {**to_dict(jobs[0][0]), "seed": "1000 (initialization + 1) + data_seed", "data_seed": "0 and up"},
        }
        np.savez_compressed(
            args.out, nats=nats.astype(np.float32), bytes=losses[0]["bytes"], record=np.array(json.dumps(record))
        )
        print(f"{args.out}: {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
