"""Looking into a trained model without changing it."""

from qkflow.probes.confidence import confidence, confidence_curve, effective_tokens, entropy, mass
from qkflow.probes.energy import CouplingLook, EnergyWatch, Moment, energies
from qkflow.probes.faithfulness import Faithfulness, Looked, examine
from qkflow.probes.maps import Look, look, maps
from qkflow.probes.phases import Pair, PhaseLook, PhaseSummary, phases
from qkflow.probes.pooling import pooled
from qkflow.probes.readers import Reader, Reading, reader
from qkflow.probes.stability import Growth, Spread, StabilityLook, stability, stability_of
from qkflow.probes.transitions import WorstCase, safe_alpha, safe_lambda, worst_case

__all__ = [
    "CouplingLook",
    "EnergyWatch",
    "Faithfulness",
    "Growth",
    "Look",
    "Looked",
    "Moment",
    "Pair",
    "PhaseLook",
    "PhaseSummary",
    "Reader",
    "Reading",
    "Spread",
    "StabilityLook",
    "WorstCase",
    "confidence",
    "confidence_curve",
    "effective_tokens",
    "energies",
    "entropy",
    "examine",
    "look",
    "maps",
    "mass",
    "phases",
    "pooled",
    "reader",
    "safe_alpha",
    "safe_lambda",
    "stability",
    "stability_of",
    "worst_case",
]
