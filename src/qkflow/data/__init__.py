"""Corpora: from text anywhere, or from a task's generator, to mapped tokens, training batches and held-out windows."""

from qkflow.data.recall import MQAR, TASKS, Instances, Needle, from_spec, is_task, mqar, needles
from qkflow.data.text.batches import Batch, Window, epoch_windows, get_batch, scored, windows
from qkflow.data.text.config import CorpusConfig
from qkflow.data.text.corpus import CELL_DTYPE, Corpus, Split
from qkflow.data.text.prepare import open_corpus
from qkflow.data.text.resolve import NAMES
from qkflow.data.text.tokenizers import ByteTokenizer, Tokenizer, WordTokenizer, load_tokenizer, save_tokenizer

__all__ = [
    "CELL_DTYPE",
    "MQAR",
    "NAMES",
    "TASKS",
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "CorpusConfig",
    "Instances",
    "Needle",
    "Split",
    "Tokenizer",
    "Window",
    "WordTokenizer",
    "epoch_windows",
    "from_spec",
    "get_batch",
    "is_task",
    "load_tokenizer",
    "mqar",
    "needles",
    "open_corpus",
    "save_tokenizer",
    "scored",
    "windows",
]
