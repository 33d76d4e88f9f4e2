"""Time training steps at 1m and 5m against HF Llama and x-transformers: same shape, batch and AdamW, fp32.

python benchmarks/train.py [--quick] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkflow import Decoder, size

from peers import hf_llama, n_parameters, x_transformer
from timing import Comparison, compare_first, parse_arguments, print_comparisons, time_alternately

BATCH, CONTEXT = 32, 256


def training_step(model: nn.Module, logits: Callable[[Tensor], Tensor], tokens: Tensor) -> Callable[[], None]:
    """Return a training step: loss, gradients, clipping, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        loss = F.cross_entropy(logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def compare(name: str, rounds: int) -> list[Comparison]:
    config = size(name)
    tokens = torch.randint(0, 256, (BATCH, CONTEXT + 1))
    ours, hf, x = Decoder(config), hf_llama(config), x_transformer(config, CONTEXT)
    counts = (
        f"{n_parameters(model):,} ({peer})" for model, peer in ((ours, "ours"), (hf, "HF"), (x, "x-transformers"))
    )
    print(f"{name}: parameters {', '.join(counts)}")
    times = time_alternately(
        {
            "qkflow": training_step(ours, lambda t: ours(t)[0], tokens),
            "HF Llama": training_step(hf, lambda t: hf(t, use_cache=False).logits, tokens),
            "x-transformers": training_step(x, x, tokens),
        },
        rounds=rounds,
        warmup=2,
    )
    return compare_first(f"training {name}", times, amount=BATCH * CONTEXT, unit="tokens/s")


if __name__ == "__main__":
    args = parse_arguments(__doc__)
    table = compare("1m", 6 if args.quick else 25)
    if not args.quick:
        table += compare("5m", 12)
    print_comparisons(table, args.json)
