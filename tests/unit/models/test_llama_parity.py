"""The decoder equals Llama of transformers with copied weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from qkflow.layout import Layout
from qkflow.models import Decoder, DecoderConfig, Sampling, generate
from qkflow.ops.rotary import halves_to_pairs

transformers = pytest.importorskip("transformers")

WIDTH, LAYERS, HEADS, HIDDEN, VOCABULARY = 64, 3, 4, 96, 101
KINDS = [(4, True), (4, False), (2, False), (1, True)]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"key_heads={kind[0]},tied={kind[1]}")
def twins(request: pytest.FixtureRequest) -> tuple[Any, Decoder]:
    """Llama and a decoder with its weights."""
    key_heads, tied = request.param
    torch.manual_seed(1)
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=key_heads,
            vocab_size=VOCABULARY,
            rms_norm_eps=1e-5,
            tie_word_embeddings=tied,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    with torch.no_grad():
        for name, parameter in llama.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    ours = Decoder(
        DecoderConfig(
            width=WIDTH,
            layers=LAYERS,
            heads=HEADS,
            hidden=HIDDEN,
            vocabulary=VOCABULARY,
            mechanism=f"standard:key_heads={key_heads}",
            tied=tied,
        )
    )
    ours.load_state_dict(translated(llama.state_dict(), key_heads, tied))
    return llama.eval(), ours.eval()


def translated(theirs: dict[str, Tensor], key_heads: int, tied: bool) -> dict[str, Tensor]:
    names = {
        "mechanism_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
        "mechanism.value": "self_attn.v_proj",
        "mechanism.output": "self_attn.o_proj",
        "feed_forward.gate": "mlp.gate_proj",
        "feed_forward.up": "mlp.up_proj",
        "feed_forward.output": "mlp.down_proj",
    }
    ours = {"embedding.weight": theirs["model.embed_tokens.weight"], "norm.weight": theirs["model.norm.weight"]}
    if not tied:
        ours["head.weight"] = theirs["lm_head.weight"]
    for layer in range(LAYERS):
        old, new = f"model.layers.{layer}", f"blocks.{layer}"
        ours |= {f"{new}.{name}.weight": theirs[f"{old}.{its}.weight"] for name, its in names.items()}
        query, key = (theirs[f"{old}.self_attn.{which}_proj.weight"] for which in "qk")
        ours[f"{new}.mechanism.query.weight"] = halves_to_pairs(query, HEADS)
        ours[f"{new}.mechanism.key.weight"] = halves_to_pairs(key, key_heads)
    return ours


def close(actual: Tensor, expected: Tensor) -> None:
    assert float(expected.abs().max()) > 1, "weights too small to tell anything"
    assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_parameter_counts_are_equal(twins: tuple[Any, Decoder]) -> None:
    counts = [sum(p.numel() for p in model.parameters()) for model in twins]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("t", [1, 2, 40])
def test_logits_are_equal(twins: tuple[Any, Decoder], t: int) -> None:
    llama, ours = twins
    tokens = torch.randint(0, VOCABULARY, (3, t))
    with torch.no_grad():
        close(ours(tokens)[0], llama(tokens).logits)


def test_gradients_are_equal(twins: tuple[Any, Decoder]) -> None:
    llama, ours = twins
    tokens = torch.randint(0, VOCABULARY, (2, 12))
    weight = torch.randn(2, 12, VOCABULARY) / 100
    key_heads = llama.config.num_key_value_heads
    expected = torch.autograd.grad((llama(tokens).logits * weight).sum(), [*llama.parameters()])
    theirs = dict(zip((name for name, _ in llama.named_parameters()), expected, strict=True))
    actual = torch.autograd.grad((ours(tokens)[0] * weight).sum(), [*ours.parameters()])
    mine = dict(zip((name for name, _ in ours.named_parameters()), actual, strict=True))
    for name, gradient in translated(theirs, key_heads, ours.head is None).items():
        assert_close(mine[name], gradient, rtol=1e-4, atol=2e-5)


def test_cached_decoding_is_equal(twins: tuple[Any, Decoder]) -> None:
    llama, ours = twins
    tokens = torch.randint(0, VOCABULARY, (2, 30))
    with torch.inference_mode():
        theirs = llama(tokens[:, :5], use_cache=True)
        logits, state = ours(tokens[:, :5])
        close(logits, theirs.logits)
        for token in tokens[:, 5:].split(1, 1):
            theirs = llama(token, past_key_values=theirs.past_key_values, use_cache=True)
            logits, state = ours(token, state)
            close(logits, theirs.logits)


def test_left_padded_logits_are_equal(twins: tuple[Any, Decoder]) -> None:
    llama, ours = twins
    tokens = torch.randint(0, VOCABULARY, (3, 9))
    layout = Layout.padded([4, 9, 1], 9, side="left")
    with torch.no_grad():
        theirs = llama(tokens, attention_mask=layout.valid.long(), position_ids=layout.positions).logits
        close(ours(tokens, layout=layout)[0][layout.valid], theirs[layout.valid])


def test_greedy_generation_is_equal(twins: tuple[Any, Decoder]) -> None:
    llama, ours = twins
    prompt = torch.randint(0, VOCABULARY, (2, 6))
    with torch.inference_mode():
        theirs = llama.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
    assert generate(ours, prompt.tolist(), tokens=20, sampling=Sampling(temperature=0.0)) == theirs[:, 6:].tolist()
