"""Our decoder as a causal language model of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache as TransformersCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from qkflow.errors import UsageError
from qkflow.hf.base import QKFlowPreTrainedModel, packed, refuse_embeddings
from qkflow.hf.cache import QKFlowCache
from qkflow.hf.config import QKFlowConfig
from qkflow.hf.layouts import layout_of
from qkflow.hf.outputs import output
from qkflow.models import Decoder


class QKFlowForCausalLM(QKFlowPreTrainedModel, GenerationMixin):
    """A `Decoder` over any mechanism, for `generate`, `Trainer` and the rest of transformers.

    >>> config = QKFlowConfig(hidden_size=32, num_hidden_layers=1, intermediate_size=64, mechanism="qdelta")
    >>> model = QKFlowForCausalLM(config)
    >>> model(torch.tensor([[72, 105]])).logits.shape
    torch.Size([1, 2, 257])
    """

    def __init__(self, config: QKFlowConfig) -> None:
        super().__init__(config, Decoder(config.decoder_config()))

    @classmethod
    def of(cls, model: Decoder, *, end: int | None = None) -> QKFlowForCausalLM:
        """A model of ours that is there already, not copied; `end` is the token that begins, ends and pads a text."""
        with torch.device("meta"):
            made = cls(QKFlowConfig.of(model.config, end=end))
        made.model = model
        return made.train(model.training)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: TransformersCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Scores of the token after each; with `labels` (those very tokens, -100 where not asked) the mean loss too.

        Padding is on the left or on the right. With a cache the mask may cover what came before, which the cache knows.
        Positions that begin anew inside a row pack several texts into it.
        """
        refuse_embeddings(inputs_embeds)
        cache = past_key_values
        if cache is not None and not isinstance(cache, QKFlowCache):
            raise UsageError(
                f"past_key_values must be a QKFlowCache, which this model returns, got {type(cache).__name__}"
            )
        layout = None
        if input_ids is not None and (attention_mask is not None or position_ids is not None):
            seen = 0 if cache is None else cache.columns
            past = None if cache is None or cache.state is None or position_ids is None else cache.state.length
            layout = layout_of(input_ids, attention_mask, position_ids, seen, past)
        usual = vars(self.config)  # once: the config's own way to its attributes is slow
        found = self._read(input_ids, cache, layout, maps=output_attentions, streams=output_hidden_states, usual=usual)
        cache = self._carried(cache, use_cache, found.state, layout, input_ids)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(found.x if isinstance(kept, slice) and not kept.start else found.x[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=usual["vocab_size"], num_items_in_batch=num_items_in_batch
            )
        values = {"loss": loss, "logits": logits, "past_key_values": cache}
        if found.streams is not None or found.maps is not None:
            values |= {"hidden_states": found.streams, "attentions": found.maps}
        made = output(CausalLMOutputWithPast, values)
        return made if (usual["return_dict"] if return_dict is None else return_dict) else made.to_tuple()

    def _carried(
        self, cache: QKFlowCache | None, use: bool | None, state: Any, layout: Any, tokens: Any
    ) -> QKFlowCache | None:
        """The cache after this call, if one is wanted and can be had."""
        if packed(layout, tokens):
            if cache is not None or use:
                raise UsageError("a packed row holds several texts, of which none can go on: set use_cache=False")
            return None
        wanted = cache is not None or self.config.use_cache if use is None else use
        if state is None or not wanted:
            return None
        cache = QKFlowCache() if cache is None else cache
        cache.advance(state, tokens.shape[1], None if layout is None else layout.valid)
        return cache

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: TransformersCache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The tokens that are new; positions are left out, since the state counts them."""
        refuse_embeddings(inputs_embeds)
        new = input_ids if next_sequence_length is None else input_ids[:, -next_sequence_length:]
        more = {name: value for name, value in kwargs.items() if name not in ("labels", "position_ids")}
        return {"input_ids": new, "past_key_values": past_key_values, "attention_mask": attention_mask, **more}

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> bool:
        """Put an empty cache of ours in place, unless one is given or none is wanted; whether there is one."""
        if generation_config.cache_implementation is not None:
            raise UsageError(
                f"a qkflow model has one cache, its state, got cache_implementation"
                f" {generation_config.cache_implementation!r}: leave it out"
            )
        given = model_kwargs.get("past_key_values")
        if given is not None:
            given._is_user_defined = True
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = QKFlowCache()
        return "past_key_values" in model_kwargs

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False
