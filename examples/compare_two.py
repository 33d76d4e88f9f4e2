"""Compare two arms with the Python API: matched parameters, shared seeds, a verdict. Too small to decide anything."""

import tempfile
from pathlib import Path

from qkflow import CorpusConfig, DecoderConfig
from qkflow.experiment import ExperimentSpec, run_experiment

if __name__ == "__main__":  # a study starts processes that import this file
    folder = Path(tempfile.mkdtemp())
    corpus = folder / "squares.txt"
    corpus.write_text("".join(f"the square of {i} is {i * i}\n" for i in range(5000)))
    spec = ExperimentSpec(
        data=CorpusConfig(source=str(corpus)),
        arms=("standard", "gated-deltanet"),
        model=DecoderConfig(width=32, layers=1, heads=2, hidden=64),
        tokens=8_000,
        seeds=2,
        context=32,
        batch=8,
    )
    result = run_experiment(spec, folder / "study")
    for arm in result.arms:
        print(f"{arm.name}: {arm.parameters:,} parameters, {len(arm.seeds)} seeds")
    for verdict in result.verdicts:
        print(verdict.sentence)
