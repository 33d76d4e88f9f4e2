"""Tiny studies, and all that they leave behind, for the tests that disturb them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qkflow.data import CorpusConfig
from qkflow.experiment.design import Design, jobs, read_design, write_design
from qkflow.experiment.executors.local import LocalEngine
from qkflow.experiment.plan import plan
from qkflow.experiment.request import Request
from qkflow.experiment.run import run_experiment
from qkflow.models import DecoderConfig

TIMES = ("seconds", "evaluation_seconds")


class Studies:
    """A folder with a corpus of small documents, and designs on it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        generator = random.Random(0)
        words = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 6))) for _ in range(50)]
        texts = [" ".join(generator.choices(words, k=generator.randint(20, 60))) for _ in range(80)]
        (place / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def design(self, *, steps: int, learning_rates: tuple[float, ...] = (1e-3,), checkpoint_every: int = 7) -> Design:
        """Two arms and two seeds, with dropout, and checkpoints at other steps than evaluations."""
        request = Request(
            corpus=CorpusConfig(source=str(self.place / "corpus.jsonl")),
            arms=("standard", "differential"),
            model=DecoderConfig(width=16, layers=1, heads=2, hidden=32, dropout=0.1),
            tokens=steps * 4 * 24,
            seeds=2,
            context=24,
            batch=4,
            learning_rates=learning_rates,
            passes=1e6,
            device="cpu",
            jobs=2,
            threads=1,
        )
        made = plan(request, LocalEngine(), notice=lambda text: None)
        return replace(made, base=replace(made.base, checkpoint_every=checkpoint_every, log_every=1))

    def undisturbed(self, design: Design) -> dict[str, Any]:
        """What the study leaves behind if nobody disturbs it."""
        study = self.place / f"undisturbed-{design.base.steps}"
        if not study.exists():
            write_design(study, design)
            run_experiment(None, study)
        return self.left_behind(study)

    def left_behind(self, study: Path) -> dict[str, Any]:
        """All numbers of a finished study, times left out; the metrics hold a checksum of each batch."""
        tuning = study / "tuning.json"
        found: dict[str, Any] = {"tuning": json.loads(tuning.read_text()) if tuning.exists() else None}
        for job in jobs(read_design(study)):
            folder = study / job.folder
            records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            found[str(job.folder)] = {
                "metrics": [{key: value for key, value in record.items() if key not in TIMES} for record in records],
                "weights": (folder / "weights.safetensors").read_bytes(),
                "documents": (folder / "documents.npy").read_bytes(),
                "config": (folder / "config.json").read_bytes(),
                "names": sorted(path.name for path in folder.iterdir()),
            }
        return found


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Studies]:
    place = tmp_path_factory.mktemp("studies")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QKFLOW_CACHE", str(place / "cache"))
        yield Studies(place)
