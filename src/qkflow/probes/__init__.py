"""Probes: attention maps, diagnostics and faithfulness of trained models."""

from qkflow.probes.attention import (
    AttentionStats,
    LayerProbe,
    RationaleConfidence,
    attention_entropy,
    attention_maps,
    attention_stats,
    confidence,
    confidence_curve,
    effective_tokens,
    pool_maps,
    probe_layers,
    rationale_confidence,
    rationale_mass,
)
from qkflow.probes.coupling import CouplingRecorder, CouplingSnapshot, CouplingStats, coupling_stats
from qkflow.probes.diagnostics import Diagnostic, diagnostics
from qkflow.probes.faithfulness import DeletionScores, Faithfulness, evaluate_faithfulness
from qkflow.probes.memory import (
    MemoryStats,
    WorstCase,
    delta_rule_stats,
    memory_stats,
    safe_alpha,
    safe_lambda,
    worst_case,
)
from qkflow.probes.readers import Reader, ReaderOutput, reader
from qkflow.probes.synchrony import LayerPhases, PhaseStats, TokenPair, layer_phases

__all__ = [
    "AttentionStats",
    "CouplingRecorder",
    "CouplingSnapshot",
    "CouplingStats",
    "DeletionScores",
    "Diagnostic",
    "Faithfulness",
    "LayerPhases",
    "LayerProbe",
    "MemoryStats",
    "PhaseStats",
    "RationaleConfidence",
    "Reader",
    "ReaderOutput",
    "TokenPair",
    "WorstCase",
    "attention_entropy",
    "attention_maps",
    "attention_stats",
    "confidence",
    "confidence_curve",
    "coupling_stats",
    "delta_rule_stats",
    "diagnostics",
    "effective_tokens",
    "evaluate_faithfulness",
    "layer_phases",
    "memory_stats",
    "pool_maps",
    "probe_layers",
    "rationale_confidence",
    "rationale_mass",
    "reader",
    "safe_alpha",
    "safe_lambda",
    "worst_case",
]
