"""The language model in transformers computes what the bare decoder computes, and says what it was asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from qkflow.errors import UsageError
from qkflow.hf import QKFlowConfig, QKFlowForCausalLM
from qkflow.layout import Layout
from qkflow.mechanisms import mechanisms
from qkflow.models import Decoder, DecoderConfig

Make = Callable[..., QKFlowForCausalLM]
TOKENS = torch.tensor([[104, 105, 7, 8, 9], [72, 101, 108, 108, 111]])
LEFT = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def close(a: torch.Tensor, b: torch.Tensor, within: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=within)


def test_a_seed_begins_the_same_model_in_transformers_and_here(shape: Callable[..., DecoderConfig]) -> None:
    config = shape(("standard+affine", "differential"))
    torch.manual_seed(5)
    ours = Decoder(config)
    torch.manual_seed(5)
    theirs = AutoModelForCausalLM.from_config(QKFlowConfig.from_model_config(config))
    assert theirs.config.decoder_config() == config
    assert {f"model.{name}" for name in ours.state_dict()} == theirs.state_dict().keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[f"model.{name}"])


def test_the_logits_are_those_of_the_bare_decoder_as_many_as_are_kept(causal: Make) -> None:
    model = causal("differential")
    want = model.model(TOKENS)[0]
    assert torch.equal(model(TOKENS).logits, want)
    close(model(TOKENS, logits_to_keep=2).logits, want[:, -2:])
    close(model(TOKENS, logits_to_keep=torch.tensor([0, 3])).logits, want[:, [0, 3]])
    assert torch.equal(model(TOKENS, return_dict=False)[0], want)
    assert model(TOKENS, use_cache=False).past_key_values is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_as_if_it_were_not_there(causal: Make, side: Any) -> None:
    model = causal("qdelta")
    mask = LEFT if side == "left" else LEFT.flip(1)
    kept = mask[0].bool()
    found = model(TOKENS, attention_mask=mask).logits
    close(found[0, kept], model(TOKENS[:1, kept]).logits[0])
    close(found[1], model(TOKENS[1:]).logits[0])
    other = TOKENS.masked_fill(mask == 0, 200)
    close(model(other, attention_mask=mask).logits[mask.bool()], found[mask.bool()])


def test_the_loss_asks_for_the_next_token_where_a_label_is_and_counts_what_it_is_told(causal: Make) -> None:
    model = causal("standard").float()
    labels = TOKENS.masked_fill(LEFT == 0, -100)
    logits = model(TOKENS, attention_mask=LEFT).logits
    each = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none")
    asked = int((labels[:, 1:] != -100).sum())
    close(model(TOKENS, attention_mask=LEFT, labels=labels).loss, each.sum() / asked, 1e-6)
    counted = model(TOKENS, attention_mask=LEFT, labels=labels, num_items_in_batch=20).loss
    close(counted, each.sum() / 20, 1e-6)


def test_positions_that_begin_anew_pack_texts_into_a_row(causal: Make) -> None:
    model = causal("standard")
    row = TOKENS.reshape(1, -1)
    positions = torch.arange(5).repeat(2)[None]
    found = model(row, position_ids=positions)
    close(found.logits.view(2, 5, -1), model(TOKENS).logits)
    assert found.past_key_values is None
    assert torch.equal(model(row, torch.ones_like(row), position_ids=positions).logits, found.logits)
    assert torch.equal(model(TOKENS, position_ids=torch.arange(5)[None]).logits, model(TOKENS).logits)
    counted = (LEFT.cumsum(1) - 1).clamp_min(0)
    padded = model(TOKENS, attention_mask=LEFT, position_ids=counted)
    assert torch.equal(padded.logits, model(TOKENS, attention_mask=LEFT).logits)
    step = {"past_key_values": padded.past_key_values, "position_ids": torch.tensor([[3], [5]])}
    assert model(TOKENS[:, :1], **step).logits.shape == (2, 1, 257)
    with pytest.raises(UsageError, match="cannot be cached"):
        model(row, position_ids=positions, use_cache=True)
    with pytest.raises(UsageError, match="leave them out"):
        model(TOKENS, position_ids=torch.arange(5)[None] + 1)
    with pytest.raises(UsageError, match="leave them out"):
        model(TOKENS, attention_mask=LEFT, position_ids=torch.arange(5)[None])


@pytest.mark.parametrize("mask", [[1, 0, 1, 1, 1], [0, 1, 1, 1, 0]])
def test_a_mask_with_holes_is_refused(causal: Make, mask: list[int]) -> None:
    with pytest.raises(UsageError, match="zeros between ones"):
        causal("standard")(TOKENS, attention_mask=torch.tensor([mask, [1] * 5]))


def test_what_cannot_be_read_is_refused_with_a_reason(causal: Make) -> None:
    model = causal("standard")
    with pytest.raises(UsageError, match="do not support inputs_embeds"):
        model(inputs_embeds=torch.zeros(1, 2, 32))
    with pytest.raises(UsageError, match="got None"):
        model()
    with pytest.raises(UsageError, match=r"attention_mask must be \[2, 5\]"):
        model(TOKENS, attention_mask=torch.ones(2, 4))
    with pytest.raises(UsageError, match="ones and zeros"):
        model(TOKENS, attention_mask=torch.ones(2, 1, 5, 5))
    with pytest.raises(UsageError, match=r"position_ids must have shape \[2, 5\]"):
        model(TOKENS, position_ids=torch.ones(2, 4))
    with pytest.raises(UsageError, match="fixed at 257 tokens"):
        model.resize_token_embeddings(300)
    assert model.resize_token_embeddings(257) is model.get_input_embeddings()


@pytest.mark.parametrize("mechanism", [*sorted(mechanisms()), "standard:window=2", "kuramoto:frustrated=True"])
def test_attentions_are_the_layers_maps_over_every_column_with_a_cache_too(causal: Make, mechanism: str) -> None:
    model = causal(mechanism)
    whole = model(TOKENS, attention_mask=LEFT, output_attentions=True)
    layer = model.model.blocks[0]
    x = model.model.embed(TOKENS)
    read = layer.mechanism_norm(x) if hasattr(layer, "mechanism_norm") else x
    close(whole.attentions[0], layer.mechanism.weights(read, layout=Layout.padded([3, 5], 5, side="left")))
    assert torch.equal(whole.logits, model(TOKENS, attention_mask=LEFT).logits)
    assert not whole.attentions[1][0][..., :2].any()  # padding
    cache = model(TOKENS[:, :3], attention_mask=LEFT[:, :3]).past_key_values
    rest = model(TOKENS[:, 3:], attention_mask=LEFT, past_key_values=cache, output_attentions=True)
    for one, part in zip(whole.attentions, rest.attentions, strict=True):
        assert part.shape[-1] == 5
        begin = 3 if not part[..., :3].any() else 0  # a memory of fixed size has no columns for the past
        close(part[..., begin:], one[:, :, 3:, begin:])


def test_hidden_states_begin_with_the_embedding_and_end_with_what_the_head_reads(causal: Make) -> None:
    model = causal("coupled")
    found = model(TOKENS, output_hidden_states=True)
    assert len(found.hidden_states) == 3
    assert torch.equal(found.hidden_states[0], model.model.embed(TOKENS))
    close(model.model.logits(found.hidden_states[-1]), found.logits)
    assert torch.equal(found.logits, model(TOKENS).logits)


@pytest.mark.parametrize("mechanism", ["standard+affine:sharing=layers", "gated-deltanet", "kuramoto"])
def test_checkpointing_changes_no_gradient(causal: Make, mechanism: str) -> None:
    model = causal(mechanism, dropout=0.1).train()
    gradients = []
    for enabled in (False, True):
        if enabled:
            model.activation_checkpointing_enable()
            assert model.is_activation_checkpointing
        model.zero_grad()
        torch.manual_seed(1)
        out = model(TOKENS, attention_mask=LEFT)
        assert (out.past_key_values is None) == enabled
        out.logits.square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        close(gradient, gradients[1][name])


def test_checkpointing_is_used(causal: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal("standard").train()
    model.activation_checkpointing_enable()
    called = []
    inner: Any = model._gradient_checkpointing_func
    monkeypatch.setattr(model, "_gradient_checkpointing_func", lambda *args: called.append(1) or inner(*args))
    model(TOKENS)
    assert len(called) == 2
    model.eval()(TOKENS)
    assert len(called) == 2


def test_a_model_moves_to_another_precision(causal: Make) -> None:
    model = causal("kuramoto").to(torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model(TOKENS, attention_mask=LEFT).logits.dtype == torch.bfloat16


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # the compiler warns of itself
def test_a_compiled_model_computes_the_same_in_one_graph(causal: Make) -> None:
    model = causal(("standard",)).float()
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    found = compiled(TOKENS, labels=TOKENS)
    want = model(TOKENS, labels=TOKENS)
    close(found.logits, want.logits, 1e-5)
    close(found.loss, want.loss, 1e-5)
