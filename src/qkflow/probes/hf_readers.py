"""A reader of models of transformers that return their attentions: classifiers of texts, and causal language models."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.probes.maps import unchanged
from qkflow.probes.pooling import Map
from qkflow.probes.readers import (
    Asks,
    Lengths,
    Reading,
    Tokens,
    checked,
    embedding_saliency,
    read_places,
)


class HFReader:
    """Reads a `*ForSequenceClassification`, or at one place a model that scores every token, as `*ForCausalLM`."""

    def __init__(self, model: nn.Module, asks: Asks | None = None) -> None:
        self.model: Any = model
        self.asks = asks
        if self.model.config.is_encoder_decoder:
            raise UsageError(
                f"a {type(model).__name__} has an encoder and a decoder: a reader needs a model with a single stack"
            )
        self.embedding: nn.Embedding = self.model.get_input_embeddings()
        self.options = inspect.signature(self.model.forward).parameters

    def read(self, tokens: Tokens, lengths: Lengths, *, maps: bool = False) -> Reading:
        """The scores of each answer, and the attentions if they are asked for."""
        tokens, lengths = checked(tokens, lengths, self.embedding.weight)
        with unchanged(self.model), torch.no_grad():
            logits, out = self._run(tokens, lengths, maps)
        if not maps:
            return Reading(logits=logits)
        attentions = out.attentions
        if not attentions or any(layer is None for layer in attentions):
            raise UsageError(
                f"{type(self.model).__name__} returned no attentions: load it with attn_implementation='eager'"
            )
        padding = ~read_places(tokens, lengths)[:, None, :, None]
        found: tuple[Map, ...] = tuple(layer.masked_fill(padding, 0) for layer in attentions)
        first = self.asks == "first"
        if self.asks is None and out.logits.ndim == 2:  # it chose the place by itself
            first = any(bool(layer.triu(1).any()) for layer in found)
        return Reading(logits=logits, maps=found, asked=torch.zeros_like(lengths) if first else lengths - 1)

    def saliency(self, tokens: Tokens, lengths: Lengths) -> Float[Tensor, "b t"]:
        """|gradient . embedding| of the score of the model's own answer; 0 at padding."""
        tokens, lengths = checked(tokens, lengths, self.embedding.weight)
        with unchanged(self.model):
            found = embedding_saliency(self.embedding, lambda: self._run(tokens, lengths, False)[0])
        return found * read_places(tokens, lengths)

    def _run(self, tokens: Tokens, lengths: Lengths, maps: bool) -> tuple[Float[Tensor, "b c"], Any]:
        mask = read_places(tokens, lengths)
        pad = self.model.config.pad_token_id
        self._check_padding(tokens, lengths, pad)
        place = torch.zeros_like(lengths) if self.asks == "first" else lengths - 1
        options: dict[str, Any] = {"use_cache": False} if "use_cache" in self.options else {}
        if "logits_to_keep" in self.options:  # a score for every token of a vocabulary and every place is too much
            kept, place = place.unique(return_inverse=True)
            options["logits_to_keep"] = kept
        out = self.model(
            input_ids=tokens.masked_fill(~mask, 0 if pad is None else pad),  # some count positions by it
            attention_mask=mask.long(),
            output_attentions=maps,
            return_dict=True,
            **options,
        )
        logits: Tensor = out.logits
        if logits.ndim == 3:
            logits = logits[torch.arange(len(tokens), device=tokens.device), place]
        return logits, out

    def _check_padding(self, tokens: Tokens, lengths: Lengths, pad: int | None) -> None:
        """A causal classifier finds the end of a text by its padding, and would answer elsewhere without telling."""
        if not hasattr(self.model, "score") or (
            len(tokens) == 1 and int(lengths[0]) == tokens.shape[1] and pad is None
        ):
            return
        last: Int[Tensor, " b"] = tokens[torch.arange(len(tokens), device=tokens.device), lengths - 1]
        if pad is None or bool((last == pad).any()):
            raise UsageError(
                f"{type(self.model).__name__} answers before the first padding token, and"
                f" {'none is set' if pad is None else f'a text ends with it, {pad}'}:"
                " set model.config.pad_token_id to a token that no text has"
            )
