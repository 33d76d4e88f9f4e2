"""Where a number stopped being finite: the first module of a forward pass, or the first gradient of the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from qkflow.errors import NotFiniteError
from qkflow.training.parallel import local


def first_bad_module(model: nn.Module, forward: Callable[[], object]) -> str | None:
    """Run `forward` and name the module of `model` that was the first to return something not finite.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU())
    >>> _ = nn.init.constant_(model[1].weight, float("nan"))
    >>> first_bad_module(model, lambda: model(torch.ones(1, 2)))
    '1'
    """
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found and not all(_finite(tensor) for tensor in _tensors(output)):
                found.append(name)

        return hook

    # A module returns after the modules inside it, so the first to report is also the innermost.
    handles = [module.register_forward_hook(watch(name or "model")) for name, module in model.named_modules()]
    try:
        with torch.no_grad(), suppress(NotFiniteError):  # by then it has been seen
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def first_bad_gradient(model: nn.Module) -> str | None:
    """The parameter whose gradient went first on the way back from the loss: the last bad one in the model's order."""
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not _finite(p.grad)]
    return bad[-1] if bad else None


def first_bad_parameter(model: nn.Module) -> str | None:
    """The first parameter that is itself not finite.

    >>> first_bad_parameter(nn.Linear(2, 2)) is None
    True
    """
    return next((name for name, parameter in model.named_parameters() if not _finite(parameter)), None)


def _finite(tensor: Tensor) -> bool:
    tensor = local(tensor)
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a module's output; a carried state beside it is not looked into."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
