"""Autoregressive generation with cached state, for batches of prompts of different lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.models.decoder import Decoder
from qkflow.models.stack import DecoderState

PREFILL_CHUNK = 512
"""Prompt tokens per forward call, which bounds the memory of prefill at any prompt length."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling options."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int | None = None
    """Sample from this many most likely tokens."""
    top_p: float | None = None
    """Sample from the smallest set of most likely tokens with this total probability."""
    seed: int = 0
    """Row i of a batch uses seed + i, so its samples do not depend on the other rows."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"temperature must be a finite number, at least 0, got {self.temperature}")
        if not abs(self.seed) < 2**63:
            raise UsageError(f"seed must be between -2^63 and 2^63, got {self.seed}")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be above 0 and at most 1, got {self.top_p}")


def sampling_probabilities(scores: Float[Tensor, "b n"], sampling: Sampling) -> Float[Tensor, "b n"]:
    """Return the distribution that is sampled from.

    >>> sampling_probabilities(torch.tensor([[0.0, 1.0, 2.0]]), Sampling(top_k=1)).tolist()
    [[0.0, 0.0, 1.0]]
    """
    temperature = max(sampling.temperature, torch.finfo(torch.float32).tiny)  # a smaller one would be rounded to 0
    scores = (scores - scores.max(-1, keepdim=True).values).float() / temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[:, -1:], -torch.inf)
    if sampling.top_p is not None:
        ordered, order = scores.softmax(-1).sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p  # the tokens before it have enough probability
        scores = scores.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), -torch.inf)
    return scores.softmax(-1)


def stream(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    sampling: Sampling = Sampling(),
    stop: Sequence[int] = (),
) -> Iterator[list[int | None]]:
    """Yield one new token per row and step; `None` for rows that have reached a `stop` token."""
    device = model.embedding.weight.device
    if tokens < 0:
        raise UsageError(f"tokens must be at least 0, got {tokens}")
    batch, lengths = _pad(prompts, model.config.vocabulary, device)
    generators = [torch.Generator().manual_seed(sampling.seed + i) for i in range(len(prompts))]
    running = [True] * len(prompts)
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            scores, state = prefill(model, batch, lengths)
        for step in range(tokens):
            with torch.inference_mode():
                chosen = _draw(scores, sampling, generators)
            drawn = chosen.tolist()
            running = [is_on and token not in stop for is_on, token in zip(running, drawn, strict=True)]
            if not any(running):
                return
            yield [token if is_on else None for is_on, token in zip(running, drawn, strict=True)]
            if step + 1 < tokens:
                with torch.inference_mode():
                    logits, state = model(chosen[:, None], state)
                    scores = logits[:, -1]
    finally:
        model.train(training)


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    sampling: Sampling = Sampling(),
    stop: Sequence[int] = (),
) -> list[list[int]]:
    """Return up to `tokens` new tokens per row, without the first `stop` token and what follows it."""
    rows: list[list[int]] = [[] for _ in prompts]
    for step in stream(model, prompts, tokens=tokens, sampling=sampling, stop=stop):
        for row, token in zip(rows, step, strict=True):
            if token is not None:
                row.append(token)
    return rows


def prefill(
    model: Decoder, batch: Int[Tensor, "b t"], lengths: Sequence[int], chunk: int = PREFILL_CHUNK
) -> tuple[Float[Tensor, "b n"], DecoderState]:
    """Return the next-token logits of each row and the state, reading `chunk` columns at a time.

    Apart from the state, memory does not grow with the prompt.
    """
    longest, width = batch.shape[1], model.read_width
    ends = torch.as_tensor(lengths, device=batch.device)
    rows = torch.arange(len(batch), device=batch.device)
    last, state = model.embedding.weight.new_empty(len(batch), width), None
    for start in range(0, longest, chunk):
        tokens = batch[:, start : start + chunk]
        counts = (ends - start).clamp(0, tokens.shape[1])
        layout = None if min(lengths) >= start + tokens.shape[1] else Layout.padded(counts, tokens.shape[1])
        x, state = model.read(tokens, state, layout)
        is_last = (ends > start) & (ends <= start + chunk)
        last = torch.where(is_last[:, None], x[rows, counts.sub(1).clamp_min(0)], last)
    if state is None:
        raise UsageError("prompts are empty: expected at least one token in each")
    return model.logits(last), state


def _pad(
    prompts: Sequence[Sequence[int]], vocabulary: int, device: torch.device
) -> tuple[Int[Tensor, "b t"], list[int]]:
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) < 1:
        raise UsageError("a prompt is empty: expected at least one token; start it with the end-of-document token")
    if outside := [token for prompt in prompts for token in prompt if not 0 <= token < vocabulary]:
        raise UsageError(
            f"token {outside[0]} is not in the model's vocabulary of {vocabulary}: encode with its tokenizer"
        )
    longest = max(lengths)
    batch = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    return batch, lengths


def _draw(scores: Float[Tensor, "b n"], sampling: Sampling, generators: list[torch.Generator]) -> Int[Tensor, " b"]:
    if sampling.temperature == 0:
        return scores.argmax(-1)
    probabilities = sampling_probabilities(scores, sampling).cpu()
    drawn = [torch.multinomial(row, 1, generator=g) for row, g in zip(probabilities, generators, strict=True)]
    return torch.cat(drawn).to(scores.device)
