"""Load a model folder. Everything is validated before memory is allocated, and nothing in the folder is executed.

The shapes of the tensors come from the safetensors headers; the model is first built on the meta device, and its
parameters must match the headers in name, shape and kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from qkflow.data import Tokenizer
from qkflow.data.text.tokenizers import EXPORTED_TOKENIZER_FILE, TOKENIZER_FILE, find_tokenizer
from qkflow.errors import CheckpointError, UsageError
from qkflow.hub.config_json import (
    CLASSIFIER,
    MODEL_TYPE,
    architecture,
    classifier_config,
    decoder_config,
    validate_keys,
)
from qkflow.hub.safe_files import first_line, parse_json_object, path_inside, read_json_object, refuse_large_json
from qkflow.mechanisms import mechanism
from qkflow.models import Classifier, Decoder, DecoderConfig
from qkflow.models.stack import StackConfig
from qkflow.training.tensors import model_tensors, refuse_foreign

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"
PREFIX = "model."
"""Precedes our tensor names: transformers stores the bare model under this attribute."""
HEAD = f"{PREFIX}head.weight"
MAX_HEADER_BYTES = 100 << 20
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """The language model of a folder."""

    path: Path
    config: DecoderConfig
    weights: dict[str, Tensor]
    """Tensors under the names and in the precision of a `Decoder`."""
    tokenizer: Tokenizer | None
    """None if the folder has no tokenizer that qkflow can read."""

    def model(self) -> Decoder:
        """Build the model, in evaluation mode."""
        model = Decoder(self.config)
        model.load_state_dict(self.weights, strict=False)  # tied tensors have several names; the rest was validated
        return model.eval()


def read_folder(path: Path | str) -> ModelFolder:
    """Read a language model that `qkflow export` or `save_pretrained` wrote.

    Raises `UsageError` for pickles, files outside the folder, unknown keys, and weights that do not match the config.

    >>> read_folder("no/such/folder")
    Traceback (most recent call last):
    qkflow.errors.UsageError: no/such/folder is not a directory: expected one written by `qkflow export`
    """
    folder = Path(path)
    data = read_config_json(folder)
    if architecture(data) == CLASSIFIER:
        raise UsageError(f"{folder} contains a classifier: expected a language model, as `qkflow export` writes")
    config, infos = decoder_config(data), tensor_infos(folder)
    empty = _build_on_meta(Decoder, config, infos, folder)
    _check_weights(folder, infos, empty)
    for name in (EXPORTED_TOKENIZER_FILE, TOKENIZER_FILE):
        refuse_large_json(path_inside(folder, name))
    tokenizer = find_tokenizer(folder)
    if tokenizer is not None and tokenizer.vocabulary > config.vocabulary:
        raise CheckpointError(
            f"{folder}: the tokenizer has {tokenizer.vocabulary} tokens and the model {config.vocabulary}: they do not"
            " match"
        )
    dtypes = {name: tensor.dtype for name, tensor in model_tensors(empty).items()}
    weights: dict[str, Tensor] = {}
    for file in sorted({info.file for info in infos.values()}):
        with safe_open(path_inside(folder, file), framework="pt") as opened:
            weights |= {name: opened.get_tensor(name) for name, info in infos.items() if info.file == file}
    return ModelFolder(
        path=folder,
        config=config,
        weights={name: weights[PREFIX + name].to(dtype) for name, dtype in dtypes.items()},
        tokenizer=tokenizer,
    )


def check_folder(
    folder: Path, *, labels: int | None = None, with_head: bool = True, overrides: Mapping[str, Any] | None = None
) -> bool:
    """Raise `UsageError` unless the folder contains a complete language model or, if `labels` is given, classifier.

    Without `with_head`, the head of the language model may be missing. `overrides` replace keys of config.json. A
    classifier may also start from a language model; returns whether it does, and therefore needs a new head.
    """
    refuse_overriding_files(folder)
    if path_inside(folder, GENERATION_CONFIG).exists():
        read_json_object(folder, GENERATION_CONFIG)
    data, infos = {**read_config_json(folder), **(overrides or {})}, tensor_infos(folder)
    kind = architecture(data)
    if labels is None:
        if kind == CLASSIFIER:
            raise UsageError(f"{folder} contains a classifier: load it with AutoModelForSequenceClassification")
        empty = _build_on_meta(Decoder, decoder_config(data), infos, folder)
        _check_weights(folder, infos, empty, ignore=frozenset() if with_head else frozenset({HEAD}))
        return False
    head = infos.get(HEAD)
    if kind == CLASSIFIER and (head is None or head.shape[0] != labels):
        saved = 0 if head is None else head.shape[0]
        raise CheckpointError(f"{folder} is a classifier with {saved} labels: expected {labels}, as requested")
    empty = _build_on_meta(Classifier, classifier_config(data, labels), infos, folder)
    is_new_head = kind != CLASSIFIER or labels == 1
    _check_weights(folder, infos, empty, ignore=frozenset({HEAD}) if is_new_head else frozenset())
    return kind != CLASSIFIER


def refuse_overriding_files(folder: Path) -> None:
    """Raise `UsageError` for files that make transformers load other weights, or run code."""
    others = [*folder.glob("adapter_config.json"), *folder.glob("shard-*-model-*.safetensors")]
    if others:
        raise UsageError(f"{folder} has {others[0].name}, which would be loaded instead of its weights: remove it")
    if (folder / "custom_generate").exists():
        raise UsageError(f"{folder} has 'custom_generate', which is code: a model needs none, do not trust it")


def read_config_json(folder: Path) -> dict[str, Any]:
    """Read and validate the config.json of a qkflow model."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a directory: expected one written by `qkflow export`")
    if not path_inside(folder, "config.json").exists():
        raise UsageError(f"{folder} has no config.json: expected a folder written by `qkflow export`")
    data = read_json_object(folder, "config.json")
    if data.get("model_type") != MODEL_TYPE:
        raise UsageError(
            f"{folder} contains a model of type {data.get('model_type')!r}: expected {MODEL_TYPE!r}, as written by"
            " `qkflow export`"
        )
    validate_keys(data, f"{folder / 'config.json'}")
    return data


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """What a safetensors header says about a tensor."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def tensor_infos(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of a folder by name, from one file or from shards that match their index."""
    if path_inside(folder, WEIGHTS).exists():
        return _read_header(folder, WEIGHTS)
    if not path_inside(folder, INDEX).exists():
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise CheckpointError(
                f"{folder} has its weights in {pickles[0]}, a pickle, which can run code when it is opened: "
                "qkflow reads safetensors only; convert it first"
            )
        raise CheckpointError(f"{folder} has no weights: expected {WEIGHTS} or {INDEX}")
    weight_map = _read_index(folder)
    infos: dict[str, TensorInfo] = {}
    for file in sorted(set(weight_map.values())):
        shard = _read_header(folder, file)
        expected = {name for name, listed_file in weight_map.items() if listed_file == file}
        if mismatched := sorted(shard.keys() ^ expected):
            source = file if mismatched[0] in shard else INDEX
            raise CheckpointError(
                f"{folder}: the shards do not match their index, {mismatched[0]!r} is only in {source}"
            )
        infos |= shard
    return infos


