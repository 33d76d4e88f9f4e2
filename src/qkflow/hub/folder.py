"""Reading a folder: everything is checked before anything is allocated, and nothing in it is ever executed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from qkflow.data import Tokenizer
from qkflow.data.text.tokenizer_io import EXPORTED_TOKENIZER_FILE, TOKENIZER_FILE, find_tokenizer
from qkflow.errors import CheckpointError, UsageError
from qkflow.hub.config_json import CAUSAL, CLASSIFIER, MODEL_TYPE, classifier_config, decoder_config, refuse_unknown
from qkflow.hub.safe_files import inside, read_table, refuse_large
from qkflow.hub.weights import PREFIX, fit, own_tensors, read_tensors, survey, without_storage
from qkflow.models import Classifier, Decoder, DecoderConfig

_HEAD = f"{PREFIX}head.weight"


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A language model in a folder of the Hub."""

    path: Path
    """The folder."""
    config: DecoderConfig
    """The model's shape."""
    weights: dict[str, Tensor]
    """Its tensors by the names of a `Decoder`, in the precision of one."""
    tokenizer: Tokenizer | None
    """What its tokens stand for; None where the folder has no tokenizer of ours."""

    def model(self) -> Decoder:
        """The model, in evaluation mode."""
        model = Decoder(self.config)
        model.load_state_dict(self.weights, strict=False)  # shared tensors have several names; the rest was compared
        return model.eval()


def read_folder(path: Path | str) -> Folder:
    """The language model that `qkflow export`, or save_pretrained of one of ours, wrote into a folder.

    Pickles, files that lie elsewhere, unknown keys, and weights that do not belong to the config are refused with a
    `UsageError`.

    >>> read_folder("no/such/folder")
    Traceback (most recent call last):
    qkflow.errors.UsageError: no/such/folder is no folder: expected one that `qkflow export` wrote
    """
    folder = Path(path)
    data = read_description(folder)
    if architecture(data) != CAUSAL:
        raise UsageError(f"{folder} holds a classifier: expected a language model, as `qkflow export` writes")
    config, entries = decoder_config(data), survey(folder)
    hollow = without_storage(Decoder, config, entries, folder)
    fit(folder, entries, hollow)
    tokenizer = _tokenizer(folder)
    if tokenizer is not None and tokenizer.vocabulary > config.vocabulary:
        raise CheckpointError(
            f"{folder}: its tokenizer has {tokenizer.vocabulary} tokens, its model {config.vocabulary}: they do not"
            " belong together"
        )
    kinds = {name: tensor.dtype for name, tensor in own_tensors(hollow).items()}
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in read_tensors(folder, entries).items()}
    return Folder(
        path=folder,
        config=config,
        weights={name: weights[name].to(kind) for name, kind in kinds.items()},
        tokenizer=tokenizer,
    )


def _tokenizer(folder: Path) -> Tokenizer | None:
    for name in (EXPORTED_TOKENIZER_FILE, TOKENIZER_FILE):
        refuse_large(inside(folder, name))
    return find_tokenizer(folder)


def check_folder(folder: Path, *, labels: int | None = None, changes: Mapping[str, Any] | None = None) -> bool:
    """Raise a `UsageError` unless the folder holds one of our models whole; `labels` asks for a classifier.

    `changes` are what the call that loads it says otherwise than config.json. A classifier may begin as a language
    model, whose head it replaces: then the answer is true.
    """
    refuse_detours(folder)
    data, entries = {**read_description(folder), **(changes or {})}, survey(folder)
    found = architecture(data)
    if labels is None:
        if found != CAUSAL:
            raise UsageError(f"{folder} holds a classifier: load it with AutoModelForSequenceClassification")
        fit(folder, entries, without_storage(Decoder, decoder_config(data), entries, folder))
        return False
    head = entries.get(_HEAD)
    if found == CLASSIFIER and (head is None or head.shape[0] != labels):
        has = 0 if head is None else head.shape[0]
        raise CheckpointError(f"{folder} is a classifier with {has} labels, asked for were {labels}")
    hollow = without_storage(Classifier, classifier_config(data, labels), entries, folder)
    fit(folder, entries, hollow, but=frozenset({_HEAD}) if found == CAUSAL or labels == 1 else frozenset())
    return found == CAUSAL


def refuse_detours(folder: Path) -> None:
    """Raise `UsageError` for files that make transformers load something else than what was checked, or run it."""
    detours = [*folder.glob("adapter_config.json"), *folder.glob("shard-*-model-*.safetensors")]
    if detours:
        raise UsageError(f"{folder} has {detours[0].name}, which would be loaded in place of its weights: remove it")
    if (folder / "custom_generate").exists():
        raise UsageError(f"{folder} has 'custom_generate', code of its own: a model needs none, do not trust this one")


def read_description(folder: Path) -> dict[str, Any]:
    """The config.json of a folder, if it is that of one of our models and nothing else."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: expected one that `qkflow export` wrote")
    if not inside(folder, "config.json").exists():
        raise UsageError(f"{folder} has no config.json: expected a folder that `qkflow export` wrote")
    data = read_table(folder, "config.json")
    if data.get("model_type") != MODEL_TYPE:
        raise UsageError(
            f"{folder} holds a model of type {data.get('model_type')!r}: expected {MODEL_TYPE!r}, as `qkflow export`"
            " writes it"
        )
    refuse_unknown(data, f"{folder / 'config.json'}")
    return data


def architecture(data: dict[str, Any]) -> str:
    """Which of our models a description is of; one that does not say is a language model."""
    named = data.get("architectures") or [CAUSAL]
    if not isinstance(named, list) or len(named) != 1 or named[0] not in (CAUSAL, CLASSIFIER):
        raise UsageError(f"config.json has the architectures {named!r}: expected {CAUSAL} or {CLASSIFIER}")
    return named[0]


def label_count(data: dict[str, Any]) -> int:
    """How many labels a description has; two, as everywhere in transformers, where it does not say."""
    labels = data.get("id2label")
    return len(labels) if isinstance(labels, dict) else 2
