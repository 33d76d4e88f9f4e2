"""Data: text corpora and recall tasks as memory-mapped tokens, training batches and evaluation windows."""

from qkflow.data.recall import MQAR, RECALL_TASKS, Instances, Needle, is_recall_task, parse_recall_spec
from qkflow.data.text.batches import Batch, Window, epoch_windows, get_batch, scored, windows
from qkflow.data.text.config import CorpusConfig
from qkflow.data.text.corpus import CELL_DTYPE, Corpus, Split
from qkflow.data.text.prepare import open_corpus
from qkflow.data.text.resolve import CORPUS_NAMES
from qkflow.data.text.tokenizers import ByteTokenizer, Tokenizer, WordTokenizer, load_tokenizer, save_tokenizer

__all__ = [
    "CELL_DTYPE",
    "CORPUS_NAMES",
    "MQAR",
    "RECALL_TASKS",
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
    "get_batch",
    "is_recall_task",
    "load_tokenizer",
    "open_corpus",
    "parse_recall_spec",
    "save_tokenizer",
    "scored",
    "windows",
]
