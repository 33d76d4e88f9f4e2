"""Training steps at 1m and 5m against HF Llama and x-transformers of the same shape: same batch, same AdamW, fp32.

python benchmarks/train.py [--quick] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkflow import Decoder, size

from peers import hf_llama, parameters, x_transformer
from side_by_side import Row, arguments, race, report, rows

BATCH, CONTEXT = 32, 256


def step(model: nn.Module, logits: Callable[[Tensor], Tensor], tokens: Tensor) -> Callable[[], None]:
    """A whole training step: loss, gradients, clipping, AdamW."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def do() -> None:
        loss = F.cross_entropy(logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

    return do


def compare(name: str, rounds: int) -> list[Row]:
    config = size(name)
    tokens = torch.randint(0, 256, (BATCH, CONTEXT + 1))
    ours, hf, x = Decoder(config), hf_llama(config), x_transformer(config, CONTEXT)
    print(
        f"{name}: parameters {parameters(ours):,} (ours), {parameters(hf):,} (HF), {parameters(x):,} (x-transformers)"
    )
    times = race(
        {
            "qkflow": step(ours, lambda t: ours(t)[0], tokens),
            "HF Llama": step(hf, lambda t: hf(t, use_cache=False).logits, tokens),
            "x-transformers": step(x, x, tokens),
        },
        rounds=rounds,
        warm=2,
    )
    return rows(f"training {name}", times, amount=BATCH * CONTEXT, unit="tokens/s")


if __name__ == "__main__":
    args = arguments(__doc__)
    table = compare("1m", 6 if args.quick else 25)
    if not args.quick:
        table += compare("5m", 12)
    report(table, args.json)
