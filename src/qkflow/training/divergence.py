"""Find the first non-finite value: of a module's output in the forward pass, or of a gradient in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from qkflow.errors import NotFiniteError
from qkflow.training.parallel import local


def first_bad_module(model: nn.Module, forward: Callable[[], object]) -> str | None:
    """Run `forward` and return the name of the first module of `model` with a non-finite output.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU())
    >>> _ = nn.init.constant_(model[1].weight, float("nan"))
    >>> first_bad_module(model, lambda: model(torch.ones(1, 2)))
    '1'
    """
    bad: list[str] = []

    def make_hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not bad and not all(_is_finite(tensor) for tensor in _tensors(output)):
                bad.append(name)

        return hook

    # A module returns after the modules inside it, so the first to report is also the innermost.
    handles = [module.register_forward_hook(make_hook(name or "model")) for name, module in model.named_modules()]
    try:
        with torch.no_grad(), suppress(NotFiniteError):  # the hooks have seen it by then
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return bad[0] if bad else None


def first_bad_gradient(model: nn.Module) -> str | None:
    """The parameter whose gradient was the first non-finite one in the backward pass: the last one in model order."""
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not _is_finite(p.grad)]
    return bad[-1] if bad else None


def first_bad_parameter(model: nn.Module) -> str | None:
    """The first parameter with non-finite values.

    >>> first_bad_parameter(nn.Linear(2, 2)) is None
    True
    """
    return next((name for name, parameter in model.named_parameters() if not _is_finite(parameter)), None)


def _is_finite(tensor: Tensor) -> bool:
    tensor = local(tensor)
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a module's output; a state next to it is ignored."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
