"""Couplings for existing models: install one, remove it, save and load it with the model."""

from qkflow.hf.retrofit.install import RetrofitConfig, is_retrofitted, remove_retrofit, retrofit
from qkflow.hf.retrofit.load import load_retrofitted

__all__ = ["RetrofitConfig", "is_retrofitted", "load_retrofitted", "remove_retrofit", "retrofit"]
