"""Corpora: from text anywhere, or from a task's generator, to mapped tokens, training batches and held-out windows."""

from qkflow.data.recall import MQAR, TASKS, Instances, Needle, from_spec, is_task, mqar, needles
from qkflow.data.text.batches import Lesson, Window, batch, epoch_windows, lesson, scored, windows
from qkflow.data.text.config import CorpusConfig
from qkflow.data.text.corpus import CELL, Corpus, Split
from qkflow.data.text.prepare import open_corpus
from qkflow.data.text.resolve import NAMES
from qkflow.data.text.tokenizers import ByteTokenizer, Tokenizer, WordTokenizer, load_tokenizer, save_tokenizer

__all__ = [
    "CELL",
    "MQAR",
    "NAMES",
    "TASKS",
    "ByteTokenizer",
    "Corpus",
    "CorpusConfig",
    "Instances",
    "Lesson",
    "Needle",
    "Split",
    "Tokenizer",
    "Window",
    "WordTokenizer",
    "batch",
    "epoch_windows",
    "from_spec",
    "is_task",
    "lesson",
    "load_tokenizer",
    "mqar",
    "needles",
    "open_corpus",
    "save_tokenizer",
    "scored",
    "windows",
]
