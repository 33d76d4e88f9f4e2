"""The QK and OV circuits of attention, each with its own learning rate: QK decides where to attend, OV what to pass on.

>>> import torch
>>> model = torch.nn.TransformerEncoderLayer(16, 4, dim_feedforward=32)
>>> optimizer = torch.optim.AdamW(circuit_groups(model, lr=1e-3, r=20.0))
>>> [(group["circuit"], group["lr"]) for group in optimizer.param_groups]
[('qk', 0.02), ('ov', 0.001), ('rest', 0.001)]
"""

from qkflow.circuits.find import ModelCircuits, find_circuits
from qkflow.circuits.groups import circuit_groups, circuits_by_name, split_fused
from qkflow.circuits.param_split import Circuit, ParamSlice
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