def _read_index(folder: Path) -> dict[str, str]:
    weight_map = read_json_object(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX} has no 'weight_map': expected an object of tensor names and files")
    for file in weight_map.values():
        if not path_inside(folder, file).exists():
            raise CheckpointError(f"{folder} lacks the shard {file}, which is in its index: download it again")
        if not file.endswith(".safetensors"):
            raise CheckpointError(f"{folder / INDEX} lists {file}: qkflow reads safetensors only")
    return weight_map


def _read_header(folder: Path, file: str) -> dict[str, TensorInfo]:
    path = path_inside(folder, file)
    refuse_foreign(path)
    _refuse_repeated_names(path)
    try:
        with safe_open(path, framework="pt") as weights:
            slices: dict[str, Any] = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
            return {
                name: TensorInfo(file=file, dtype=str(piece.get_dtype()), shape=tuple(piece.get_shape()))
                for name, piece in slices.items()
            }
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is truncated, or not a safetensors file ({first_line(error)})") from error


def _refuse_repeated_names(path: Path) -> None:
    """The safetensors library accepts a header with repeated names."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path} is truncated, or not a safetensors file (a header of {length:,} bytes in a file of {size:,})"
            )
        parse_json_object(file.read(length), path)


def _build_on_meta(
    build: Callable[[Any], nn.Module], config: StackConfig, infos: Mapping[str, TensorInfo], folder: Path
) -> nn.Module:
    """Build the model on the meta device, after its largest dimensions were compared with the weights."""
    embedding = infos.get(f"{PREFIX}embedding.weight")
    expected = (config.vocabulary, config.width)
    if embedding is None or embedding.shape != expected:
        actual = "is missing" if embedding is None else f"has shape {list(embedding.shape)}"
        raise CheckpointError(f"{folder}: '{PREFIX}embedding.weight' {actual}, its config requires {list(expected)}")
    n_modules = config.layers
    if n_modules <= len(infos):  # otherwise even a list of the mechanisms may be too large
        couplings = [getattr(mechanism(spec), "coupling", None) for spec in dict.fromkeys(config.mechanisms)]
        n_modules = max(getattr(coupling, "alternations", 1) for coupling in couplings)  # each has its own networks
    if n_modules > len(infos):
        raise CheckpointError(f"{folder}: its config requires more modules than its {len(infos)} tensors can fill")
    try:
        with torch.device("meta"):
            return build(config)
    except (RuntimeError, OverflowError, TypeError, MemoryError) as error:
        raise CheckpointError(f"{folder}: no model can be built from its config ({first_line(error)})") from error


def _check_weights(
    folder: Path, infos: Mapping[str, TensorInfo], model: nn.Module, *, ignore: frozenset[str] = frozenset()
) -> None:
    """Raise `CheckpointError` unless the tensors match the parameters of the model, except for names in `ignore`."""
    tensors = {PREFIX + name: tensor for name, tensor in model_tensors(model).items()}
    if mismatched := sorted((tensors.keys() ^ infos.keys()) - ignore):
        source = "the model" if mismatched[0] in tensors else "the weights"
        raise CheckpointError(f"{folder}: the weights do not match the config, {mismatched[0]!r} is only in {source}")
    for name, tensor in tensors.items():
        if name in ignore:
            continue
        info = infos[name]
        if info.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{folder}: {name!r} has shape {list(info.shape)}, its config requires {list(tensor.shape)}"
            )
        if tensor.dtype.is_floating_point and info.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{folder}: {name!r} has dtype {info.dtype}: expected one of {', '.join(FLOAT_DTYPES)}"
            )
