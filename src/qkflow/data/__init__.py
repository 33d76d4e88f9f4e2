"""Corpora: from text anywhere to memory-mapped tokens, training batches and held-out windows."""

from qkflow.data.batches import Window, batch, epoch_windows, windows
from qkflow.data.config import CorpusConfig
from qkflow.data.corpus import Corpus, Split
from qkflow.data.find import NAMES
from qkflow.data.prepare import open_corpus
from qkflow.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer, save_tokenizer

__all__ = [
    "NAMES",
    "ByteTokenizer",
    "Corpus",
    "CorpusConfig",
    "Split",
    "Tokenizer",
    "Window",
    "batch",
    "epoch_windows",
    "load_tokenizer",
    "open_corpus",
    "save_tokenizer",
    "windows",
]
