from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from qkflow.errors import UsageError
from qkflow.models import Decoder, DecoderConfig, Sampling, generate, stream
from qkflow.models.generation import prefill, sampling_probabilities

GREEDY = Sampling(temperature=0.0)
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
MECHANISMS: list[Any] = ["standard", "differential", ("standard:window=3", "differential:window=4")]


def model(mechanism: Any = "standard", dropout: float = 0.0) -> Decoder:
    config = DecoderConfig(
        width=16, layers=2, heads=4, hidden=24, vocabulary=11, mechanism=mechanism, dropout=dropout, tied=False
    )
    decoder = Decoder(config).double()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return decoder.eval()


def generate_uncached(decoder: Decoder, prompt: list[int], count: int, sampling: Sampling, seed: int) -> list[int]:
    """Generate from one prompt without a cache: every token recomputes the whole text."""
    generator, sequence = torch.Generator().manual_seed(seed), list(prompt)
    for _ in range(count):
        with torch.no_grad():
            scores = decoder(torch.tensor([sequence]))[0][:, -1]
        if sampling.temperature == 0:
            sequence.append(int(scores.argmax()))
        else:
            sequence.append(int(torch.multinomial(sampling_probabilities(scores, sampling), 1, generator=generator)))
    return sequence[len(prompt) :]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(seed=5), Sampling(temperature=0.7, top_k=5, top_p=0.9, seed=2)], ids=str
)
def test_batched_generation_with_cache_equals_single_prompts_without_cache(mechanism: Any, sampling: Sampling) -> None:
    decoder = model(mechanism)
    actual = generate(decoder, PROMPTS, tokens=10, sampling=sampling)
    assert actual == [
        generate_uncached(decoder, prompt, 10, sampling, sampling.seed + i) for i, prompt in enumerate(PROMPTS)
    ]
    if sampling.temperature:
        assert len({tuple(row) for row in actual}) == len(PROMPTS), "each row has its own random stream"


@pytest.mark.parametrize("prompts", [[[1, 2], [3, 4]], [[7]]])
def test_prompts_of_equal_length_generate_the_same_without_padding(prompts: list[list[int]]) -> None:
    decoder = model()
    actual = generate(decoder, prompts, tokens=10, sampling=Sampling(seed=5))
    assert actual == [generate_uncached(decoder, prompt, 10, Sampling(), 5 + i) for i, prompt in enumerate(prompts)]


def test_each_row_uses_its_own_seed() -> None:
    decoder = model()
    together = generate(decoder, PROMPTS, tokens=12, sampling=Sampling(seed=7))
    for i, prompt in enumerate(PROMPTS):
        assert generate(decoder, [prompt], tokens=12, sampling=Sampling(seed=7 + i)) == [together[i]]


def test_generation_depends_on_the_seed_only() -> None:
    decoder = model()
    first = generate(decoder, PROMPTS, tokens=12, sampling=Sampling(seed=1))
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    assert generate(decoder, PROMPTS, tokens=12, sampling=Sampling(seed=1)) == first
    assert torch.equal(torch.random.get_rng_state(), before)
    assert generate(decoder, PROMPTS, tokens=12, sampling=Sampling(seed=2)) != first


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3)], ids=["greedy", "sampled"])
def test_stream_yields_what_generate_returns(sampling: Sampling) -> None:
    decoder = model()
    rows = generate(decoder, PROMPTS, tokens=9, sampling=sampling)
    steps = list(stream(decoder, PROMPTS, tokens=9, sampling=sampling))
    assert [list(row) for row in zip(*steps, strict=True)] == rows


def test_stream_is_lazy() -> None:
    decoder, calls = model(), []
    decoder.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    steps = stream(decoder, [[1]], tokens=100, sampling=GREEDY)
    assert calls == []
    next(steps)
    next(steps)
    assert len(calls) == 2
    steps.close()  # type: ignore[attr-defined]
    assert len(calls) == 2
    generate(decoder, [[1]], tokens=3, sampling=GREEDY)
    assert len(calls) == 2 + 3, "no forward pass after the last token"


