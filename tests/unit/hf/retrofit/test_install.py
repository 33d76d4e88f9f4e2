"""`retrofit`: the coupling starts as the identity, and changes only queries and keys."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from qkflow.circuits import circuit_groups
from qkflow.errors import UsageError
from qkflow.hf.retrofit import is_retrofitted, remove_retrofit, retrofit
from qkflow.mechanisms.coupling import DYNAMICS, CouplingConfig

transformers = pytest.importorskip("transformers")

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "phi3")
MORE_FAMILIES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "gemma3", "granite", "olmo", "olmo2", "olmo3", "phi"),
    *("smollm3", "stablelm", "starcoder2"),
)
DRIFT = CouplingConfig(dynamics="hamiltonian", force="none", dt=0.0)


@pytest.mark.parametrize("kind", FAMILIES)
def test_an_untrained_coupling_changes_no_output(models: Any, kind: str) -> None:
    tokens, model = models.tokens(), models(kind)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        model.to(dtype).set_attn_implementation("eager" if dtype == torch.float64 else "sdpa")
        before = model(tokens).logits
        for coupling in DYNAMICS if kind == "llama" else ("affine", "hamiltonian"):
            assert retrofit(model, coupling) is model
            assert_close(model(tokens).logits, before, rtol=0, atol=0)
            assert {p.dtype for name, p in model.named_parameters() if ".coupling." in name} == {dtype}
            remove_retrofit(model)


@pytest.mark.parametrize("kind", [*FAMILIES, *MORE_FAMILIES])
def test_a_drift_equals_adding_key_rows_to_query_rows(models: Any, kind: str) -> None:
    """Checks where each head's rows are, and that the drift q + c k comes before norms and positions."""
    tokens = models.tokens()
    model, plain = (models(kind, dtype=torch.float64) for _ in range(2))
    retrofit(model, DRIFT)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("coupling.dt"):
                parameter.fill_(0.7)
        for layer in plain.modules():
            _add_keys_to_queries(layer, 0.7)
    expected = plain(tokens).logits
    assert_close(model(tokens).logits, expected, rtol=1e-10, atol=1e-10)
    assert (expected - models(kind, dtype=torch.float64)(tokens).logits).abs().max() > 1e-3


def _add_keys_to_queries(layer: Any, step: float) -> None:
    """Edit the weights by hand, according to the layout of each family."""
    if hasattr(layer, "q_proj"):
        for q, k in zip(layer.q_proj.parameters(), layer.k_proj.parameters(), strict=True):
            repeats = len(q) // len(k)
            heads = k.unflatten(0, (-1, layer.head_dim)).repeat_interleave(repeats, 0).flatten(0, 1)
            q.add_(step * heads)
    elif hasattr(layer, "qkv_proj"):
        weight = layer.qkv_proj.weight
        q, k, _ = weight.split([16, 8, 8])
        q.add_(step * k.unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1))
    elif hasattr(layer, "c_attn"):
        for parameter in layer.c_attn.parameters():
            q, k, _ = parameter.split(16, -1)
            q.add_(step * k)
    elif hasattr(layer, "query_key_value"):
        for parameter in layer.query_key_value.parameters():
            q, k, _ = parameter.unflatten(0, (4, 3, 4)).unbind(1)
            q.add_(step * k)


def test_the_coupling_comes_before_query_and_key_norms(models: Any) -> None:
    model = models.randomise_couplings(retrofit(models("qwen3")))
    layer, captured = model.model.layers[0].self_attn, {}
    for name in ("q_norm", "k_norm", "q_proj", "k_proj"):
        getattr(layer, name).register_forward_hook(
            lambda _, args, out, name=name: captured.update({name: (args[0] if "norm" in name else out)})
        )
    model(models.tokens())
    q, k = (captured[name].unflatten(-1, (-1, 8)) for name in ("q_proj", "k_proj"))
    assert_close((captured["q_norm"], captured["k_norm"]), layer.coupling(q, k), rtol=0, atol=0)
    assert (captured["q_norm"] - q).abs().max() > 0.1


@pytest.mark.parametrize(
    ("kind", "attention"), [*((kind, "sdpa") for kind in FAMILIES), ("llama", "eager"), ("gpt2", "eager")]
)
def test_a_trained_coupling_keeps_caching_and_causality(models: Any, kind: str, attention: str) -> None:
    model, tokens = _trained(models, kind, attn_implementation=attention), models.tokens()
    assert (model(tokens).logits - remove_retrofit(copy.deepcopy(model))(tokens).logits).abs().max() > 1e-4
    whole, cache, pieces = model(tokens).logits, None, []
    for piece in tokens.split([4, 1, 2, 2], 1):
        out = model(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
    assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-5)
    other = tokens.clone()
    other[:, 6] = other[:, 6] % 28 + 1
    assert_close(model(other).logits[:, :6], whole[:, :6], rtol=0, atol=1e-6)


