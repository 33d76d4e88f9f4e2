r"""Put a coupling in front of the scores of a model that exists, and take it out again.

    x ──► q_proj ──► q ─┐              ┌─► q' ─► [norm] ─► rotate ─► scores
                        ├─► coupling ──┤
    x ──► k_proj ──► k ─┘              └─► k' ─► [norm] ─► rotate ─► cache ─► scores

The layer's class is exchanged for a subclass of it that computes as its base does, on a view of the layer in which the
projections give what the coupling has made of them. Nothing is kept between calls, so that recomputing (gradient
checkpointing), compiling, threads and sharding see an ordinary layer; names of parameters stay as they are, and those
of the coupling are `<layer>.coupling.*`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import nn

from qkflow.errors import UsageError
from qkflow.hf.retrofit.projections import Projections, find_layers
from qkflow.hf.retrofit.record import KEY, Retrofit, resting, write_record
from qkflow.mechanisms.coupling import Coupling, CouplingConfig

Model = TypeVar("Model", bound=nn.Module)


def retrofit(model: Model, coupling: CouplingConfig | str = "affine", *, layers: Sequence[int] | None = None) -> Model:
    """Put a coupling into the layers of a model, in place; its outputs stay the same to the bit until it is trained.

    `coupling` is named by its dynamics, or a config that begins as the identity; `layers` are counted from 0, all of
    them unless given. Make the optimiser afterwards, for example with `circuit_groups`, to which couplings are QK.
    `model.save_pretrained` saves the coupling too, and `load_retrofitted` reads it back: `from_pretrained` would leave
    it out, with a warning about unexpected keys.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=8)).eval()
    >>> before = model(torch.tensor([[1, 2, 3]])).last_hidden_state
    >>> after = retrofit(model)(torch.tensor([[1, 2, 3]])).last_hidden_state
    >>> bool((before == after).all()), retrofitted(model), retrofitted(unfit(model))
    (True, True, False)
    """
    config = getattr(model, "config", None)
    if retrofitted(model):
        raise UsageError(f"{type(model).__name__} has a coupling already: take it out with unfit(model) first")
    if config is None:
        raise UsageError(f"{type(model).__name__} has no config: give a whole model of transformers, not a part of it")
    if getattr(config, KEY, None) is not None:
        raise UsageError(
            f"the config of {type(model).__name__} says that it has a coupling, but its layers have none: load its"
            f" folder with load_retrofitted, or delete model.config.{KEY} to begin anew"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(f"{type(model).__name__} has no weights yet (device meta): retrofit it when they are loaded")
    record = fit(model, resting(coupling), layers)
    setattr(config, KEY, write_record(record))
    return model


def unfit(model: Model) -> Model:
    """Take the coupling out, in place: what is left is the model's own, as it was or as it has been trained since."""
    if not retrofitted(model):
        raise UsageError(f"{type(model).__name__} has no coupling to take out: retrofit(model) puts one in")
    for module in model.modules():
        if isinstance(module, _Fitted):
            del module.coupling
            object.__setattr__(module, "__class__", type(module).base)
    config = cast(Any, model).config
    if hasattr(config, KEY):
        delattr(config, KEY)
    return model


def retrofitted(model: nn.Module) -> bool:
    """Whether a layer of the model has a coupling that `retrofit` put in."""
    return any(isinstance(module, _Fitted) for module in model.modules())


def fit(model: nn.Module, coupling: CouplingConfig, layers: Sequence[int] | None) -> Retrofit:
    """Couple the layers, and say which they are."""
    found = find_layers(model)
    chosen = tuple(range(len(found))) if layers is None else tuple(sorted(set(layers)))
    if not chosen or not 0 <= chosen[0] <= chosen[-1] < len(found):
        raise UsageError(
            f"layers {list(layers or ())} of {type(model).__name__}: give some of its {len(found)}, from 0 to"
            f" {len(found) - 1}"
        )
    made = []
    for name, layer, kind, heads in (found[i] for i in chosen):
        if "forward" in vars(layer):
            raise UsageError(
                f"{name} has a forward that is not of its class ({type(layer).__name__}), which would pass the coupling"
                " by: retrofit the model before it is dispatched or wrapped"
            )
        if hasattr(layer, "coupling"):
            raise UsageError(f"{name} has something that is called coupling already: rename that")
        made.append((layer, kind, _placed(coupling(heads.queries, heads.keys, heads.width), layer, kind)))
    for layer, kind, part in made:  # all or none: nothing was refused
        layer.coupling = part
        object.__setattr__(layer, "__class__", _fitted(type(layer), kind))
    return Retrofit(coupling=coupling, layers=chosen)


def _placed(coupling: Coupling, layer: nn.Module, kind: Projections) -> Coupling:
    """In the precision and on the device of the layer's projections, training if they are."""
    weight = next(layer.get_submodule(kind.parts[0]).parameters())
    precise = weight.dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return coupling.to(weight.device, weight.dtype if precise else None).train(layer.training)


class _Fitted(nn.Module):
    """What coupled layers have besides their own class."""

    base: ClassVar[type[nn.Module]]
    kind: ClassVar[Projections]
    coupling: Coupling

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        moved = type(self).kind.moved(self, self.coupling)
        return type(self).base.forward(cast(nn.Module, _View(self, moved)), *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:  # a class made at run time cannot be pickled by name
        _, _, *state = super().__reduce_ex__(protocol)
        return (_blank, (type(self).base, type(self).kind), *state)


class _View:
    """A layer in which some parts are others."""

    def __init__(self, layer: nn.Module, parts: Any) -> None:
        self._layer = layer
        self.__dict__.update(parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


@cache
def _fitted(base: type[nn.Module], kind: Projections) -> type[nn.Module]:
    """The subclass of a layer's class that is coupled; named as its base, which others go by."""
    named = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (_Fitted, base), {**named, "base": base, "kind": kind})


def _blank(base: type[nn.Module], kind: Projections) -> nn.Module:
    made = _fitted(base, kind)
    return made.__new__(made)
