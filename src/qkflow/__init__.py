"""Attention whose queries and keys move: mechanisms, the laws they obey, and a laboratory to judge them in.

>>> import torch
>>> from qkflow import StandardAttention
>>> layer = StandardAttention(width=64, heads=4)
>>> y, state = layer(torch.randn(2, 10, 64))
>>> y.shape
torch.Size([2, 10, 64])
"""

from typing import TYPE_CHECKING, Any

from qkflow.circuits import RatioSchedule, circuit_groups, circuit_lambdas, find_circuits, split_fused
from qkflow.data import Corpus, CorpusConfig, Split, open_corpus
from qkflow.errors import (
    BusyError,
    CheckpointError,
    DiskError,
    DivergenceError,
    Interrupted,
    UsageError,
)
from qkflow.judge import Judgement, judge
from qkflow.laws import LAWS, LawReport, check
from qkflow.layout import Layout
from qkflow.mechanisms import (
    Circuits,
    Comba,
    CombaConfig,
    Cost,
    CoupledAttention,
    CoupledConfig,
    Coupling,
    CouplingConfig,
    DeltaNet,
    DeltaNetConfig,
    DifferentialAttention,
    DifferentialConfig,
    EDAConfig,
    EraseThenDelta,
    Factory,
    GatedDeltaNet,
    GatedDeltaNetConfig,
    GroupAttention,
    GroupConfig,
    KDAConfig,
    KimiDeltaAttention,
    KuramotoAttention,
    KuramotoConfig,
    Mechanism,
    NonlinearQueryAttention,
    NonlinearQueryConfig,
    QDelta,
    QDeltaConfig,
    StandardAttention,
    StandardConfig,
    mechanism,
    mechanisms,
    register,
)
from qkflow.models import (
    SIZES,
    Classifier,
    ClassifierConfig,
    Decoder,
    DecoderConfig,
    DecoderState,
    EncoderLayer,
    Sampling,
    generate,
    matched,
    size,
    stream,
)
from qkflow.state import KVCache, RecurrentState, ShiftedKVCache, State
from qkflow.training import Callback, Evaluation, TrainConfig, evaluate, load_run, train

if TYPE_CHECKING:
    from qkflow.api import compare

__all__ = [
    "LAWS",
    "SIZES",
    "BusyError",
    "Callback",
    "CheckpointError",
    "Circuits",
    "Classifier",
    "ClassifierConfig",
    "Comba",
    "CombaConfig",
    "Corpus",
    "CorpusConfig",
    "Cost",
    "CoupledAttention",
    "CoupledConfig",
    "Coupling",
    "CouplingConfig",
    "Decoder",
    "DecoderConfig",
    "DecoderState",
    "DeltaNet",
    "DeltaNetConfig",
    "DifferentialAttention",
    "DifferentialConfig",
    "DiskError",
    "DivergenceError",
    "EDAConfig",
    "EncoderLayer",
    "EraseThenDelta",
    "Evaluation",
    "Factory",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "GroupAttention",
    "GroupConfig",
    "Interrupted",
    "Judgement",
    "KDAConfig",
    "KVCache",
    "KimiDeltaAttention",
    "KuramotoAttention",
    "KuramotoConfig",
    "LawReport",
    "Layout",
    "Mechanism",
    "NonlinearQueryAttention",
    "NonlinearQueryConfig",
    "QDelta",
    "QDeltaConfig",
    "RatioSchedule",
    "RecurrentState",
    "Sampling",
    "ShiftedKVCache",
    "Split",
    "StandardAttention",
    "StandardConfig",
    "State",
    "TrainConfig",
    "UsageError",
    "check",
    "circuit_groups",
    "circuit_lambdas",
    "compare",
    "evaluate",
    "find_circuits",
    "generate",
    "judge",
    "load_run",
    "matched",
    "mechanism",
    "mechanisms",
    "open_corpus",
    "register",
    "size",
    "split_fused",
    "stream",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import `compare` on first use: it needs the libraries of the reports."""
    if name == "compare":
        from qkflow.api import compare

        return compare
    raise AttributeError(f"module 'qkflow' has no attribute {name!r}")
