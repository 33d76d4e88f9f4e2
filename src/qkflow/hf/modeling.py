"""qkflow models as transformers models, over any mechanism: the blocks, a language model and a classifier."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)

from qkflow.errors import CheckpointError, UsageError
from qkflow.hf.cache import QKFlowCache
from qkflow.hf.configuration import QKFlowConfig
from qkflow.hf.forward import StackOutput, expand_to_columns, forward
from qkflow.hf.inputs import batch_layout, is_packed
from qkflow.hub.config_json import MODEL_KEYS, label_count
from qkflow.hub.load import GENERATION_CONFIG, HEAD, check_folder, read_config_json
from qkflow.hub.safe_files import first_line, read_json_object
from qkflow.layout import Layout
from qkflow.models import Classifier, Decoder
from qkflow.models.decoder import EMBEDDING_STD
from qkflow.models.stack import Stack
from qkflow.training.tensors import model_tensors

Output = TypeVar("Output", BaseModelOutputWithPast, CausalLMOutputWithPast, SequenceClassifierOutputWithPast)
for _output_type in (BaseModelOutputWithPast, CausalLMOutputWithPast, SequenceClassifierOutputWithPast):
    _output_type()  # the first instance registers the type with torch's pytrees

_NOT_FORWARDED = ("labels", "position_ids", "tokenizer", "assistant_tokenizer")
"""Arguments of `generate` that `forward` does not take, or computes itself."""


class QKFlowPreTrainedModel(PreTrainedModel):
    """Base class: holds the bare qkflow model as `model`, whose tensor names get the prefix `model.`."""

    config_class = QKFlowConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block", "PhaseBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    accepts_loss_kwargs = True

    config: QKFlowConfig
    model: Any

    def __init__(self, config: QKFlowConfig, stack: Stack) -> None:
        super().__init__(config)
        self.model = stack
        self.gradient_checkpointing = False
        tied = stack.state_dict().keys() - model_tensors(stack).keys()
        self._tied_weights_keys = {f"model.{name}": f"model.{name}" for name in sorted(tied)}  # saved once
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: qkflow models initialise themselves."""

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Nothing for transformers to tie: our models share modules, and a tied head has no weights."""
        return {}

    def get_input_embeddings(self) -> nn.Embedding:
        """The token embedding."""
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.model.embedding = value

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """As in transformers: new tokens get the mean embedding or, without `mean_resizing`, an initial one."""
        if new_num_tokens is not None and new_num_tokens < 1:
            raise UsageError(f"new_num_tokens must be at least 1, got {new_num_tokens}")
        n_kept = self.config.vocab_size
        embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        vocabulary = self.config.vocab_size = embedding.num_embeddings
        if vocabulary > n_kept and not mean_resizing:
            kept = embedding.weight.detach()[:n_kept].clone()
            self.model.init_embedding(getattr(self.model.config, "spread", EMBEDDING_STD))
            with torch.no_grad():
                embedding.weight[:n_kept] = kept
                if (head := self.get_output_embeddings()) is not None:
                    nn.init.normal_(head.weight[n_kept:], std=EMBEDDING_STD)
        self.model.config = replace(self.model.config, vocabulary=vocabulary)
        return embedding

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike[str] | None, *model_args: Any, **kwargs: Any
    ) -> Any:
        """As in transformers, but from safetensors only. A local folder is validated before anything is loaded."""
        if kwargs.get("use_safetensors") is False:
            raise UsageError("a qkflow model is loaded from safetensors only: leave out use_safetensors")
        for name in ("gguf_file", "variant"):
            if kwargs.get(name):
                raise UsageError(f"a qkflow model has its weights in model.safetensors: leave out {name}")
        if kwargs.get("ignore_mismatched_sizes"):
            raise UsageError("mismatched weights would be ignored silently: leave out ignore_mismatched_sizes")
        if pretrained_model_name_or_path is not None:
            folder = Path(pretrained_model_name_or_path, kwargs.get("subfolder") or "")
            if folder.is_file():
                raise UsageError(f"{folder} is a file: give the folder of the model")
            if folder.is_dir():
                kwargs["ignore_mismatched_sizes"] = cls._check_folder(folder, kwargs)
        with_info = kwargs.pop("output_loading_info", False)
        options: dict[str, Any] = {**kwargs, "use_safetensors": True, "output_loading_info": True}
        model, info = cast(Any, super().from_pretrained(pretrained_model_name_or_path, *model_args, **options))
        model._init_missing({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
        align_weights(model)
        return (model, info) if with_info else model

    @classmethod
    def _check_folder(cls, folder: Path, options: dict[str, Any]) -> bool:
        """Raise `UsageError` unless the folder contains this model; returns whether the head must be replaced."""
        return check_folder(folder, overrides=_config_overrides(options))

    def _init_missing(self, names: set[str]) -> None:
        """Initialise the weights that the folder did not contain, if that is allowed."""
        if names:
            raise CheckpointError(f"the weights lack {sorted(names)[0]!r}: they do not match this model")

    def _read(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: TransformersCache | None,
        use_cache: bool | None,
        output_attentions: bool | None,
        output_hidden_states: bool | None,
    ) -> tuple[StackOutput, Layout | None, QKFlowCache | None]:
        """Run the blocks. Options that are None come from the config; attentions cover all columns of the cache."""
        if cache is not None and not isinstance(cache, QKFlowCache):
            raise UsageError(
                f"past_key_values must be a QKFlowCache, which this model returns, got {type(cache).__name__}"
            )
        x, state, layout = self._embed(input_ids, inputs_embeds), None if cache is None else cache.state, None
        if attention_mask is not None or position_ids is not None:
            past_columns = 0 if cache is None else cache.columns
            past_lengths = None if state is None or position_ids is None else state.length
            layout = batch_layout(x, attention_mask, position_ids, past_columns, past_lengths)
        config = vars(self.config)  # attribute access on a transformers config is slow
        outputs = forward(
            self.model,
            x,
            state,
            layout,
            output_attentions=bool(config["_output_attentions"] if output_attentions is None else output_attentions),
            output_hidden_states=bool(
                config["output_hidden_states"] if output_hidden_states is None else output_hidden_states
            ),
            checkpoint=self._gradient_checkpointing_func if self.gradient_checkpointing and self.training else None,
        )
        if outputs.attentions is not None and cache is not None:
            attentions = expand_to_columns(outputs.attentions, state, cache.columns, cache.valid())
            outputs = outputs._replace(attentions=attentions)
        return outputs, layout, self._update_cache(cache, use_cache, outputs.state, layout, x)

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """The stream before the first block."""
        if inputs_embeds is None:
            if input_ids is None:
                raise UsageError("a qkflow model needs input_ids or inputs_embeds, got None")
            return self.model.embed(input_ids)
        if input_ids is not None:
            raise UsageError("a qkflow model needs either input_ids or inputs_embeds, got both")
        if inputs_embeds.ndim != 3 or inputs_embeds.shape[2] != self.config.hidden_size:
            shape = list(inputs_embeds.shape)
            raise UsageError(f"inputs_embeds must be [batch, tokens, {self.config.hidden_size}], got {shape}")
        return self.model.to_stream(inputs_embeds)

    def _update_cache(
        self, cache: QKFlowCache | None, use_cache: bool | None, state: Any, layout: Any, tokens: Any
    ) -> QKFlowCache | None:
        """The cache after this call; None if it is not requested or there is no state."""
        if is_packed(layout, tokens):
            if cache is not None or use_cache:
                raise UsageError("a packed row contains several sequences and cannot be cached: set use_cache=False")
            return None
        if use_cache is None:
            use_cache = cache is not None or self.config.use_cache
        if state is None or not use_cache:
            return None
        cache = QKFlowCache() if cache is None else cache
        cache.advance(state, tokens.shape[1], None if layout is None else layout.valid)
        return cache

    def _output(self, output_type: type[Output], values: dict[str, Any], return_dict: bool | None) -> Any:
        """`output_type(**values)` or a tuple, in a fifth of the time, which matters in cached generation steps."""
        if torch.compiler.is_compiling():
            output = output_type(**values)
        else:
            output = output_type.__new__(output_type)
            for name, value in values.items():
                if value is not None:
                    output[name] = value
        return (
            output if (vars(self.config)["return_dict"] if return_dict is None else return_dict) else output.to_tuple()
        )


class QKFlowModel(QKFlowPreTrainedModel):
    """The blocks of a language model without its head, for `AutoModel`.

    >>> config = QKFlowConfig(hidden_size=32, num_hidden_layers=1, intermediate_size=64, mechanism="qdelta")
    >>> QKFlowModel(config)(torch.tensor([[72, 105]])).last_hidden_state.shape
    torch.Size([1, 2, 32])
    """

    _keys_to_ignore_on_load_unexpected = [re.escape(HEAD)]  # noqa: RUF012

    def __init__(self, config: QKFlowConfig) -> None:
        decoder = Decoder(config.decoder_config())
        decoder.head = None
        super().__init__(config, decoder)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: TransformersCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """The input of the head: the normalised stream after the last block or, of a phase stream, its points."""
        inputs = input_ids, inputs_embeds, attention_mask, position_ids
        outputs, _, cache = self._read(*inputs, past_key_values, use_cache, output_attentions, output_hidden_states)
        values = {"last_hidden_state": outputs.x, "past_key_values": cache}
        values |= {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
        return self._output(BaseModelOutputWithPast, values, return_dict)

    @classmethod
    def _check_folder(cls, folder: Path, options: dict[str, Any]) -> bool:
        return check_folder(folder, with_head=False, overrides=_config_overrides(options))


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
    def from_decoder(cls, decoder: Decoder, *, end: int | None = None) -> QKFlowForCausalLM:
        """Wrap a `Decoder` without copying it; `end` becomes the BOS, EOS and padding token."""
        with torch.device("meta"):
            model = cls(QKFlowConfig.from_model_config(decoder.config, end=end))
        model.model = decoder
        return model.train(decoder.training)

    def get_output_embeddings(self) -> nn.Module | None:
        """The head; None if it shares the weight of the token embedding."""
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head."""
        if self.model.head is None:
            raise UsageError("the head of this model is the token embedding: use set_input_embeddings")
        self.model.head = new_embeddings

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
        """Next-token logits and, if `labels` are given (the input tokens, -100 to ignore one), the mean loss.

        Padding may be on the left or on the right. With a cache, the mask may include the past columns. Positions that
        restart at 0 inside a row separate packed sequences.
        """
        inputs = input_ids, inputs_embeds, attention_mask, position_ids
        outputs, _, cache = self._read(*inputs, past_key_values, use_cache, output_attentions, output_hidden_states)
        x = outputs.x
        if not isinstance(logits_to_keep, int):
            x = x[:, logits_to_keep]
        elif logits_to_keep:
            x = x[:, -logits_to_keep:]
        logits = self.model.logits(x)
        loss = None
        if labels is not None:
            vocabulary = self.config.vocab_size
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=vocabulary, num_items_in_batch=num_items_in_batch
            )
        values = {"loss": loss, "logits": logits, "past_key_values": cache}
        if outputs.hidden_states is not None or outputs.attentions is not None:
            values |= {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
        return self._output(CausalLMOutputWithPast, values, return_dict)

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
        """The arguments of the next `forward` call. Positions are left out, since the state counts them."""
        name, inputs = "input_ids", input_ids
        if inputs_embeds is not None and is_first_iteration:
            name, inputs = "inputs_embeds", inputs_embeds
        new_inputs = inputs if next_sequence_length is None else inputs[:, -next_sequence_length:]
        others = {key: value for key, value in kwargs.items() if key not in _NOT_FORWARDED}
        return {name: new_inputs, "past_key_values": past_key_values, "attention_mask": attention_mask, **others}

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> bool:
        """Add an empty `QKFlowCache` unless a cache is given or caching is off; returns whether there is one."""
        if (kind := generation_config.cache_implementation) is not None:
            raise UsageError(f"a qkflow model has only one cache, its state: leave out cache_implementation={kind!r}")
        if (cache := model_kwargs.get("past_key_values")) is not None:
            cache._is_user_defined = True
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = QKFlowCache()
        return "past_key_values" in model_kwargs

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    @classmethod
    def _check_folder(cls, folder: Path, options: dict[str, Any]) -> bool:
        is_new_head = super()._check_folder(folder, options)
        _check_generation_config(folder)
        return is_new_head


class QKFlowForSequenceClassification(QKFlowPreTrainedModel):
    """A `Classifier` over any mechanism. It reads the last token of each sequence.

    Loaded from the folder of a language model, it takes all weights but those of the head, which is new.

    >>> config = QKFlowConfig(hidden_size=32, num_hidden_layers=1, intermediate_size=0, num_labels=3)
    >>> QKFlowForSequenceClassification(config)(torch.tensor([[72, 105]])).logits.shape
    torch.Size([1, 3])
    """

    def __init__(self, config: QKFlowConfig) -> None:
        self.num_labels = config.num_labels or 2
        stack = Classifier(config.classifier_config(self.num_labels))
        if self.num_labels == 1:
            stack.head = nn.Linear(stack.read_width, 1, bias=False)
            _init_head(stack.head)
        super().__init__(config, stack)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutputWithPast | tuple[Any, ...]:
        """Logits of every label for each sequence and, if `labels` are given, the loss of the problem type."""
        inputs = input_ids, inputs_embeds, attention_mask, position_ids
        outputs, layout, _ = self._read(*inputs, None, False, output_attentions, output_hidden_states)
        x, last = outputs.x, -1
        if layout is not None:
            if is_packed(layout, x) or bool((layout.lengths == 0).any()):
                raise UsageError("a classifier needs one sequence per row, of at least one token")
            last = (layout.valid * torch.arange(1, x.shape[1] + 1, device=x.device)).argmax(1)
        logits = self.model.head(x[torch.arange(len(x), device=x.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        values = {"loss": loss, "logits": logits}
        values |= {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
        return self._output(SequenceClassifierOutputWithPast, values, return_dict)

    @classmethod
    def _check_folder(cls, folder: Path, options: dict[str, Any]) -> bool:
        config = options.get("config")
        labels = options.get("num_labels") or (config.num_labels if isinstance(config, QKFlowConfig) else None)
        labels = labels or label_count(read_config_json(folder))
        return check_folder(folder, labels=labels, overrides=_config_overrides(options))

    def _init_missing(self, names: set[str]) -> None:
        if names == {HEAD}:
            _init_head(self.model.head)
            return
        super()._init_missing(names)


def _init_head(head: nn.Linear) -> None:
    """Initialise as `Classifier` does."""
    nn.init.normal_(head.weight, std=head.in_features**-0.5)


def _config_overrides(options: dict[str, Any]) -> dict[str, Any]:
    """The model keys of config.json that the arguments of from_pretrained replace, through `config` or one by one."""
    config = options.get("config")
    values = vars(config) if isinstance(config, QKFlowConfig) else options
    return {key: value for key, value in values.items() if key in MODEL_KEYS}


def _check_generation_config(folder: Path) -> None:
    """Raise `CheckpointError` unless transformers accepts the generation config of the folder, if it has one."""
    if not (folder / GENERATION_CONFIG).exists():
        return
    values = read_json_object(folder, GENERATION_CONFIG)
    try:
        GenerationConfig.from_dict(values).validate()
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{folder / GENERATION_CONFIG} is not valid ({first_line(error)}): remove it") from error


_ALIGNMENT = 64
"""PyTorch aligns CPU tensors to this many bytes; tensors in a memory-mapped file may start anywhere."""


def align_weights(model: nn.Module) -> None:
    """Copy weights that are not aligned as PyTorch aligns its own: the last bits of a product depend on it.

    >>> align_weights(nn.Linear(2, 2))
    """
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % _ALIGNMENT:
            tensor.data = tensor.data.clone()
