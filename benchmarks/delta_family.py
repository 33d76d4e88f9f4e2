"""Time the delta-rule mechanisms against each other: forward, forward and backward, and decoding a token.

    python benchmarks/delta_family.py [--quick] [--json FILE] [--threads N]

Layers of width 256 with 4 heads (keys of 48, values of 96), float32, two threads by default: 4 sequences of 512 tokens,
or one token after 64. The value is the time of a mechanism divided by that of Gated DeltaNet in the same round: the
median over rounds, with quartiles. The targets are those of the decay per key channel, which only `kda` has: at most
twice the time of one decay per head with the C kernel, and three times with PyTorch operations (`chunked`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from qkflow.mechanisms import mechanism
from qkflow.ops.delta_rule import choose_backend, use_backend

from timing import Measurement, parse_arguments, print_measurements, quartiles, relative_spread, time_alternately

MECHANISMS = ("gated-deltanet", "deltanet", "qdelta", "qdelta:erase=own", "comba", "kda", "eda")
WIDTH, HEADS, BATCH, LENGTH = 256, 4, 4, 512
TARGETS = {("kda", "cpu"): 2.0, ("kda", "chunked"): 3.0}
Calls = dict[str, Callable[[], object]]


def calls(name: str, backend: str, decoded: int) -> Calls:
    """Return a forward pass, a forward and a backward pass, and the decoding of some tokens."""
    torch.manual_seed(0)
    layer = mechanism(name)(WIDTH, HEADS, 0, 1)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    leaves, gradient = [x.clone().requires_grad_(), *layer.parameters()], torch.randn_like(x)
    with torch.no_grad():
        _, state = layer(x[:1, :64])

    def forward() -> object:
        with torch.no_grad(), use_backend(backend):
            return layer(x)

    def both() -> object:
        with use_backend(backend):
            return torch.autograd.grad(layer(leaves[0])[0], leaves, gradient)

    def decode() -> object:
        current = state
        with torch.inference_mode(), use_backend(backend):
            for _ in range(decoded):
                _, current = layer(x[:1, :1], current)
        return current

    return {"forward": forward, "forward+backward": both, "decoding": decode}


def compare(backend: str, rounds: int, decoded: int) -> list[Measurement]:
    made = {name: calls(name, backend, decoded) for name in MECHANISMS}
    table = []
    for quantity in made[MECHANISMS[0]]:
        times = time_alternately({name: made[name][quantity] for name in MECHANISMS}, rounds=rounds, warmup=2)
        first, control = times[MECHANISMS[0]], relative_spread(times["control"])
        n_calls = decoded if quantity == "decoding" else 1
        for name in MECHANISMS[1:]:
            low, ratio, high = quartiles([b / a for a, b in zip(first, times[name], strict=True)])
            ours, peer = (1e3 * statistics.median(times[key]) / n_calls for key in (name, MECHANISMS[0]))
            target = TARGETS.get((name, backend))
            label = f"{quantity}: {name}"
            table.append(Measurement(backend, label, ratio, (low, high), target, True, ours, peer, control=control))
    return table


if __name__ == "__main__":
    args = parse_arguments(__doc__ or "")
    torch.set_num_threads(args.threads or 2)
    backends = ("cpu", "chunked") if choose_backend(torch.device("cpu")) == "cpu" else ("chunked",)
    rounds, decoded = (3, 8) if args.quick else (15, 32)
    table = [row for backend in backends for row in compare(backend, rounds, decoded)]
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; times of Gated DeltaNet are those of the peer\n"
    )
    print_measurements(table, args.json)
