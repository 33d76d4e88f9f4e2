"""When small operators, such as norms, may call a C kernel directly.

torch.compile fuses their PyTorch form itself, so compiled graphs keep it. Forward-mode derivatives, `torch.func`,
dispatch modes (which may hold tensors without data), tensor subclasses and autocast need PyTorch operators as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad
from torch.nn.modules import module as global_hooks
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


def has_hooks(module: nn.Module) -> bool:
    """Whether calling `module` does more than the `forward` of its class: hooks, or another `forward` on the instance.

    >>> has_hooks(nn.Linear(1, 1))
    False
    """
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or (not torch.compiler.is_compiling() and global_hooks._has_any_global_hook())
    )


def is_transformed() -> bool:
    """Whether forward-mode derivatives or a transform of `torch.func` are active."""
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def has_values(x: Tensor) -> bool:
    """Whether a check may read the elements of a tensor: not while tracing, in `torch.func`, or without data.

    >>> has_values(torch.zeros(2)), has_values(torch.zeros(2, device="meta"))
    (True, False)
    """
    return not (torch.compiler.is_compiling() or x.is_meta or is_transformed() or is_fake(x))


def differentiable_gradients(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    is_needed: Sequence[bool],
    grads: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """Gradients for a second derivative: `function` is the PyTorch form of a kernel, and `grads` those of its outputs.

    None for inputs that need no gradient, such as frozen weights.
    """
    inputs = [x.view_as(x) for x in inputs]
    pairs = [(y, grad) for y, grad in zip(function(*inputs), grads, strict=True) if y.requires_grad]
    wanted = [x for x, needed in zip(inputs, is_needed, strict=True) if needed]
    outputs, output_grads = zip(*pairs, strict=True)
    gradients = iter(torch.autograd.grad(outputs, wanted, output_grads, create_graph=True))
    return tuple(next(gradients) if needed else None for needed in is_needed)


def n_threads(x: Tensor) -> int:
    """The number of threads for one pass over a tensor."""
    return 1 if x.numel() <= _SINGLE_THREAD else torch.get_num_threads()
