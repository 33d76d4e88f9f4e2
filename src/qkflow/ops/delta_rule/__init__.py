"""The delta rule, the gated delta rule and Q-Delta."""

from qkflow.ops.delta_rule.dispatch import (
    BACKENDS,
    choose_backend,
    delta_rule,
    delta_rule_flops,
    triton_error,
    use_backend,
)
from qkflow.ops.delta_rule.inputs import MAX_KEY_WIDTH, DeltaInputs

__all__ = [
    "BACKENDS",
    "MAX_KEY_WIDTH",
    "DeltaInputs",
    "choose_backend",
    "delta_rule",
    "delta_rule_flops",
    "triton_error",
    "use_backend",
]
