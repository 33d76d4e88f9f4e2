"""Compare two arms from Python: matched parameters, shared seeds, a verdict. Too small to decide anything."""

import tempfile
from pathlib import Path

import qkflow

if __name__ == "__main__":  # a study starts processes that import this file
    folder = Path(tempfile.mkdtemp())
    corpus = folder / "squares.txt"
    corpus.write_text("".join(f"the square of {i} is {i * i}\n" for i in range(5000)))
    result = qkflow.compare(
        corpus,
        arms=["standard", "gated-deltanet"],
        model=qkflow.DecoderConfig(width=32, layers=1, heads=2, hidden=64),
        tokens=8_000,  # or budget="10m" instead of model, tokens, seeds, context and batch
        seeds=2,
        context=32,
        batch=8,
        out=folder / "study",
        progress=False,
    )
    for arm in result.arms:
        print(f"{arm.name}: {arm.parameters:,} parameters, {len(arm.seeds)} seeds")
    for verdict in result.verdicts:
        print(f"{verdict.arm}: {verdict.sentence}")
