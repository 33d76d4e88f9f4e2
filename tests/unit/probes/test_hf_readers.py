import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from qkflow.errors import UsageError
from qkflow.probes.readers import ReaderOutput, reader

TOKENS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 1, 0, 0]])
LENGTHS = torch.tensor([5, 3])
SHAPE = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_labels": 3,
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def hf(kind: str, *, attention: str = "eager", pad: int | None = 0) -> Any:
    import transformers

    name = next(name for name in ("Llama", "Bert", "GPT2", "T5") if kind.startswith(name))
    config = getattr(transformers, f"{name}Config")(**SHAPE, pad_token_id=pad, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    decoder = getattr(transformers, kind)._from_config(config, attn_implementation=attention).double()
    for parameter in decoder.parameters():
        nn.init.normal_(parameter, std=0.2)
    return decoder


def fractions(reading: ReaderOutput) -> list[torch.Tensor]:
    assert reading.maps is not None
    return [reading.logits, *reading.maps]


KINDS = ["LlamaForCausalLM", "LlamaForSequenceClassification", "BertForSequenceClassification", "GPT2LMHeadModel"]


@pytest.mark.parametrize("kind", KINDS)
def test_batched_reading_equals_single_texts(kind: str) -> None:
    model = hf(kind).train()
    read = reader(model)
    together, alone = read.read(TOKENS, LENGTHS, maps=True), read.read(TOKENS[1:, :3], LENGTHS[1:], maps=True)
    logits, *maps = fractions(together)
    own, *own_maps = fractions(alone)
    assert_close(logits[1], own[0], rtol=1e-10, atol=1e-10)
    for layer, other in zip(maps, own_maps, strict=True):
        assert_close(layer[1, :, :3, :3], other[0], rtol=1e-10, atol=1e-10)
        assert layer[1, :, 3:].abs().max() == 0
    assert_close(read.saliency(TOKENS, LENGTHS)[1, :3], read.saliency(TOKENS[1:, :3], LENGTHS[1:])[0])
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_language_model_answers_with_the_next_token(kind: str) -> None:
    model = hf(kind).eval()
    with torch.no_grad():
        expected = model(TOKENS[1:, :3]).logits[0, -1]
    actual = reader(model).read(TOKENS, LENGTHS, maps=True)
    assert_close(actual.logits[1], expected)
    assert actual.answer_positions is not None
    assert actual.answer_positions.tolist() == [4, 2]


def test_encoders_answer_at_the_first_token_by_default() -> None:
    model = hf("BertForSequenceClassification")
    for answer_at, expected in ((None, [0, 0]), ("first", [0, 0]), ("last", [4, 2])):
        positions = reader(model, answer_at=answer_at).read(TOKENS, LENGTHS, maps=True).answer_positions
        assert positions is not None
        assert positions.tolist() == expected


def test_saliency_is_gradient_times_embedding() -> None:
    model = hf("LlamaForCausalLM").eval()
    x = model.get_input_embeddings()(TOKENS[:1]).detach().requires_grad_()
    scores = model(inputs_embeds=x).logits[0, -1]
    (gradient,) = torch.autograd.grad(scores[scores.argmax()], x)
    assert_close(reader(model).saliency(TOKENS, LENGTHS)[0], (gradient * x).sum(-1).abs()[0].detach())


def test_models_without_attentions_raise() -> None:
    model = hf("LlamaForCausalLM", attention="sdpa")
    reader(model).read(TOKENS, LENGTHS)  # needs none
    with pytest.raises(UsageError, match="load it with attn_implementation='eager'"):
        reader(model).read(TOKENS, LENGTHS, maps=True)


@pytest.mark.parametrize(("pad", "message"), [(None, "none is set: set model.config.pad"), (1, "a text ends with it")])
def test_causal_classifier_without_a_usable_padding_token_raises(pad: int | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        reader(hf("LlamaForSequenceClassification", pad=pad)).read(TOKENS, LENGTHS)


def test_encoder_decoder_models_raise() -> None:
    with pytest.raises(UsageError, match="is an encoder-decoder"):
        reader(hf("T5ForConditionalGeneration"))