def _trained(models: Any, kind: str, **more: Any) -> Any:
    model, tokens = retrofit(models(kind, **more)), models.tokens(4, 16, seed=3)
    optimiser = torch.optim.AdamW(circuit_groups(model, 3e-3, r=10.0))
    for _ in range(4):
        model(tokens, labels=tokens).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return model.eval()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox"])
def test_generation_does_not_depend_on_the_cache(models: Any, kind: str) -> None:
    model = models.randomise_couplings(retrofit(models(kind, dtype=torch.float64)))
    short, long = models.tokens(1, 5), models.tokens(1, 8, seed=4)
    padded = torch.cat([torch.cat([torch.zeros(1, 3, dtype=torch.long), short], 1), long])
    alone = _generated(model, short) + _generated(model, long)
    assert _generated(model, padded) == alone == _generated(model, padded, use_cache=False)
    assert _generated(model, padded, num_beams=2) == _generated(model, padded, num_beams=2, use_cache=False)


def _generated(model: Any, prompts: torch.Tensor, **options: Any) -> list[list[int]]:
    mask = (prompts != 0).long()
    out = model.generate(prompts, attention_mask=mask, max_new_tokens=5, do_sample=False, **options)
    return out[:, prompts.shape[1] :].tolist()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_checkpointing_gives_the_same_gradients_to_every_parameter(models: Any, kind: str) -> None:
    tokens = models.tokens()
    stored, again = (models.randomise_couplings(retrofit(models(kind, dtype=torch.float64))).train() for _ in range(2))
    again.activation_checkpointing_enable()
    for model in (stored, again):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    for (name, original), (_, reloaded) in zip(stored.named_parameters(), again.named_parameters(), strict=True):
        assert original.grad is not None, name
        assert reloaded.grad is not None, name
        assert_close(reloaded.grad, original.grad, rtol=1e-10, atol=1e-12)
        assert ".coupling." not in name or original.grad.abs().max() > 0, name


def test_a_step_size_of_zero_has_a_gradient(models: Any) -> None:
    model, tokens = retrofit(models("llama"), "hamiltonian"), models.tokens()
    model(tokens, labels=tokens).loss.backward()
    steps = [p for name, p in model.named_parameters() if name.endswith("coupling.dt")]
    assert len(steps) == 2
    assert all(step.grad is not None and step.grad != 0 for step in steps)