def test_rows_end_before_their_first_stop_token() -> None:
    decoder = model()
    free = generate(decoder, PROMPTS, tokens=30, sampling=Sampling(seed=4))
    stop = [free[0][4], free[1][9]]
    expected = [row[: min([i for i, token in enumerate(row) if token in stop], default=30)] for row in free]
    assert generate(decoder, PROMPTS, tokens=30, sampling=Sampling(seed=4), stop=stop) == expected
    assert len({len(row) for row in expected}) > 1
    steps = list(stream(decoder, PROMPTS, tokens=30, sampling=Sampling(seed=4), stop=stop))
    assert len(steps) == max(map(len, expected))
    for i, row in enumerate(expected):
        assert [step[i] for step in steps] == row + [None] * (len(steps) - len(row))


def test_generation_ends_when_all_rows_have_stopped() -> None:
    decoder, calls = model(), []
    first = generate(decoder, [[1], [1]], tokens=1, sampling=GREEDY)
    decoder.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    assert generate(decoder, [[1], [1]], tokens=50, sampling=GREEDY, stop=[first[0][0]]) == [[], []]
    assert len(calls) == 1


@pytest.mark.parametrize("training", [True, False])
def test_generation_uses_eval_mode_and_restores_the_mode(training: bool) -> None:
    decoder = model(dropout=0.5)
    expected = generate(decoder, PROMPTS, tokens=8, sampling=GREEDY)
    decoder.train(training)
    assert generate(decoder, PROMPTS, tokens=8, sampling=GREEDY) == expected
    assert {module.training for module in decoder.modules()} == {training}


def test_mode_is_restored_if_the_consumer_stops_or_fails() -> None:
    decoder = model().train()
    assert len(list(islice(stream(decoder, [[1]], tokens=10), 3))) == 3
    assert decoder.training

    steps = stream(decoder, [[1]], tokens=10)
    next(steps)
    assert not decoder.training
    steps.close()  # type: ignore[attr-defined]
    assert decoder.training

    def consume() -> None:
        for _ in stream(decoder, [[1]], tokens=10):
            raise KeyError

    with pytest.raises(KeyError):
        consume()
    assert decoder.training


def test_mode_is_restored_if_the_model_fails() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    decoder = model().train()
    decoder.norm.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        generate(decoder, [[1]], tokens=2)
    assert decoder.training


def test_consumer_can_train_between_tokens() -> None:
    decoder = model()
    for _ in stream(decoder, [[1]], tokens=3):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        leaf = torch.ones(1, requires_grad=True)
        (2 * leaf).backward()


def test_zero_tokens_returns_empty_rows() -> None:
    assert generate(model(), PROMPTS, tokens=0) == [[], [], []]


def test_low_temperature_is_greedy() -> None:
    decoder = model()
    greedy = generate(decoder, PROMPTS, tokens=10, sampling=GREEDY)
    for temperature in (1e-6, 5e-324):
        assert generate(decoder, PROMPTS, tokens=10, sampling=Sampling(temperature=temperature, seed=8)) == greedy
    assert generate(decoder, PROMPTS, tokens=10, sampling=Sampling(top_k=1, seed=8)) == greedy
    assert generate(decoder, PROMPTS, tokens=10, sampling=Sampling(top_p=1e-9, seed=8)) == greedy


scores = st.lists(st.lists(st.integers(-40, 40), min_size=6, max_size=6, unique=True), min_size=1, max_size=3)


