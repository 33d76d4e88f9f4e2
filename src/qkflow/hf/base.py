"""What our models in transformers share: how they begin, are loaded, and are read."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qkflow.errors import CheckpointError, UsageError
from qkflow.hf.alignment import align
from qkflow.hf.cache import QKFlowCache
from qkflow.hf.config import QKFlowConfig
from qkflow.hf.layouts import Tokens
from qkflow.hf.reading import Reading, over_columns, read
from qkflow.hub.config_json import OURS
from qkflow.hub.folder import check_folder
from qkflow.hub.weights import own_tensors
from qkflow.layout import Layout
from qkflow.models.stack import Stack


class QKFlowPreTrainedModel(PreTrainedModel):
    """One of our models, bare, as `model`; its tensors keep their names behind `model.`."""

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
        names = {name for name, _ in stack.state_dict().items()} - own_tensors(stack).keys()
        self._tied_weights_keys = {f"model.{name}": f"model.{name}" for name in sorted(names)}  # saved once
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: a model of ours begins as it is built."""

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """None that transformers would have to tie: our models share modules, and a tied head has no weights."""
        return {}

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding of tokens."""
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Put another embedding in its place."""
        self.model.embedding = value

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """The embedding as it is; another size is refused."""
        if new_num_tokens not in (None, self.config.vocab_size) or pad_to_multiple_of is not None:
            raise UsageError(
                f"the vocabulary of a qkflow model has {self.config.vocab_size} tokens for good: to use another, train"
                " a model with it (`qkflow train --tokens`)"
            )
        return self.model.embedding

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike[str] | None, *model_args: Any, **kwargs: Any
    ) -> Any:
        """As in transformers, from safetensors only; a local folder is checked whole before anything is loaded."""
        if kwargs.get("use_safetensors") is False:
            raise UsageError("a qkflow model is loaded from safetensors only: leave use_safetensors out")
        for name in ("gguf_file", "variant"):
            if kwargs.get(name):
                raise UsageError(f"a qkflow model has its weights in model.safetensors: leave {name} out")
        if kwargs.get("ignore_mismatched_sizes"):
            raise UsageError(
                "weights of other shapes would be left out without a word: leave ignore_mismatched_sizes out"
            )
        if pretrained_model_name_or_path is not None:
            folder = Path(pretrained_model_name_or_path, kwargs.get("subfolder") or "")
            if folder.is_file():
                raise UsageError(f"{folder} is a file: give the folder of the model")
            if folder.is_dir():
                kwargs["ignore_mismatched_sizes"] = cls._check(folder, kwargs)
        told = kwargs.pop("output_loading_info", False)
        options: dict[str, Any] = {**kwargs, "use_safetensors": True, "output_loading_info": True}
        model, info = cast(Any, super().from_pretrained(pretrained_model_name_or_path, *model_args, **options))
        model._complete({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
        align(model)
        return (model, info) if told else model

    @classmethod
    def _check(cls, folder: Path, options: dict[str, Any]) -> bool:
        """Refuse a folder that is not one of these models whole; true if it has to begin with a part of it."""
        return check_folder(folder, changes=changed(options))

    def _complete(self, missing: set[str]) -> None:
        """Begin what a folder did not have, where that is allowed."""
        if missing:
            raise CheckpointError(f"the weights lack {sorted(missing)[0]!r}: they do not belong to this model")

    def _read(
        self,
        tokens: Tokens | None,
        cache: QKFlowCache | None,
        layout: Layout | None,
        *,
        maps: bool | None,
        streams: bool | None,
        usual: dict[str, Any],
    ) -> Reading:
        """A pass over the blocks, as the call asks for it, or else the config (`usual`); maps over all columns."""
        if tokens is None:
            raise UsageError("a qkflow model reads input_ids, got none: inputs_embeds is not offered")
        maps = usual["_output_attentions"] if maps is None else maps
        streams = usual["output_hidden_states"] if streams is None else streams
        state = None if cache is None else cache.state
        checkpoint = self._gradient_checkpointing_func if self.gradient_checkpointing and self.training else None
        found = read(self.model, tokens, state, layout, maps=bool(maps), streams=bool(streams), checkpoint=checkpoint)
        if found.maps is None or cache is None:
            return found
        return found._replace(maps=over_columns(found.maps, state, cache.columns, cache.valid()))


def changed(options: dict[str, Any]) -> dict[str, Any]:
    """The shape that a call of from_pretrained asks for, by a config or by single values: weights have to fit it."""
    config = options.get("config")
    return {
        key: value
        for key, value in (vars(config) if isinstance(config, QKFlowConfig) else options).items()
        if key in OURS
    }


def refuse_embeddings(given: Tensor | None) -> None:
    """Raise `UsageError` for a stream given in place of tokens."""
    if given is not None:
        raise UsageError("inputs_embeds is not offered by qkflow models: give input_ids")


def packed(layout: Layout | None, tokens: torch.Tensor) -> bool:
    """Whether rows of the batch hold several texts."""
    return layout is not None and len(layout.lengths) != len(tokens)
