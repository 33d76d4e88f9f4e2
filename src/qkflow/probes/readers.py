"""One interface to read texts with any model: logits at the answer position, attention maps, and saliency.

Rows are padded on the right. qkflow's models are causal, so padding behind a text does not affect it, and no mask is
needed. Reading leaves the model as it was: no gradients on parameters, and the training mode of every module restored.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.models import Classifier, Decoder
from qkflow.models.one_layer import OneLayer
from qkflow.probes.attention import Map, eval_mode, record_inputs

Tokens = Int[Tensor, "b t"]
Lengths = Int[Tensor, " b"]
AnswerAt = Literal["last", "first"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReaderOutput:
    """The output of a model on a batch of texts."""

    logits: Float[Tensor, "b c"]
    """Scores of the answers."""
    maps: tuple[Map, ...] | None = None
    """Attention map of each layer, zero at padding, if requested."""
    answer_positions: Int[Tensor, " b"] | None = None
    """The position at which each row is answered; `None` is the last token."""


@runtime_checkable
class Reader(Protocol):
    """Reads right-padded texts and answers at one position of each."""

    def read(self, tokens: Tokens, lengths: Lengths, *, maps: bool = False) -> ReaderOutput:
        """Return the scores of the answers, and the attention maps if requested."""
        ...

    def saliency(self, tokens: Tokens, lengths: Lengths) -> Float[Tensor, "b t"]:
        """Return |gradient . embedding| of the score of the model's answer for each token; 0 at padding."""
        ...


def reader(model: nn.Module, *, answer_at: AnswerAt | None = None) -> Reader:
    """Return a reader of a `Classifier`, a `Decoder` (it answers with the next token), a `OneLayer`, or a
    transformers model.

    Load transformers models with `attn_implementation="eager"`. They may answer at their first token
    (`answer_at="first"`, as BERT does); by default a model with bidirectional attention does.

    >>> from qkflow.models import ClassifierConfig
    >>> model = Classifier(ClassifierConfig(width=32, layers=2, heads=4, vocabulary=50, classes=3))
    >>> output = reader(model).read(torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([3, 2]), maps=True)
    >>> tuple(output.logits.shape), [tuple(layer.shape) for layer in output.maps]
    ((2, 3), [(2, 4, 3, 3), (2, 4, 3, 3)])
    """
    if any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__):
        return _HFReader(model, answer_at)
    if answer_at == "first":
        raise UsageError(f"{type(model).__name__} answers at the last token: answer_at='first' is for encoders")
    if isinstance(model, Classifier | Decoder):
        return _StackReader(model)
    if isinstance(model, OneLayer):
        return _OneLayerReader(model)
    raise UsageError(
        f"no reader for {type(model).__name__}: expected a Classifier, Decoder, OneLayer or transformers model;"
        " write a class with the methods of qkflow.probes.readers.Reader"
    )


class _EmbeddingReader(ABC):
    """A reader of a model with an embedding, whose output the saliency is computed for."""

    model: Any
    embedding: nn.Embedding

    @abstractmethod
    def _logits(self, tokens: Tokens, lengths: Lengths) -> Float[Tensor, "b c"]: ...

    def saliency(self, tokens: Tokens, lengths: Lengths) -> Float[Tensor, "b t"]:
        tokens, lengths = _validate(tokens, lengths, self.embedding.weight)
        outputs: list[Tensor] = []

        def record(_: nn.Module, __: tuple[Any, ...], x: Tensor) -> Tensor:
            outputs.append(x.detach().requires_grad_())
            return outputs[-1]

        hook = self.embedding.register_forward_hook(record)
        try:
            with eval_mode(self.model), torch.enable_grad():
                logits = self._logits(tokens, lengths)
                saliency = _gradient_times_input(outputs[0], logits)
        finally:
            hook.remove()
        return saliency * _valid_mask(tokens, lengths)


class _StackReader(_EmbeddingReader):
    """Reads a stack of mechanisms at the last token."""

    def __init__(self, model: Classifier | Decoder) -> None:
        self.model, self.embedding = model, model.embedding

    def read(self, tokens: Tokens, lengths: Lengths, *, maps: bool = False) -> ReaderOutput:
        tokens, lengths = _validate(tokens, lengths, self.embedding.weight)
        mechanisms = self.model.mechanisms if maps else []
        with eval_mode(self.model), torch.no_grad():
            with record_inputs(mechanisms) as inputs:
                logits = self._logits(tokens, lengths)
            if not maps:
                return ReaderOutput(logits=logits)
            padding = ~_valid_mask(tokens, lengths)[:, None, :, None]
            weights = (layer.weights(x).masked_fill(padding, 0) for layer, x in zip(mechanisms, inputs, strict=True))
            return ReaderOutput(logits=logits, maps=tuple(weights))

    def _logits(self, tokens: Tokens, lengths: Lengths) -> Float[Tensor, "b c"]:
        x, _ = self.model.read(tokens)
        last = x[torch.arange(len(x), device=x.device), lengths - 1]  # before the head: a vocabulary is wide
        return self.model.logits(last) if isinstance(self.model, Decoder) else self.model.head(last)


