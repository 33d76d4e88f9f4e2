"""The two circuits of attention, each with a speed of its own: QK decides where to look, OV what to pass on.

>>> import torch
>>> model = torch.nn.TransformerEncoderLayer(16, 4, dim_feedforward=32)
>>> optimizer = torch.optim.AdamW(circuit_groups(model, lr=1e-3, r=20.0))
>>> [(group["circuit"], group["lr"]) for group in optimizer.param_groups]
[('qk', 0.02), ('ov', 0.001), ('rest', 0.001)]
"""

from qkflow.circuits.find import ModelCircuits, ParamSlice, find_circuits
from qkflow.circuits.fused import split_fused
from qkflow.circuits.groups import Circuit, circuit_groups, circuits_by_name
from qkflow.circuits.schedule import RatioSchedule, circuit_lambdas

__all__ = [
    "Circuit",
    "ModelCircuits",
    "ParamSlice",
    "RatioSchedule",
    "circuit_groups",
    "circuit_lambdas",
    "circuits_by_name",
    "find_circuits",
    "split_fused",
]
