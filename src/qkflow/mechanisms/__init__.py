"""Mechanisms: the modules in which tokens see each other, one a file."""

from qkflow.mechanisms.base import Circuits, Cost, Diagnostic, Factory, Mechanism, ParamOptions, projection
from qkflow.mechanisms.coupled import CoupledAttention, CoupledConfig
from qkflow.mechanisms.coupling import Coupling, CouplingConfig
from qkflow.mechanisms.delta import (
    DeltaInputs,
    DeltaMechanism,
    DeltaNet,
    DeltaNetConfig,
    GatedDeltaNet,
    GatedDeltaNetConfig,
    QDelta,
    QDeltaConfig,
)
from qkflow.mechanisms.differential import DifferentialAttention, DifferentialConfig
from qkflow.mechanisms.kuramoto import GroupAttention, GroupConfig, KuramotoAttention, KuramotoConfig
from qkflow.mechanisms.registry import mechanism, mechanisms, register
from qkflow.mechanisms.standard import StandardAttention, StandardConfig

__all__ = [
    "Circuits",
    "Cost",
    "CoupledAttention",
    "CoupledConfig",
    "Coupling",
    "CouplingConfig",
    "DeltaInputs",
    "DeltaMechanism",
    "DeltaNet",
    "DeltaNetConfig",
    "Diagnostic",
    "DifferentialAttention",
    "DifferentialConfig",
    "Factory",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "GroupAttention",
    "GroupConfig",
    "KuramotoAttention",
    "KuramotoConfig",
    "Mechanism",
    "ParamOptions",
    "QDelta",
    "QDeltaConfig",
    "StandardAttention",
    "StandardConfig",
    "mechanism",
    "mechanisms",
    "projection",
    "register",
]
