"""Time the delta-rule mechanisms against Gated DeltaNet: forward, forward and backward, and decoding a token.

    python benchmarks/delta_family.py [--quick] [--json FILE] [--threads N]

Layers of width 256 with 4 heads (keys of 48, values of 96), float32, one thread by default: 4 sequences of 512 tokens,
or one token after 64. The targets are those of the decay per key channel, which only `kda` has: at most twice the time
of one decay per head with the C kernel, and three times with PyTorch operations (`chunked`).
"""

from __future__ import annotations

import torch

from qkflow.mechanisms import mechanism
from qkflow.ops.delta_rule import choose_backend, use_backend

from steps import PASSES, Function
from tables import Row
from timing import compare, main, time_alternately

BASELINE = "gated-deltanet"
MECHANISMS = ("deltanet", "qdelta", "qdelta:erase=own", "comba", "kda", "eda")
WIDTH, HEADS, BATCH, LENGTH = 256, 4, 4, 512
BACKENDS = {"cpu": ("delta-family", 2.0), "chunked": ("delta-family-torch", 3.0)}
"""Table and target of a decay per key channel, by backend."""


def functions(name: str, tokens: int) -> dict[str, Function]:
    """Return a forward pass, a forward and a backward pass, and the decoding of some tokens."""
    torch.manual_seed(0)
    layer = mechanism(name)(WIDTH, HEADS, 0, 1)
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    token = torch.randn(1, 1, WIDTH)
    with torch.no_grad():
        _, state = layer(x[:1, :64])

    @torch.inference_mode()
    def decode() -> None:
        current = state
        for _ in range(tokens):
            _, current = layer(token, current)

    passes = {key: make(lambda: layer(x)[0], (x, *layer.parameters())) for key, make in PASSES.items()}
    return {**passes, "decoding a token": decode}


def measure(quick: bool) -> list[Row]:
    rounds, tokens = (3, 8) if quick else (15, 32)
    table = []
    for backend, (name, target) in BACKENDS.items():
        if backend == "cpu" and choose_backend(torch.device("cpu")) != "cpu":
            continue
        with use_backend(backend):
            by_mechanism = {spec: functions(spec, tokens) for spec in (BASELINE, *MECHANISMS)}
            for work in by_mechanism[BASELINE]:
                times = time_alternately({spec: by_mechanism[spec][work] for spec in by_mechanism}, rounds=rounds)
                for spec in MECHANISMS:
                    at_most = target if spec == "kda" else None
                    calls = tokens if work == "decoding a token" else 1
                    table.append(
                        compare(name, f"`{spec}`", work, "time", times, spec, BASELINE, calls=calls, at_most=at_most)
                    )
    return table


if __name__ == "__main__":
    main(__doc__, measure, threads=1)
