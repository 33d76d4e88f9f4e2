"""Looking into a trained model without changing it."""

from qkflow.probes.energy import CouplingLook, EnergyWatch, Moment, energies
from qkflow.probes.maps import Look, look, maps

__all__ = ["CouplingLook", "EnergyWatch", "Look", "Moment", "energies", "look", "maps"]