class _OneLayerReader:
    """Reads the one-layer model, in which only the last token attends; the others get the identity as their map."""

    def __init__(self, model: OneLayer) -> None:
        self.model = model

    def read(self, tokens: Tokens, lengths: Lengths, *, maps: bool = False) -> ReaderOutput:
        tokens, lengths = _validate(tokens, lengths, next(self.model.parameters()))
        layout = Layout.padded(lengths, tokens.shape[1])
        with eval_mode(self.model), torch.no_grad():
            logits = self.model(tokens, layout)
            if not maps:
                return ReaderOutput(logits=logits)
            weights = torch.diag_embed(_valid_mask(tokens, lengths).to(logits.dtype))
            weights[torch.arange(len(tokens), device=tokens.device), lengths - 1] = self.model.weights(tokens, layout)
            return ReaderOutput(logits=logits, maps=(weights[:, None],))

    def saliency(self, tokens: Tokens, lengths: Lengths) -> Float[Tensor, "b t"]:
        tokens, lengths = _validate(tokens, lengths, next(self.model.parameters()))
        layout = Layout.padded(lengths, tokens.shape[1])
        with eval_mode(self.model), torch.enable_grad():
            x = self.model.embed(tokens).detach().requires_grad_()
            return _gradient_times_input(x, self.model.read(x, layout)) * layout.valid


class _HFReader(_EmbeddingReader):
    """Reads a transformers model: a `*ForSequenceClassification`, or one that scores every token (`*ForCausalLM`)."""

    def __init__(self, model: nn.Module, answer_at: AnswerAt | None = None) -> None:
        self.model, self.answer_at = model, answer_at
        if self.model.config.is_encoder_decoder:
            raise UsageError(f"{type(model).__name__} is an encoder-decoder: expected a model with a single stack")
        self.embedding = self.model.get_input_embeddings()
        self.options = inspect.signature(self.model.forward).parameters

    def read(self, tokens: Tokens, lengths: Lengths, *, maps: bool = False) -> ReaderOutput:
        tokens, lengths = _validate(tokens, lengths, self.embedding.weight)
        with eval_mode(self.model), torch.no_grad():
            logits, output = self._run(tokens, lengths, maps)
        if not maps:
            return ReaderOutput(logits=logits)
        if not output.attentions or any(layer is None for layer in output.attentions):
            raise UsageError(
                f"{type(self.model).__name__} returned no attentions: load it with attn_implementation='eager'"
            )
        padding = ~_valid_mask(tokens, lengths)[:, None, :, None]
        weights: tuple[Map, ...] = tuple(layer.masked_fill(padding, 0) for layer in output.attentions)
        is_first = self.answer_at == "first"
        if self.answer_at is None and output.logits.ndim == 2:  # a classifier: bidirectional ones read the first token
            is_first = any(bool(layer.triu(1).any()) for layer in weights)
        positions = torch.zeros_like(lengths) if is_first else lengths - 1
        return ReaderOutput(logits=logits, maps=weights, answer_positions=positions)

    def _logits(self, tokens: Tokens, lengths: Lengths) -> Float[Tensor, "b c"]:
        return self._run(tokens, lengths, False)[0]

    def _run(self, tokens: Tokens, lengths: Lengths, maps: bool) -> tuple[Float[Tensor, "b c"], Any]:
        valid = _valid_mask(tokens, lengths)
        pad = self.model.config.pad_token_id
        self._check_padding(tokens, lengths, pad)
        position = torch.zeros_like(lengths) if self.answer_at == "first" else lengths - 1
        options: dict[str, Any] = {"use_cache": False} if "use_cache" in self.options else {}
        if "logits_to_keep" in self.options:  # logits of the whole vocabulary at every position need too much memory
            kept, position = position.unique(return_inverse=True)
            options["logits_to_keep"] = kept
        output = self.model(
            input_ids=tokens.masked_fill(~valid, 0 if pad is None else pad),  # some models count positions by it
            attention_mask=valid.long(),
            output_attentions=maps,
            return_dict=True,
            **options,
        )
        logits: Tensor = output.logits
        if logits.ndim == 3:
            logits = logits[torch.arange(len(tokens), device=tokens.device), position]
        return logits, output

    def _check_padding(self, tokens: Tokens, lengths: Lengths, pad: int | None) -> None:
        """A causal classifier finds the end of a text by its padding token, and would silently read elsewhere."""
        is_single = len(tokens) == 1 and int(lengths[0]) == tokens.shape[1]
        if not hasattr(self.model, "score") or (is_single and pad is None):
            return
        last: Int[Tensor, " b"] = tokens[torch.arange(len(tokens), device=tokens.device), lengths - 1]
        if pad is None or bool((last == pad).any()):
            raise UsageError(
                f"{type(self.model).__name__} answers before the first padding token, and"
                f" {'none is set' if pad is None else f'a text ends with it, {pad}'}:"
                " set model.config.pad_token_id to a token that does not occur in the texts"
            )


def _validate(tokens: Tokens, lengths: Lengths, weight: Float[Tensor, "vocabulary d"]) -> tuple[Tokens, Lengths]:
    """Check a batch, and move it to the device of the model."""
    vocabulary, (b, t) = weight.shape[0], tokens.shape
    if not b or len(lengths) != b or int(lengths.min()) < 1 or int(lengths.max()) > t:
        raise UsageError(f"lengths must be one number from 1 to {t} for each of {b} rows, got {lengths.tolist()}")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise UsageError(
            f"tokens must be from 0 to {vocabulary - 1}, got {int(tokens.min())} to {int(tokens.max())}:"
            " use the vocabulary that the model was trained with"
        )
    return tokens.to(weight.device), lengths.to(weight.device)


def _valid_mask(tokens: Tokens, lengths: Lengths) -> Bool[Tensor, "b t"]:
    """False at padding."""
    return torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]


def _gradient_times_input(x: Float[Tensor, "b t d"], logits: Float[Tensor, "b c"]) -> Float[Tensor, "b t"]:
    """Return |gradient . x| of each row's highest score."""
    (gradient,) = torch.autograd.grad(logits.max(-1).values.sum(), x)
    return (gradient * x.detach()).sum(-1).abs()
