"""Measure the overhead of the transformers wrapper over the bare decoder: training step, cached step and `generate`.

python benchmarks/hf_wrapper.py [--quick] [--json FILE]

Both models have the same weights and take turns in one process. Each ratio is the wrapper's time divided by the bare
model's. `generate` of transformers does additional work per token, so it has no target.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkflow import Decoder, DecoderConfig, Sampling, generate, size
from qkflow.hf import QKFlowCache, QKFlowForCausalLM

from timing import Measurement, parse_arguments, print_measurements, quartiles, relative_spread, time_alternately

BATCH, CONTEXT = 16, 256
PROMPT, NEW = 256, 64
STEPS = 32
TARGET = 1.03


def training_step(model: nn.Module, loss: Callable[[Tensor], Tensor], tokens: Tensor) -> Callable[[], None]:
    """Return a training step: loss, gradients, clipping, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss(tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def training_steps(bare: Decoder, wrapped: QKFlowForCausalLM) -> dict[str, Callable[[], None]]:
    tokens = torch.randint(0, 256, (BATCH, CONTEXT))

    def loss(t: Tensor) -> Tensor:
        return F.cross_entropy(bare(t)[0][:, :-1].flatten(0, 1), t[:, 1:].flatten())

    return {
        "wrapper": training_step(wrapped, lambda t: wrapped(input_ids=t, labels=t).loss, tokens),
        "bare": training_step(bare, loss, tokens),
    }


def cached_steps(bare: Decoder, wrapped: QKFlowForCausalLM) -> dict[str, Callable[[], None]]:
    """Single-token steps after the same prompt."""
    token = torch.zeros(1, 1, dtype=torch.long)
    with torch.inference_mode():
        _, start = bare(torch.randint(0, 256, (1, PROMPT)))

    @torch.inference_mode()
    def run_bare() -> None:
        state = start
        for _ in range(STEPS):
            _, state = bare(token, state)

    @torch.inference_mode()
    def run_wrapper() -> None:
        cache = QKFlowCache()
        cache.advance(start, PROMPT, None)
        for _ in range(STEPS):
            wrapped(input_ids=token, past_key_values=cache)

    return {"wrapper": run_wrapper, "bare": run_bare}


def generation(bare: Decoder, wrapped: QKFlowForCausalLM, batch: int) -> dict[str, Callable[[], None]]:
    prompt = torch.randint(0, 256, (batch, PROMPT))
    mask = torch.ones_like(prompt)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 256, "eos_token_id": None}
    return {
        "wrapper": lambda: wrapped.generate(prompt, attention_mask=mask, **options),
        "bare": lambda: generate(bare, prompt.tolist(), tokens=NEW, sampling=Sampling(temperature=0.0)),
    }


def measure(
    setting: str,
    quantity: str,
    functions: dict[str, Callable[[], None]],
    rounds: int,
    *,
    target: float | None,
    calls: int,
) -> Measurement:
    times = time_alternately(functions, rounds=rounds, warmup=2)
    low, ratio, high = quartiles([a / b for a, b in zip(times["wrapper"], times["bare"], strict=True)])
    return Measurement(
        setting,
        quantity,
        ratio,
        quartiles=(low, high),
        target=target,
        lower_is_better=True,
        ours=1e3 * statistics.median(times["wrapper"]) / calls,
        peer=1e3 * statistics.median(times["bare"]) / calls,
        control=relative_spread(times["control"]),
    )


def compare(name: str, config: DecoderConfig, rounds: int) -> list[Measurement]:
    setting = f"{name} ({config.mechanism}), {torch.get_num_threads()} threads"
    bare = Decoder(config)
    wrapped = QKFlowForCausalLM.from_decoder(copy.deepcopy(bare), end=256)
    table = [measure(setting, "training step", training_steps(bare, wrapped), rounds, target=TARGET, calls=1)]
    bare.eval(), wrapped.eval()
    cached = cached_steps(bare, wrapped)
    table.append(measure(setting, "cached step, 1 row", cached, 6 * rounds, target=TARGET, calls=STEPS))
    for batch in (1, 8):
        functions = generation(bare, wrapped, batch)
        table.append(measure(setting, f"generate, per token, {batch} rows", functions, rounds, target=None, calls=NEW))
    return table


if __name__ == "__main__":
    args = parse_arguments(__doc__)
    table = compare("1m", size("1m"), 4 if args.quick else 15)
    if not args.quick:
        table += compare("1m", size("1m", mechanism="qdelta"), 15)
        table += compare("5m", size("5m"), 9)
    print_measurements(table, args.json)
