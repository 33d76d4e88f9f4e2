"""Models with a coupling, read back from the folders that `save_pretrained` made of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
import transformers
from transformers import PreTrainedModel

from qkflow.errors import CheckpointError, UsageError, unknown
from qkflow.hf.alignment import align
from qkflow.hf.retrofit.fit import fit
from qkflow.hf.retrofit.record import KEY, Retrofit, read_record
from qkflow.hub.config_json import CODE
from qkflow.hub.folder import refuse_detours
from qkflow.hub.safe_files import read_table
from qkflow.hub.weights import survey

Attention = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"]


def load_retrofitted(
    folder: Path | str,
    *,
    dtype: torch.dtype | Literal["auto"] = "auto",
    attention: Attention | None = None,
) -> PreTrainedModel:
    """The model of a folder that `save_pretrained` made of a retrofitted one, coupling included, in evaluation mode.

    Only safetensors are read, no code of the folder's is run, and nothing is fetched. `dtype` is that of the folder
    unless given.

    >>> load_retrofitted("nowhere")
    Traceback (most recent call last):
    qkflow.errors.UsageError: nowhere holds no config.json: expected a folder that save_pretrained made
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds no config.json: expected a folder that save_pretrained made")
    data = read_table(folder, "config.json")
    if data.get(KEY) is None:
        raise UsageError(
            f"{folder / 'config.json'} has no {KEY}: the model was saved without a coupling; load it with its own"
            " from_pretrained, and retrofit(model) it"
        )
    record = read_record(data[KEY])
    _refuse_foreign(folder, data)
    entries = survey(folder)
    if type(layers := data.get("num_hidden_layers", data.get("n_layer"))) is int and layers > len(entries):
        raise CheckpointError(f"{folder}: its config asks for {layers:,} layers of the {len(entries)} tensors it has")
    kind = _class(data, folder)
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    try:
        found = _coupled(kind, record).from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **options,
        )
    except UsageError:
        raise
    except Exception as error:  # the libraries raise many kinds, some of them their own
        why = " ".join(str(error).split())
        raise CheckpointError(f"{folder} cannot be loaded as {kind.__name__} ({why}): save it anew") from error
    loaded, info = cast(tuple[PreTrainedModel, dict[str, Any]], found)
    for problem in ("missing", "unexpected", "mismatched"):
        if names := sorted(str(name) for name in info.get(f"{problem}_keys") or ()):
            few = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise CheckpointError(f"{folder} does not fit its config.json ({problem}: {few}): save it anew")
    object.__setattr__(loaded, "__class__", kind)
    align(loaded)
    return loaded


def _coupled(kind: type[PreTrainedModel], record: Retrofit) -> type[PreTrainedModel]:
    """The class with the coupling put in as soon as a model is made, so that its tensors are loaded as all others."""

    def begin(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        fit(self, record.coupling, record.layers)

    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__init__": begin}
    return cast(type[PreTrainedModel], type(kind.__name__, (kind,), named))


def _class(data: dict[str, Any], folder: Path) -> type[PreTrainedModel]:
    """The class that the config names, if it is one of transformers' own."""
    names = data.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    kind = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
    config = getattr(kind, "config_class", None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)) or config is None:
        raise UsageError(f"{folder / 'config.json'} names architectures {names!r}: expected a model of transformers")
    if data.get("model_type") != config.model_type:
        raise unknown(f"model_type for {name}", data.get("model_type"), [config.model_type])
    return kind


def _refuse_foreign(folder: Path, data: dict[str, Any]) -> None:
    """Nothing may name code, or weights from elsewhere."""
    for key, value in _entries(data):
        if key.endswith("_implementation") and value is not None and value not in get_args(Attention):
            raise CheckpointError(f"{folder / 'config.json'} asks for {key} {value!r}: remove that")
        if key == "quantization_config" and value is not None:
            raise CheckpointError(f"{folder / 'config.json'} has a {key}: quantised weights are not read")
        if key in CODE:
            raise CheckpointError(f"{folder / 'config.json'} has {key!r}, code of its own: do not trust this folder")
    refuse_detours(folder)


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key of nested tables, with its value."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield key, inner
        yield from _entries(inner)
