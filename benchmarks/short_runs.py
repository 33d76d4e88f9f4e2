"""Options and configs of short training runs on one core, for calibration.py and regime.py."""

from __future__ import annotations

import argparse
from typing import Any

from qkflow.cli.compare import parse_count
from qkflow.training import TrainConfig


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the corpus, the model and the length of the runs."""
    parser.add_argument("--data-dir", help="folder with named corpora")
    parser.add_argument("--field", default="text", help="field of .jsonl lines that holds the text")
    parser.add_argument("--size", default="100k")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--tokens", default="1M", help="training tokens per run")
    parser.add_argument("--jobs", type=int, default=2, help="runs in parallel")


def parse_beta2(text: str, step_tokens: int) -> float:
    """Beta2 as a number, or from its half-life in tokens."""
    return float(text) if text.startswith("0.") else 0.5 ** (step_tokens / parse_count(text))


def short_run_config(*, beta2: str, batch: int, context: int, **fields: Any) -> TrainConfig:
    """The config of a run with a stable rate and a decay, one evaluation at the end, and no checkpoints."""
    return TrainConfig(
        batch=batch,
        context=context,
        betas=(0.9, parse_beta2(beta2, batch * context)),
        schedule="stable",
        evaluate_every=10**9,
        checkpoint_every=None,
        checkpoint_minutes=None,
        device="cpu",
        threads=1,
        **fields,
    )
