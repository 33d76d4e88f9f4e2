"""Looking into a trained model without changing it."""

from qkflow.probes.energy import CouplingLook, EnergyWatch, Moment, energies
from qkflow.probes.maps import Look, look, maps
from qkflow.probes.phases import Pair, PhaseLook, PhaseSummary, phases
from qkflow.probes.stability import Growth, Spread, StabilityLook, stability, stability_of
from qkflow.probes.transitions import WorstCase, safe_alpha, safe_lambda, worst_case

__all__ = [
    "CouplingLook",
    "EnergyWatch",
    "Growth",
    "Look",
    "Moment",
    "Pair",
    "PhaseLook",
    "PhaseSummary",
    "Spread",
    "StabilityLook",
    "WorstCase",
    "energies",
    "look",
    "maps",
    "phases",
    "safe_alpha",
    "safe_lambda",
    "stability",
    "stability_of",
    "worst_case",
]
