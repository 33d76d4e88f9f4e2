"""Attention whose queries and keys move: mechanisms, the laws they obey, and a laboratory to judge them in.

>>> import torch
>>> from qkflow import StandardAttention
>>> layer = StandardAttention(width=64, heads=4)
>>> y, state = layer(torch.randn(2, 10, 64))
>>> y.shape
torch.Size([2, 10, 64])
"""

from qkflow.data import Corpus, CorpusConfig, Split, open_corpus
from qkflow.errors import (
    BusyError,
    CheckpointError,
    DiskError,
    DivergenceError,
    Interrupted,
    UsageError,
)
from qkflow.laws import LAWS, Verdict, check
from qkflow.layout import Layout
from qkflow.mechanisms import (
    Circuits,
    Cost,
    CoupledAttention,
    CoupledConfig,
    Coupling,
    CouplingConfig,
    DeltaNet,
    DeltaNetConfig,
    DifferentialAttention,
    DifferentialConfig,
    Factory,
    GatedDeltaNet,
    GatedDeltaNetConfig,
    GroupAttention,
    GroupConfig,
    KuramotoAttention,
    KuramotoConfig,
    Mechanism,
    QDelta,
    QDeltaConfig,
    StandardAttention,
    StandardConfig,
    mechanism,
    mechanisms,
    register,
)
from qkflow.models import SIZES, Decoder, DecoderConfig, DecoderState, Sampling, generate, matched, size, stream
from qkflow.state import Cache, Delayed, Memory, State
from qkflow.training import Callback, Evaluation, TrainConfig, evaluate, load_run, train

__all__ = [
    "LAWS",
    "SIZES",
    "BusyError",
    "Cache",
    "Callback",
    "CheckpointError",
    "Circuits",
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
    "Delayed",
    "DeltaNet",
    "DeltaNetConfig",
    "DifferentialAttention",
    "DifferentialConfig",
    "DiskError",
    "DivergenceError",
    "Evaluation",
    "Factory",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "GroupAttention",
    "GroupConfig",
    "Interrupted",
    "KuramotoAttention",
    "KuramotoConfig",
    "Layout",
    "Mechanism",
    "Memory",
    "QDelta",
    "QDeltaConfig",
    "Sampling",
    "Split",
    "StandardAttention",
    "StandardConfig",
    "State",
    "TrainConfig",
    "UsageError",
    "Verdict",
    "check",
    "evaluate",
    "generate",
    "load_run",
    "matched",
    "mechanism",
    "mechanisms",
    "open_corpus",
    "register",
    "size",
    "stream",
    "train",
]
