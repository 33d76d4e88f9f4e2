"""Time cached generation: `generate` against HF's, and a decoded token of each mechanism against standard attention.

    python benchmarks/generate.py [--quick] [--json FILE]

`generate` is greedy. Decoded tokens are single-token steps of models with as many parameters as the standard one, after
a prompt and the tokens of the previous rounds. The memory of a token is what it allocates, and does not depend on the
length if the cache is not copied.
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from qkflow import Decoder, Sampling, generate, size
from qkflow.models import matched, parameters

from peers import hf_llama
from steps import decode_tokens
from tables import Row
from timing import compare, compare_memory, main, time_alternately

PROMPT, NEW = 64, 192
GREEDY = Sampling(temperature=0)
TARGETS = {("kuramoto", 512): 1.15, ("qdelta", 512): 1.1, ("qdelta", 4096): 1.0}
"""The longest time of a decoded token divided by that of standard attention, by mechanism and prompt."""


def generation(name: str, batch: int, rounds: int, target: float | None = None) -> Row:
    config = size(name)
    ours, hf = Decoder(config).eval(), hf_llama(config).eval()
    prompt = torch.randint(0, 256, (batch, PROMPT))

    def hf_generate() -> None:
        hf.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )

    functions = {
        "qkflow": lambda: generate(ours, prompt.tolist(), tokens=NEW, sampling=GREEDY),
        "HF Llama": hf_generate,
    }
    times = time_alternately(functions, rounds=rounds, warmup=1)
    work, amount = f"`{name}`, batch {batch}", batch * NEW
    return compare("generation", work, "HF Llama", "speed", times, "qkflow", "HF Llama", tokens=amount, at_least=target)


def decoding(past: int, rounds: int, tokens: int = 8) -> list[Row]:
    """Compare decoded tokens after a prompt with those of standard attention."""
    specs = ("standard", "coupled", "kuramoto", "kuramoto:frustrated=True", "qdelta")
    functions = {}
    for spec in specs:
        torch.manual_seed(0)
        model = Decoder(matched(size("1m", mechanism=spec), parameters(size("1m")))).eval()
        functions[spec] = decode_tokens(model, past, tokens)
    times = time_alternately(functions, rounds=rounds)
    return [
        compare(
            "decoding",
            f"`{spec}`",
            f"after {past:,} tokens",
            "time",
            times,
            spec,
            "standard",
            calls=tokens,
            at_most=TARGETS.get((spec, past)),
        )
        for spec in specs[1:]
    ]


def decoding_growth(rounds: int, tokens: int = 16) -> list[Row]:
    """Compare decoded tokens of Q-Delta after 1,000 and after 30,000 tokens."""
    torch.manual_seed(0)
    model = Decoder(size("1m", mechanism="qdelta")).eval()
    functions = {str(past): decode_tokens(model, past, tokens) for past in (1_000, 30_000)}
    times = time_alternately(functions, rounds=rounds)
    work = "time of a decoded token, `qdelta` at `1m`"
    against = "30,000 and 1,000 tokens"
    return [compare("growth", work, against, "time", times, "30000", "1000", calls=tokens, at_most=1.1)]


@torch.inference_mode()
def allocated_kilobytes(model: Decoder, past: int) -> float:
    token = torch.zeros(1, 1, dtype=torch.long)
    _, state = model(torch.randint(0, 256, (1, past)))
    _, state = model(token, state)  # grows the buffers
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        model(token, state)
    return sum(max(0, event.self_cpu_memory_usage) for event in trace.events()) / 1e3


def allocation_growth() -> list[Row]:
    model = Decoder(size("1m")).eval()
    short, long = (allocated_kilobytes(model, past) for past in (1024, 8192))
    work = "memory that a decoded token allocates, `standard` at `1m`"
    return [compare_memory("growth", work, "8,192 and 1,024 tokens", long, short, unit="kB", at_most=1.01)]


def measure(quick: bool) -> list[Row]:
    table = [generation("1m", 1, 3 if quick else 15, 2.5)]
    table += [] if quick else [generation("1m", 8, 7), generation("5m", 1, 7)]
    for past in (512, 4096):
        table += decoding(past, 15 if quick else 60)
    return table + decoding_growth(9 if quick else 45) + allocation_growth()


if __name__ == "__main__":
    main(__doc__, measure)
