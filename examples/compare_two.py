"""A study of two arms by the Python API: matched parameters, shared seeds, a verdict. Tiny, so expect "undecided"."""

import tempfile
from pathlib import Path

from qkflow import CorpusConfig, DecoderConfig
from qkflow.experiment import ExperimentSpec, read_result, run_experiment

if __name__ == "__main__":  # a study starts processes, which import this file
    place = Path(tempfile.mkdtemp())
    text = place / "squares.txt"
    text.write_text("".join(f"the square of {i} is {i * i}\n" for i in range(5000)))
    request = ExperimentSpec(
        corpus=CorpusConfig(source=str(text)),
        arms=("standard", "gated-deltanet"),
        model=DecoderConfig(width=32, layers=1, heads=2, hidden=64),
        tokens=8_000,
        seeds=2,
        context=32,
        batch=8,
    )
    run_experiment(request, place / "study")
    summary = read_result(place / "study")
    for arm in summary.arms:
        print(arm.name, f"{arm.parameters:,} parameters, {len(arm.seeds)} seeds")
    for verdict in summary.verdicts:
        print(verdict.sentence)