@pytest.mark.parametrize("kind", FAMILIES)
def test_circuit_groups_assign_couplings_to_the_qk_circuit(models: Any, kind: str) -> None:
    model, tokens = models.randomise_couplings(retrofit(models(kind))), models.tokens()
    before, names = model(tokens).logits, list(model.state_dict())
    groups = {group["circuit"]: group["params"] for group in circuit_groups(model, 1e-3, r=10.0)}
    qk = {id(parameter) for parameter in groups["qk"]}
    couplings = [id(parameter) for name, parameter in model.named_parameters() if ".coupling." in name]
    assert couplings
    assert qk.issuperset(couplings)
    assert len(qk) > len(couplings)
    assert list(model.state_dict()) == names
    assert_close(model(tokens).logits, before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", FAMILIES)
def test_remove_retrofit_restores_the_model_to_the_bit(models: Any, kind: str) -> None:
    tokens, model = models.tokens(), models(kind)
    original, classes = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    before, config = model(tokens).logits, model.config.to_dict()
    models.randomise_couplings(retrofit(model))
    assert is_retrofitted(model)
    assert (model(tokens).logits - before).abs().max() > 1e-3
    assert {name for name in model.state_dict() if ".coupling." not in name} == original.keys()
    assert remove_retrofit(model) is model
    assert not is_retrofitted(model)
    assert_close(dict(model.state_dict()), dict(original), rtol=0, atol=0)
    assert [type(module) for module in model.modules()] == classes
    assert_close(model(tokens).logits, before, rtol=0, atol=0)
    assert model.config.to_dict() == config


def test_layers_selects_the_layers_to_couple(models: Any) -> None:
    model = retrofit(models("llama"), layers=[1])
    assert [hasattr(layer.self_attn, "coupling") for layer in model.model.layers] == [False, True]
    assert model.config.qkflow_retrofit["layers"] == [1]


def test_cross_attention_is_not_coupled(models: Any) -> None:
    model, tokens = models("gpt2", add_cross_attention=True), models.tokens()
    other = torch.randn(2, 5, 16)
    before = model(tokens, encoder_hidden_states=other).logits
    models.randomise_couplings(retrofit(model))
    block = model.transformer.h[0]
    assert hasattr(block.attn, "coupling")
    assert not hasattr(block.crossattention, "coupling")
    assert (model(tokens, encoder_hidden_states=other).logits - before).abs().max() > 1e-3


def test_copies_keep_the_coupling_and_share_no_weights(models: Any) -> None:
    model, tokens = models.randomise_couplings(retrofit(models("llama"))), models.tokens()
    expected = model(tokens).logits
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    models.randomise_couplings(model, scale=0.0)
    for twin in twins:
        assert_close(twin(tokens).logits, expected, rtol=0, atol=0)


def test_attentions_are_returned(models: Any) -> None:
    model = models.randomise_couplings(retrofit(models("llama", attn_implementation="eager")))
    maps = model(models.tokens(), output_attentions=True).attentions
    assert [layer.shape for layer in maps] == [(2, 4, 9, 9)] * 2
    assert_close(maps[0].sum(-1), torch.ones(2, 4, 9))


def test_autocast_runs_the_coupling(models: Any) -> None:
    model, tokens = models.randomise_couplings(retrofit(models("llama")), scale=0.1), models.tokens()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert_close(loss.detach(), model(tokens, labels=tokens).loss.detach(), rtol=0.02, atol=0.02)


@pytest.mark.compiled
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_coupled_model_is_one_graph(models: Any, kind: str) -> None:
    model, tokens = models.randomise_couplings(retrofit(models(kind))), models.tokens()
    expected = model(tokens, use_cache=False).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(tokens, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_coupling_that_is_not_the_identity_or_cannot_train_is_refused(models: Any) -> None:
    model = models("llama")
    for config, fragment in (
        (CouplingConfig(), "would change the untrained model: give dt=0.0"),
        (CouplingConfig(dynamics="euler", dt=-0.1), "dt=-0.1 would change"),
        (CouplingConfig(dynamics="uncoupled", dt=0.0), "no gradient"),
        (CouplingConfig(dynamics="affine", sharing="layers"), "sharing='heads'"),
        ("afine", "did you mean 'affine'"),
    ):
        with pytest.raises(UsageError, match=fragment):
            retrofit(model, config)
    assert not is_retrofitted(model)


def test_invalid_models_and_layers_are_refused(models: Any) -> None:
    model = models("llama")
    for layers in ([], [2], [-1, 0]):
        with pytest.raises(UsageError, match="some of its 2 attention layers, from 0 to 1"):
            retrofit(model, layers=layers)
    with pytest.raises(UsageError, match="no coupling to remove"):
        remove_retrofit(model)
    with pytest.raises(UsageError, match="already has a coupling"):
        retrofit(retrofit(model))
    with torch.device("meta"), pytest.raises(UsageError, match="meta device"):
        retrofit(transformers.LlamaForCausalLM(model.config.__class__(**remove_retrofit(model).config.to_dict())))
    model.model.layers[1].self_attn.forward = model.model.layers[1].self_attn.forward
    with pytest.raises(UsageError, match=r"layers\.1\.self_attn has a forward that is not of its class"):
        retrofit(model)
    with pytest.raises(UsageError, match="ModuleList has no config"):
        retrofit(model.model.layers)
    assert not hasattr(model.model.layers[0].self_attn, "coupling")


def test_an_unsupported_model_is_refused_with_its_attention_modules() -> None:
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=11, **small))
    with pytest.raises(UsageError) as caught:
        retrofit(bert)
    message = str(caught.value)
    assert "no layer of BertModel can be coupled: expected q_proj and k_proj in LlamaAttention or" in message
    assert "c_attn in GPT2Attention, query_key_value in GPTNeoXAttention, qkv_proj in Phi3Attention" in message
    assert "BertSelfAttention with query, key, value" in message
    assert "\n" not in message


def test_queries_and_keys_of_different_inputs_are_refused(models: Any) -> None:
    layer = retrofit(models("llama")).model.layers[0].self_attn
    projections = type(layer).projections.coupled(layer, layer.coupling)
    x = torch.randn(1, 3, 16)
    assert projections["k_proj"](x).shape == (1, 3, 8)
    with pytest.raises(UsageError, match="cross-attention cannot be coupled"):
        projections["q_proj"](x.clone())
