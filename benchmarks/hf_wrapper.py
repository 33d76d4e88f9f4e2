"""Measure the overhead of the transformers wrapper over the bare decoder: training step, cached step and `generate`.

    python benchmarks/hf_wrapper.py [--quick] [--json FILE]

Both models have the same weights and take turns in one process. Each ratio is the wrapper's time divided by the bare
model's. `generate` of transformers does additional work per token, so it has no target.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from qkflow import Decoder, Sampling, generate, size
from qkflow.hf import QKFlowCache, QKFlowForCausalLM

from steps import Function, training_step
from tables import Row
from timing import compare, main, time_alternately

BATCH, CONTEXT = 16, 256
PROMPT, NEW = 256, 64
STEPS = 32
TARGET = 1.03


def training_steps(bare: Decoder, wrapped: QKFlowForCausalLM) -> dict[str, Function]:
    tokens = torch.randint(0, 256, (BATCH, CONTEXT))

    def loss() -> Tensor:
        return F.cross_entropy(bare(tokens)[0][:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return {
        "wrapper": training_step(wrapped, lambda: wrapped(input_ids=tokens, labels=tokens).loss),
        "bare": training_step(bare, loss),
    }


def cached_steps(bare: Decoder, wrapped: QKFlowForCausalLM) -> dict[str, Function]:
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


def generation(bare: Decoder, wrapped: QKFlowForCausalLM, batch: int) -> dict[str, Function]:
    prompt = torch.randint(0, 256, (batch, PROMPT))
    mask = torch.ones_like(prompt)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 256, "eos_token_id": None}
    return {
        "wrapper": lambda: wrapped.generate(prompt, attention_mask=mask, **options),
        "bare": lambda: generate(bare, prompt.tolist(), tokens=NEW, sampling=Sampling(temperature=0.0)),
    }


def overhead(name: str, spec: str, rounds: int) -> list[Row]:
    bare = Decoder(size(name, mechanism=spec))
    wrapped = QKFlowForCausalLM.from_decoder(copy.deepcopy(bare), end=256)
    column = f"`{name}`, `{spec}`"

    def row(work: str, functions: dict[str, Function], rounds: int, calls: int, target: float | None) -> Row:
        times = time_alternately(functions, rounds=rounds)
        return compare("hf-wrapper", work, column, "time", times, "wrapper", "bare", calls=calls, at_most=target)

    table = [row(f"training step, {BATCH} x {CONTEXT} tokens", training_steps(bare, wrapped), rounds, 1, TARGET)]
    bare.eval(), wrapped.eval()
    table.append(row("cached step, one row", cached_steps(bare, wrapped), 4 * rounds, STEPS, TARGET))
    for batch, rows in ((1, "one row"), (8, "eight rows")):
        table.append(row(f"`generate`, per token, {rows}", generation(bare, wrapped, batch), rounds, NEW, None))
    return table


def measure(quick: bool) -> list[Row]:
    rounds = 4 if quick else 15
    return overhead("1m", "standard", rounds) + overhead("1m", "qdelta", rounds)


if __name__ == "__main__":
    main(__doc__, measure)
