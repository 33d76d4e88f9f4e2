"""When small operators, such as norms, may call a C kernel directly.

torch.compile fuses their PyTorch form itself, so compiled graphs keep it. Forward-mode derivatives, `torch.func`,
dispatch modes (which may hold tensors without data), tensor subclasses and autocast need PyTorch operators as well.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from qkflow.ops.csrc import build

_SINGLE_THREAD = 1 << 15
"""Number of elements up to which one thread is faster."""


def has_kernels(x: Tensor, *others: Tensor) -> bool:
    """Whether C kernels can compute on these tensors, which must have one dtype.

    >>> has_kernels(torch.zeros(2, dtype=torch.int64))
    False
    """
    return (
        not torch.compiler.is_compiling()
        and build.supports(x)
        and all(other.dtype == x.dtype and other.device == x.device for other in others)
        and all(type(tensor) in (Tensor, nn.Parameter) for tensor in (x, *others))
        and not torch.is_autocast_enabled("cpu")
        and not is_in_torch_dispatch_mode()
        and not is_transformed()
    )


def is_transformed() -> bool:
    """Whether forward-mode derivatives or a transform of `torch.func` are active."""
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def n_threads(x: Tensor) -> int:
    """The number of threads for one pass over a tensor."""
    return 1 if x.numel() <= _SINGLE_THREAD else torch.get_num_threads()