@given(scores, st.none() | st.integers(1, 8), st.none() | st.floats(0.05, 1), st.sampled_from([0.5, 1.0, 2.0]))
@settings(deadline=None, max_examples=25)
def test_sampling_probabilities_match_their_definition(
    raw: list[list[int]], top_k: int | None, top_p: float | None, temperature: float
) -> None:
    raw_scores = torch.tensor(raw, dtype=torch.float64) / 10
    actual = sampling_probabilities(raw_scores, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    for row, chances in zip(raw_scores, actual.double(), strict=True):
        order = sorted(range(6), key=lambda token: -float(row[token]))
        kept = order[: top_k or 6]
        weights = {token: float(torch.exp(row[token] / temperature)) for token in kept}
        share = {token: weight / sum(weights.values()) for token, weight in weights.items()}
        if top_p is not None:
            fewest, total = [], 0.0
            for token in kept:
                fewest.append(token)
                total += share[token]
                if total >= top_p * (1 - 1e-6):
                    break
            kept = fewest
        total = sum(share[token] for token in kept)
        expected = torch.tensor(
            [share[token] / total if token in kept else 0.0 for token in range(6)], dtype=torch.float64
        )
        assert_close(chances, expected, rtol=0, atol=1e-5)


def test_sample_frequencies_match_probabilities() -> None:
    decoder = model()
    with torch.no_grad():
        expected = decoder(torch.tensor([[4]]))[0][0, -1].softmax(-1)
    drawn = torch.tensor(generate(decoder, [[4]] * 4000, tokens=1, sampling=Sampling(seed=0))).flatten()
    assert_close(torch.bincount(drawn, minlength=11) / 4000, expected.float(), rtol=0, atol=0.03)


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []]])
def test_empty_prompts_raise(prompts: list[list[int]]) -> None:
    with pytest.raises(UsageError, match="a prompt is empty"):
        generate(model(), prompts, tokens=3)


@pytest.mark.parametrize("token", [-1, 257])
def test_tokens_outside_the_vocabulary_raise(token: int) -> None:
    model = Decoder(DecoderConfig(width=8, layers=1, heads=2, hidden=8))
    with pytest.raises(UsageError, match=f"token {token} is not in the model's vocabulary of 257"):
        generate(model, [[1, token]], tokens=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be a finite number, at least 0, got -0\.1"),
        ({"temperature": float("nan")}, "temperature must be a finite number, at least 0, got nan"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be above 0 and at most 1, got 0\.0"),
        ({"top_p": 1.5}, r"top_p must be above 0 and at most 1, got 1\.5"),
        ({"top_p": float("nan")}, "top_p must be above 0 and at most 1, got nan"),
    ],
)
def test_invalid_sampling_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Sampling(**options)


@pytest.mark.parametrize("mechanism", [*MECHANISMS, "qdelta", "coupled", "kuramoto:frustrated=True"], ids=str)
def test_prefill_does_not_depend_on_the_chunk_size(mechanism: Any) -> None:
    """Rows end inside a chunk, at the end of a chunk, and in earlier chunks."""
    decoder, lengths = model(mechanism), [9, 1, 6, 4]
    batch = torch.randint(0, 11, (4, 9))
    with torch.inference_mode():
        expected, whole = prefill(decoder, batch, lengths, chunk=100)
        assert_close(expected, torch.stack([decoder(batch[i : i + 1, :n])[0][0, -1] for i, n in enumerate(lengths)]))
        for chunk in (1, 3, 8):
            scores, state = prefill(decoder, batch, lengths, chunk=chunk)
            assert_close(scores, expected)
            assert state.length.tolist() == lengths
            assert_close(decoder(batch[:, :2], state)[0], decoder(batch[:, :2], whole)[0])


LONG_PROMPT = """
import torch
from qkflow import Decoder, size
from qkflow.models.generation import prefill

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))

model = Decoder(size("100k", mechanism="qdelta")).eval()
prompt = torch.arange(40_000)[None] % 251
with torch.inference_mode():
    prefill(model, prompt[:, :2_000], [2_000])
    before = peak()
    scores, state = prefill(model, prompt, [40_000])
    for _ in range(3):
        scores, state = model(scores.view(1, -1).argmax(-1, keepdim=True), state)
assert state.length.tolist() == [40_003] and scores.isfinite().all()
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell a process's peak")
def test_prefill_memory_does_not_grow_with_the_prompt() -> None:
    run = subprocess.run([sys.executable, "-c", LONG_PROMPT], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 8_000_000, "20 times as many tokens"
