"""Looking into a trained model without changing it."""

from qkflow.probes.maps import Look, look, maps

__all__ = ["Look", "look", "maps"]
