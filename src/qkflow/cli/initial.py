"""Weights that a run begins with: an exported folder's, or those of another run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from qkflow.data import Corpus, Tokenizer
from qkflow.data.text.tokenizers import ByteTokenizer, WordTokenizer
from qkflow.errors import UsageError
from qkflow.models import DecoderConfig
from qkflow.training import load_run
from qkflow.training.run_dir import read_json
from qkflow.training.tensors import model_tensors


@dataclass(frozen=True, kw_only=True)
class Initial:
    """What a run begins with."""

    model: DecoderConfig
    """The shape of the model."""
    weights: dict[str, Tensor]
    """Its tensors by name."""
    tokens: dict[str, str]
    """Settings of a corpus that make it the tokens the model knows; none for a task, which has its own."""
    tokenizer: Tokenizer | None
    """What the model's tokens stand for, if that is known."""

    def refuse_others(self, corpus: Corpus) -> None:
        """Raise `UsageError` for a corpus whose tokens are not those the model knows."""
        own = self.tokenizer
        if own is not None and own.to_json() != corpus.tokenizer.to_json():
            raise UsageError(
                f"the model of --init knows {own.vocabulary:,} tokens of kind {own.kind!r}, {corpus.name} has"
                f" {corpus.vocabulary:,} of kind {corpus.tokenizer.kind!r}: give a text or a task with the same tokens,"
                " or train a new model"
            )


def read_initial(folder: Path) -> Initial:
    """The model and the tokens of an exported folder, or of a run's final weights or latest checkpoint."""
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json: --init wants a folder of `qkflow export`, or a run")
    if "model_type" in read_json(folder / "config.json"):
        from qkflow.hub import read_folder

        found = read_folder(folder)
        model, weights, tokenizer = found.config, found.weights, found.tokenizer
    else:
        run = load_run(folder)
        model, weights, tokenizer = run.model.config, model_tensors(run.model), run.tokenizer
    return Initial(model=model, weights=weights, tokens=_tokens(tokenizer, folder), tokenizer=tokenizer)


def _tokens(tokenizer: Tokenizer | None, folder: Path) -> dict[str, str]:
    if tokenizer is None or tokenizer.kind == WordTokenizer.kind:  # a task has its words
        return {}
    if tokenizer.kind == ByteTokenizer.kind:
        return {"tokens": "bytes"}
    return {"tokens": "saved", "vocabulary_files": str(folder)}
