"""`generate` gives the same tokens with and without the cache, for every mechanism."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from qkflow import generate
from qkflow.errors import UsageError
from qkflow.hf import QKFlowCache, QKFlowForCausalLM
from qkflow.mechanisms import mechanisms
from qkflow.models import Sampling

MakeModel = Callable[..., QKFlowForCausalLM]

MECHANISMS: list[Any] = [
    *sorted(name for name in mechanisms() if name != "standard"),
    "standard+affine",
    "standard:window=3,key_heads=1,conv=3,key_shift=True",
    "kuramoto:frustrated=True,window=4",
    "group:group=so3",
    ("qdelta+hamiltonian", "standard:window=3"),
]
PROMPT = torch.tensor([[256, 256, 256, 104, 105], [72, 101, 108, 108, 111], [256, 1, 2, 3, 4]])
MASK = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
NEW = 3
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 50},
    "beams": {"num_beams": 2, "num_return_sequences": 2, "do_sample": False},
}


def generate_ids(
    model: QKFlowForCausalLM, prompt: Tensor = PROMPT, mask: Tensor | None = MASK, **options: Any
) -> Tensor:
    torch.manual_seed(3)
    return model.generate(
        prompt, attention_mask=mask, max_new_tokens=NEW, eos_token_id=None, pad_token_id=256, **options
    )


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_neither_the_cache_nor_padding_changes_generated_tokens(causal: MakeModel, mechanism: Any) -> None:
    model = causal(mechanism)
    generated = {name: generate_ids(model, **options) for name, options in STRATEGIES.items()}
    for name, options in STRATEGIES.items():
        assert torch.equal(generated[name], generate_ids(model, **options, use_cache=False)), name
    prompts = [row[keep.bool()].tolist() for row, keep in zip(PROMPT, MASK, strict=True)]
    expected = generate(model.model, prompts, tokens=NEW, sampling=Sampling(temperature=0.0))
    assert generated["greedy"][:, PROMPT.shape[1] :].tolist() == expected


def test_sampled_beams_do_not_depend_on_the_cache(causal: MakeModel) -> None:
    model, options = causal(("qdelta", "standard:window=3")), {"num_beams": 2, "do_sample": True}
    assert torch.equal(generate_ids(model, **options), generate_ids(model, **options, use_cache=False))


def test_samples_differ_from_greedy_decoding_and_rows_from_each_other(causal: MakeModel) -> None:
    greedy, sampled = (generate_ids(causal("standard"), **STRATEGIES[options]) for options in ("greedy", "sampling"))
    assert not torch.equal(greedy, sampled)
    assert len({tuple(row) for row in greedy[:, -NEW:].tolist()}) > 1


def test_generation_stops_at_the_end_token_and_pads(causal: MakeModel) -> None:
    model = causal("standard")
    first = int(generate_ids(model, do_sample=False)[1, 5])
    generated = model.generate(PROMPT, attention_mask=MASK, max_new_tokens=NEW, do_sample=False, eos_token_id=first)
    assert generated[1, 5] == first
    assert (generated[1, 6:] == 256).all()


@pytest.mark.parametrize("mechanism", ["standard:window=3", "gated-deltanet"])
def test_chunked_prefill_and_a_reused_cache_change_nothing(causal: MakeModel, mechanism: str) -> None:
    model = causal(mechanism)
    whole = generate_ids(model, do_sample=False)
    assert torch.equal(generate_ids(model, do_sample=False, prefill_chunk_size=2), whole)
    cache = QKFlowCache()
    with torch.no_grad():
        model(PROMPT[1:2, :3], past_key_values=cache)
    for _ in range(2):  # a copy is updated, the original is not
        again = generate_ids(model, PROMPT[1:2], MASK[1:2], do_sample=False, past_key_values=copy.deepcopy(cache))
        assert torch.equal(again, whole[1:2])
    assert cache.get_seq_length() == 3


def test_optional_outputs_are_returned_for_every_new_token(causal: MakeModel) -> None:
    options = {"return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True}
    generated: Any = generate_ids(causal("standard:window=3"), do_sample=False, output_logits=True, **options)
    assert len(generated.attentions) == len(generated.hidden_states) == len(generated.logits) == NEW
    assert [maps[0].shape[-1] for maps in generated.attentions] == [5 + step for step in range(NEW)]
    assert isinstance(generated.past_key_values, QKFlowCache)
    assert generated.past_key_values.get_seq_length() == PROMPT.shape[1] + NEW - 1


def test_unsupported_caches_and_assisted_generation_are_refused(causal: MakeModel) -> None:
    model = causal("standard")
    with pytest.raises(UsageError, match="removes tokens from the cache"):
        generate_ids(model, PROMPT[1:2], MASK[1:2], assistant_model=causal("standard"), do_sample=False)
    with pytest.raises(UsageError, match="removes tokens from the cache"):
        generate_ids(model, PROMPT[1:2], MASK[1:2], prompt_lookup_num_tokens=2, do_sample=False)
    with pytest.raises(UsageError, match="only one cache"):
        generate_ids(model, cache_implementation="static")
    with pytest.raises(UsageError, match="got DynamicCache"):
        model(PROMPT, past_key_values=DynamicCache())
    with pytest.raises(UsageError, match="cannot be used with other models"):
        QKFlowCache().update(PROMPT, PROMPT, 0)


def test_rows_of_a_cache_can_be_repeated_and_selected(causal: MakeModel) -> None:
    model = causal("qdelta")
    cache: QKFlowCache = model(PROMPT, attention_mask=MASK).past_key_values
    assert (len(cache), cache.batch_size, cache.is_initialized) == (2, 3, True)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([5, 0]))
    assert cache.batch_size == 2
    after = torch.tensor([[7], [8]])
    again = model(after, past_key_values=cache).logits
    rows = [2, 0]
    fresh = model(PROMPT[rows], attention_mask=MASK[rows]).past_key_values
    torch.testing.assert_close(again, model(after, past_key_values=fresh).logits, rtol=0, atol=1e-12)
    cache.reset()
    assert (len(cache), cache.get_seq_length(), cache.batch_size) == (0, 0, -1)
