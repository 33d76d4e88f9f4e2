"""Generation with the cache: prompts of unequal length in one batch, one token a step, as a stream or all at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.models.decoder import Decoder
from qkflow.models.stack import DecoderState

PIECE = 512
"""Tokens of a prompt that are read at once: scores of so many against all before them fit into memory at any length."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 1.0
    """Scores are divided by it; 0 takes the most likely token."""
    top_k: int | None = None
    """Draw from this many most likely tokens only."""
    top_p: float | None = None
    """Draw from the fewest most likely tokens that have this much probability together."""
    seed: int = 0
    """Row i of a batch draws as it would alone with seed + i: what stands beside it changes nothing."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UsageError(f"temperature must not be negative, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be above 0 and at most 1, got {self.top_p}")


def likely(scores: Float[Tensor, "b n"], sampling: Sampling) -> Float[Tensor, "b n"]:
    """The probabilities that sampling draws from.

    >>> likely(torch.tensor([[0.0, 1.0, 2.0]]), Sampling(top_k=1)).tolist()
    [[0.0, 0.0, 1.0]]
    """
    scores = (scores - scores.max(-1, keepdim=True).values).float() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[:, -1:], -torch.inf)
    if sampling.top_p is not None:
        ordered, order = scores.softmax(-1).sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p  # what lies before it has enough already
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
    """New tokens as they come: one a row at each step, `None` for a row that has met a `stop` token."""
    device = model.embedding.weight.device
    if tokens < 0:
        raise UsageError(f"tokens must not be negative, got {tokens}")
    batch, lengths = _together(prompts, model.config.vocabulary, device)
    generators = [torch.Generator().manual_seed(sampling.seed + i) for i in range(len(prompts))]
    running = [True] * len(prompts)
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            scores, state = read_prompts(model, batch, lengths)
        for step in range(tokens):
            with torch.inference_mode():
                chosen = _draw(scores, sampling, generators)
            drawn = chosen.tolist()
            running = [on and token not in stop for on, token in zip(running, drawn, strict=True)]
            if not any(running):
                return
            yield [token if on else None for on, token in zip(running, drawn, strict=True)]
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
    """The new tokens of every row, at most `tokens` of them, up to and without the first `stop` token."""
    rows: list[list[int]] = [[] for _ in prompts]
    for step in stream(model, prompts, tokens=tokens, sampling=sampling, stop=stop):
        for row, token in zip(rows, step, strict=True):
            if token is not None:
                row.append(token)
    return rows


def read_prompts(
    model: Decoder, batch: Int[Tensor, "b t"], lengths: Sequence[int], piece: int = PIECE
) -> tuple[Float[Tensor, "b n"], DecoderState]:
    """Scores of the token after the last of each row, and what to carry on with, a `piece` of the columns at a time.

    What is held at once does not grow with the prompt: a state, and what one piece of it needs.
    """
    longest, width = batch.shape[1], model.read_width
    ends = torch.as_tensor(lengths, device=batch.device)
    rows = torch.arange(len(batch), device=batch.device)
    last, state = model.embedding.weight.new_empty(len(batch), width), None
    for begin in range(0, longest, piece):
        now = batch[:, begin : begin + piece]
        there = (ends - begin).clamp(0, now.shape[1])
        layout = None if min(lengths) >= begin + now.shape[1] else Layout.padded(there, now.shape[1])
        x, state = model.read(now, state, layout)
        here = (ends > begin) & (ends <= begin + piece)
        last = torch.where(here[:, None], x[rows, there.sub(1).clamp_min(0)], last)
    if state is None:
        raise UsageError("every prompt needs at least one token, got a batch without columns")
    return model.logits(last), state


def _together(
    prompts: Sequence[Sequence[int]], vocabulary: int, device: torch.device
) -> tuple[Int[Tensor, "b t"], list[int]]:
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) < 1:
        raise UsageError("every prompt needs at least one token: begin an empty one with the end-of-document token")
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
    chances = likely(scores, sampling).cpu()
    drawn = [torch.multinomial(row, 1, generator=g) for row, g in zip(chances, generators, strict=True)]
    return torch.cat(drawn).to(scores.device)
