"""Record the losses on which the statistics of studies are calibrated: small runs that differ in nothing but seeds.

    python benchmarks/calibration.py            72 runs, about a quarter of an hour on two cores
    python benchmarks/calibration.py --quick    4 runs

Every data seed is trained with several initialisations, so that two arms of a study that share the data but not the
start can be drawn from them, with no true difference. Written: the loss of each held-out document of each run.
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


def config(data_seed: int, start: int, steps: int) -> TrainConfig:
    """One run: a data seed, and a start that no other run has."""
    return TrainConfig(
        data=CorpusConfig(),
        model=MODEL,
        steps=steps,
        context=128,
        batch=16,
        schedule="stable",
        seed=1000 * (start + 1) + data_seed,
        data_seed=data_seed,
        evaluate_every=10**9,
        evaluate_tokens=4096,
        checkpoint_every=None,
        threads=1,
    )


def losses(job: tuple[TrainConfig, str]) -> np.ndarray:
    """Train one run and give its documents."""
    run, folder = job
    return train(run, Path(folder) / f"{run.data_seed}-{run.seed}").documents


def main() -> None:
    """Train them all, two at a time, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 short runs, and nothing is written")
    parser.add_argument("--data-seeds", type=int, default=24)
    parser.add_argument("--starts", type=int, default=3, help="initialisations of each data seed")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    seeds, starts, steps = (2, 2, 20) if options.quick else (options.data_seeds, options.starts, options.steps)
    corpus = open_corpus(CorpusConfig())
    with tempfile.TemporaryDirectory() as folder:
        planned_runs = [(config(seed, start, steps), folder) for seed in range(seeds) for start in range(starts)]
        found = []
        with multiprocessing.get_context("forkserver").Pool(options.planned_runs) as pool:
            for number, documents in enumerate(pool.imap(losses, planned_runs), 1):
                found.append(documents)
                bits = documents["nats"].sum() / np.log(2) / documents["bytes"].sum()
                print(f"{number:3} of {len(planned_runs)}: {bits:.4f} bits per byte", flush=True)
    nats = np.stack([documents["nats"] for documents in found]).reshape(seeds, starts, -1)
    per_byte = nats.sum(2) / np.log(2) / found[0]["bytes"].sum()
    print(f"mean {per_byte.mean():.4f}, spread over starts {per_byte.std(1, ddof=1).mean():.5f}")
    print(f"spread over data seeds {per_byte.mean(1).std(ddof=1):.5f}")
    if not options.quick:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "corpus": corpus.name,
            "digest": corpus.digest,
            "config": {**to_dict(planned_runs[0][0]), "seed": "1000 (start + 1) + data_seed", "data_seed": "0 and up"},
        }
        np.savez_compressed(
            options.out, nats=nats.astype(np.float32), bytes=found[0]["bytes"], record=np.array(json.dumps(record))
        )
        print(f"{options.out}: {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
