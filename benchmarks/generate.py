"""Time cached greedy generation against HF's `generate`, and measure the memory that a new token allocates.

python benchmarks/generate.py [--quick] [--json FILE]
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from qkflow import Decoder, Sampling, generate, size

from peers import hf_llama
from timing import Comparison, compare_first, parse_arguments, print_comparisons, time_alternately

PROMPT, NEW = 64, 192
GREEDY = Sampling(temperature=0)


def compare(name: str, batch: int, rounds: int) -> list[Comparison]:
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
    times = time_alternately(functions, rounds=rounds)
    return compare_first(f"generation {name}, batch {batch}", times, amount=batch * NEW, unit="tokens/s")


def allocation(name: str, lengths: list[int]) -> list[Comparison]:
    """Measure the bytes that a token allocates after `lengths` tokens. They are constant if the cache is not copied."""
    model = Decoder(size(name)).eval()
    table = []
    with torch.inference_mode():
        for length in lengths:
            _, state = model(torch.randint(0, 256, (1, length)))
            _, state = model(torch.zeros(1, 1, dtype=torch.long), state)  # grows the buffers
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
                model(torch.zeros(1, 1, dtype=torch.long), state)
            allocated = sum(max(0, event.self_cpu_memory_usage) for event in trace.events())
            title = f"allocated by a token after {length:,}, against the {state.nbytes:,} bytes of the state"
            ratio = state.nbytes / allocated
            table.append(Comparison(title, ratio, (ratio, ratio), 0.0, allocated, state.nbytes, "bytes"))
    return table


if __name__ == "__main__":
    args = parse_arguments(__doc__)
    table = compare("1m", 1, 3 if args.quick else 11)
    if not args.quick:
        table += compare("1m", 8, 7) + compare("5m", 1, 7)
    table += allocation("1m", [1024, 4096, 8192])
    print_comparisons(table, args.json)
