"""Mechanisms: the modules in which tokens attend to each other, one family per file."""

from qkflow.mechanisms.base import Circuits, Cost, Factory, Mechanism, ParamOptions, projection
from qkflow.mechanisms.coupled import CoupledAttention, CoupledConfig
from qkflow.mechanisms.coupling import Coupling, CouplingConfig
from qkflow.mechanisms.delta_family import (
    Comba,
    CombaConfig,
    DeltaNet,
    DeltaNetConfig,
    EDAConfig,
    EraseThenDelta,
    GatedDeltaNet,
    GatedDeltaNetConfig,
    KDAConfig,
    KimiDeltaAttention,
    QDelta,
    QDeltaConfig,
)
from qkflow.mechanisms.delta_rule import DeltaInputs, DeltaMechanism
from qkflow.mechanisms.differential import DifferentialAttention, DifferentialConfig
from qkflow.mechanisms.kuramoto import GroupAttention, GroupConfig, KuramotoAttention, KuramotoConfig
from qkflow.mechanisms.nonlinear_query import NonlinearQueryAttention, NonlinearQueryConfig
from qkflow.mechanisms.registry import mechanism, mechanisms, register
from qkflow.mechanisms.softmax import StandardAttention, StandardConfig

__all__ = [
    "Circuits",
    "Comba",
    "CombaConfig",
    "Cost",
    "CoupledAttention",
    "CoupledConfig",
    "Coupling",
    "CouplingConfig",
    "DeltaInputs",
    "DeltaMechanism",
    "DeltaNet",
    "DeltaNetConfig",
    "DifferentialAttention",
    "DifferentialConfig",
    "EDAConfig",
    "EraseThenDelta",
    "Factory",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "GroupAttention",
    "GroupConfig",
    "KDAConfig",
    "KimiDeltaAttention",
    "KuramotoAttention",
    "KuramotoConfig",
    "Mechanism",
    "NonlinearQueryAttention",
    "NonlinearQueryConfig",
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
