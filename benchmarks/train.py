"""Time training steps against HF Llama, eager and compiled, and x-transformers: same shape, batch and AdamW, fp32.

    python benchmarks/train.py [--quick] [--json FILE]

Batches of 32 x 256 tokens run on two threads, batches of 4 x 256 on one. Under torch.compile, HF's model and loss are
one compiled function; qkflow is not compiled.
"""

from __future__ import annotations

from functools import partial

import torch

from qkflow import Decoder, size

from peers import hf_llama, n_parameters, x_transformer
from steps import next_token_loss, training_step
from tables import Row
from timing import compare, main, time_alternately

CONTEXT = 256


def large_batch(name: str, rounds: int, hf_target: float | None, x_target: float | None) -> list[Row]:
    config, tokens = size(name), torch.randint(0, 256, (32, CONTEXT + 1))
    ours, hf, x = Decoder(config), hf_llama(config), x_transformer(config, CONTEXT)
    counts = {"qkflow": ours, "HF Llama": hf, "x-transformers": x}
    print(f"{name}: parameters {', '.join(f'{n_parameters(model):,} ({peer})' for peer, model in counts.items())}")
    functions = {
        "qkflow": training_step(ours, partial(next_token_loss, lambda t: ours(t)[0], tokens)),
        "HF Llama": training_step(hf, partial(next_token_loss, lambda t: hf(t, use_cache=False).logits, tokens)),
        "x-transformers": training_step(x, partial(next_token_loss, x, tokens)),
    }
    times = time_alternately(functions, rounds=rounds)
    targets, amount = {"HF Llama": hf_target, "x-transformers": x_target}, 32 * CONTEXT
    return [
        compare(
            "training",
            f"`{name}`, 32 x 256 tokens",
            peer,
            "speed",
            times,
            "qkflow",
            peer,
            tokens=amount,
            at_least=target,
        )
        for peer, target in targets.items()
    ]


def small_batch(name: str, rounds: int) -> list[Row]:
    """Compare with HF eager and compiled on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config, tokens = size(name), torch.randint(0, 256, (4, CONTEXT + 1))
    ours, hf, twin = Decoder(config), hf_llama(config), hf_llama(config)
    compiled = torch.compile(lambda: next_token_loss(lambda t: twin(t, use_cache=False).logits, tokens))
    functions = {
        "qkflow": training_step(ours, partial(next_token_loss, lambda t: ours(t)[0], tokens)),
        "HF Llama": training_step(hf, partial(next_token_loss, lambda t: hf(t, use_cache=False).logits, tokens)),
        "HF Llama, compiled": training_step(twin, compiled),
    }
    times = time_alternately(functions, rounds=rounds)
    work, amount = f"`{name}`, 4 x 256 tokens, one thread", 4 * CONTEXT
    table = [
        compare("training", work, peer, "speed", times, "qkflow", peer, tokens=amount, at_least=target)
        for peer, target in {"HF Llama": 1.4, "HF Llama, compiled": 1.0}.items()
    ]
    torch.set_num_threads(threads)
    return table


def measure(quick: bool) -> list[Row]:
    table = large_batch("1m", 4 if quick else 25, 1.4, 1.65)
    table += [] if quick else large_batch("5m", 12, None, None)
    for name in ("100k", "500k", "1m"):
        table += small_batch(name, 8 if quick else 40)
    return table


if __name__ == "__main__":
    main(__doc__, measure)
