"""Load models with a coupling from folders written by `save_pretrained`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
import transformers
from transformers import PreTrainedModel

from qkflow.errors import CheckpointError, UsageError, unknown
from qkflow.hf.modeling import align_weights
from qkflow.hf.retrofit.install import CONFIG_KEY, RetrofitConfig, install_coupling
from qkflow.hub.config_json import CODE_KEYS
from qkflow.hub.load import refuse_overriding_files, tensor_infos
from qkflow.hub.safe_files import read_json_object

AttentionImplementation = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"]


def load_retrofitted(
    folder: Path | str,
    *,
    dtype: torch.dtype | Literal["auto"] = "auto",
    attention: AttentionImplementation | None = None,
) -> PreTrainedModel:
    """Load a retrofitted model that `save_pretrained` wrote, with its coupling, in evaluation mode.

    Only safetensors are read, no code of the folder is run, and nothing is downloaded. The default `dtype` is that of
    the folder.

    >>> load_retrofitted("nowhere")
    Traceback (most recent call last):
    qkflow.errors.UsageError: nowhere has no config.json: expected a folder written by save_pretrained
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json: expected a folder written by save_pretrained")
    data = read_json_object(folder, "config.json")
    if data.get(CONFIG_KEY) is None:
        raise UsageError(
            f"{folder / 'config.json'} has no {CONFIG_KEY}: the model was saved without a coupling; load it with its"
            " own from_pretrained, then call retrofit(model)"
        )
    config = RetrofitConfig.from_json(data[CONFIG_KEY])
    _refuse_code(folder, data)
    infos = tensor_infos(folder)
    if type(layers := data.get("num_hidden_layers", data.get("n_layer"))) is int and layers > len(infos):
        raise CheckpointError(f"{folder}: its config requires {layers:,} layers, but it has {len(infos)} tensors")
    model_class = _model_class(data, folder)
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    try:
        loaded = _coupled_model_class(model_class, config).from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **options,
        )
    except UsageError:
        raise
    except Exception as error:  # the libraries raise many kinds, some of them their own
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder} cannot be loaded as {model_class.__name__} ({reason}): save it again"
        ) from error
    model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    for problem in ("missing", "unexpected", "mismatched"):
        if names := sorted(str(name) for name in info.get(f"{problem}_keys") or ()):
            listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise CheckpointError(f"{folder} does not match its config.json ({problem}: {listed}): save it again")
    object.__setattr__(model, "__class__", model_class)
    align_weights(model)
    return model


def _coupled_model_class(model_class: type[PreTrainedModel], config: RetrofitConfig) -> type[PreTrainedModel]:
    """A subclass that installs the coupling in its constructor, so that transformers loads its tensors as well."""

    def init(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        install_coupling(self, config.coupling, config.layers)

    names = {"__module__": model_class.__module__, "__qualname__": model_class.__qualname__, "__init__": init}
    return cast(type[PreTrainedModel], type(model_class.__name__, (model_class,), names))


def _model_class(data: dict[str, Any], folder: Path) -> type[PreTrainedModel]:
    """The class that config.json names, if it is part of transformers."""
    names = data.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    model_class = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
    config_class = getattr(model_class, "config_class", None)
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)) or config_class is None:
        raise UsageError(f"{folder / 'config.json'} has the architectures {names!r}: expected a model of transformers")
    if data.get("model_type") != config_class.model_type:
        raise unknown(f"model_type for {name}", data.get("model_type"), [config_class.model_type])
    return model_class


def _refuse_code(folder: Path, data: dict[str, Any]) -> None:
    """Refuse a folder that names code to run, or weights elsewhere."""
    path = folder / "config.json"
    for key, value in _nested_items(data):
        if key.endswith("_implementation") and value is not None and value not in get_args(AttentionImplementation):
            raise CheckpointError(f"{path} has {key} {value!r}, which may be code from the Hub: remove it")
        if key == "quantization_config" and value is not None:
            raise CheckpointError(f"{path} has a {key}: quantised weights are not supported")
        if key in CODE_KEYS:
            raise CheckpointError(f"{path} has {key!r}, which names code to run: do not trust this folder")
    refuse_overriding_files(folder)


def _nested_items(value: Any) -> Iterator[tuple[str, Any]]:
    """All keys and values of nested objects."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield key, inner
        yield from _nested_items(inner)
