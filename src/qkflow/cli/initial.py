"""Initial weights of a run, from an exported folder or another run."""

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
    """Initial weights with their model and tokenizer."""

    model: DecoderConfig
    """The model's config."""
    weights: dict[str, Tensor]
    """Its tensors by name."""
    tokens: dict[str, str]
    """Corpus settings that select the model's tokenizer; empty for a task, which has its own."""
    tokenizer: Tokenizer | None
    """The tokenizer, if it is known."""

    def check_tokenizer(self, corpus: Corpus) -> None:
        """Raise `UsageError` if the corpus has another tokenizer."""
        own = self.tokenizer
        if own is not None and own.to_json() != corpus.tokenizer.to_json():
            raise UsageError(
                f"the model of --init has {own.vocabulary:,} tokens of kind {own.kind!r}, but {corpus.name} has"
                f" {corpus.vocabulary:,} of kind {corpus.tokenizer.kind!r}: use data with the same tokenizer, or"
                " train a new model"
            )


def read_initial(folder: Path) -> Initial:
    """Read the model of an exported folder, or the final weights or latest checkpoint of a run."""
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json: --init needs a run folder or a folder made by `qkflow export`")
    if "model_type" in read_json(folder / "config.json"):
        from qkflow.hub import read_folder

        exported = read_folder(folder)
        model, weights, tokenizer = exported.config, exported.weights, exported.tokenizer
    else:
        run = load_run(folder)
        model, weights, tokenizer = run.model.config, model_tensors(run.model), run.tokenizer
    return Initial(model=model, weights=weights, tokens=_tokens(tokenizer, folder), tokenizer=tokenizer)


def _tokens(tokenizer: Tokenizer | None, folder: Path) -> dict[str, str]:
    if tokenizer is None or tokenizer.kind == WordTokenizer.kind:  # a task has its own words
        return {}
    if tokenizer.kind == ByteTokenizer.kind:
        return {"tokens": "bytes"}
    return {"tokens": "saved", "vocabulary_files": str(folder)}
