"""qkflow models as transformers models: a causal language model and a sequence classifier over any mechanism."""

from __future__ import annotations

from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutputWithPast

from qkflow.errors import CheckpointError, UsageError
from qkflow.hf.cache import QKFlowCache
from qkflow.hf.configuration import QKFlowConfig
from qkflow.hf.forward import StackOutput, expand_to_columns, forward
from qkflow.hf.inputs import batch_layout, is_packed
from qkflow.hub.config_json import MODEL_KEYS, label_count
from qkflow.hub.load import HEAD, check_folder, read_config_json
from qkflow.layout import Layout
from qkflow.models import Classifier, Decoder
from qkflow.models.stack import Stack, Tokens
from qkflow.training.tensors import model_tensors

Output = TypeVar("Output", CausalLMOutputWithPast, SequenceClassifierOutputWithPast)
for _output_type in (CausalLMOutputWithPast, SequenceClassifierOutputWithPast):
    _output_type()  # the first instance registers the type with torch's pytrees


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
        """Return the token embedding; resizing it is not supported."""
        if new_num_tokens not in (None, self.config.vocab_size) or pad_to_multiple_of is not None:
            raise UsageError(
                f"the vocabulary of a qkflow model is fixed at {self.config.vocab_size} tokens: to use another one,"
                " train a model with it (`qkflow train --tokens`)"
            )
        return self.model.embedding

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

    def _forward(
        self,
        tokens: Tokens | None,
        cache: QKFlowCache | None,
        layout: Layout | None,
        output_attentions: bool | None,
        output_hidden_states: bool | None,
    ) -> StackOutput:
        """Run the blocks. Options that are None come from the config; attentions cover all columns of the cache."""
        if tokens is None:
            raise UsageError("a qkflow model needs input_ids, got None")
        config = vars(self.config)  # attribute access on a transformers config is slow
        state = None if cache is None else cache.state
        outputs = forward(
            self.model,
            tokens,
            state,
            layout,
            output_attentions=bool(config["_output_attentions"] if output_attentions is None else output_attentions),
            output_hidden_states=bool(
                config["output_hidden_states"] if output_hidden_states is None else output_hidden_states
            ),
            checkpoint=self._gradient_checkpointing_func if self.gradient_checkpointing and self.training else None,
        )
        if outputs.attentions is None or cache is None:
            return outputs
        attentions = expand_to_columns(outputs.attentions, state, cache.columns, cache.valid())
        return outputs._replace(attentions=attentions)

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
        _refuse_embeddings(inputs_embeds)
        cache = past_key_values
        if cache is not None and not isinstance(cache, QKFlowCache):
            raise UsageError(
                f"past_key_values must be a QKFlowCache, which this model returns, got {type(cache).__name__}"
            )
        layout = None
        if input_ids is not None and (attention_mask is not None or position_ids is not None):
            past_columns = 0 if cache is None else cache.columns
            past_lengths = None if cache is None or cache.state is None or position_ids is None else cache.state.length
            layout = batch_layout(input_ids, attention_mask, position_ids, past_columns, past_lengths)
        outputs = self._forward(input_ids, cache, layout, output_attentions, output_hidden_states)
        cache = self._update_cache(cache, use_cache, outputs.state, layout, input_ids)
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
        _refuse_embeddings(inputs_embeds)
        new_ids = input_ids if next_sequence_length is None else input_ids[:, -next_sequence_length:]
        others = {name: value for name, value in kwargs.items() if name not in ("labels", "position_ids")}
        return {"input_ids": new_ids, "past_key_values": past_key_values, "attention_mask": attention_mask, **others}

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
        _refuse_embeddings(inputs_embeds)
        layout = None if input_ids is None else batch_layout(input_ids, attention_mask, position_ids, 0, None)
        outputs = self._forward(input_ids, None, layout, output_attentions, output_hidden_states)
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


def _refuse_embeddings(inputs_embeds: Tensor | None) -> None:
    if inputs_embeds is not None:
        raise UsageError("qkflow models do not support inputs_embeds: give input_ids")


_ALIGNMENT = 64
"""PyTorch aligns CPU tensors to this many bytes; tensors in a memory-mapped file may start anywhere."""


def align_weights(model: nn.Module) -> None:
    """Copy weights that are not aligned as PyTorch aligns its own: the last bits of a product depend on it.

    >>> align_weights(nn.Linear(2, 2))
    """
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % _ALIGNMENT:
            tensor.data = tensor.data.clone()
