"""Couplings for models that exist: put in front of their scores, taken out again, saved and loaded with them."""

from qkflow.hf.retrofit.fit import retrofit, retrofitted, unfit
from qkflow.hf.retrofit.record import Retrofit
from qkflow.hf.retrofit.saved import load_retrofitted

__all__ = ["Retrofit", "load_retrofitted", "retrofit", "retrofitted", "unfit"]
