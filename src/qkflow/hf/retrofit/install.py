r"""Install a coupling between the projections and the scores of an existing model, and remove it again.

    x ──► q_proj ──► q ─┐              ┌─► q' ─► [norm] ─► rotary ─► scores
                        ├─► coupling ──┤
    x ──► k_proj ──► k ─┘              └─► k' ─► [norm] ─► rotary ─► cache ─► scores

The class of each attention layer is replaced by a subclass. Its forward calls the original forward on a view of the
layer in which the projections return coupled queries and keys. No state is kept between calls, so gradient
checkpointing, compilation, threads and sharding see an ordinary layer. Parameter names do not change; those of the
coupling are `<layer>.coupling.*`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import nn

from qkflow.config import from_dict, to_dict
from qkflow.errors import UsageError, unknown
from qkflow.hf.retrofit.projections import Projections, find_layers
from qkflow.mechanisms.coupling import DYNAMICS, Coupling, CouplingConfig

Model = TypeVar("Model", bound=nn.Module)

CONFIG_KEY = "qkflow_retrofit"
"""The key of config.json that holds the `RetrofitConfig`."""


@dataclass(frozen=True, kw_only=True)
class RetrofitConfig:
    """A coupling and the layers that have it.

    >>> RetrofitConfig(coupling=CouplingConfig(dynamics="affine"), layers=(0, 2)).layers
    (0, 2)
    """

    coupling: CouplingConfig
    layers: tuple[int, ...]
    """Indices of the attention layers, from 0."""

    @classmethod
    def from_json(cls, data: Any) -> RetrofitConfig:
        """Read the value of `CONFIG_KEY`. Raises `UsageError` if it is not a retrofit config."""
        if not isinstance(data, Mapping):
            raise UsageError(f"{CONFIG_KEY} in config.json is {data!r}: expected an object with coupling and layers")
        return from_dict(cls, data, where=f" in {CONFIG_KEY!r}")


def retrofit(model: Model, coupling: CouplingConfig | str = "affine", *, layers: Sequence[int] | None = None) -> Model:
    """Install a coupling in the attention layers of a model, in place. Until it is trained, no output changes.

    `coupling` is the name of its dynamics, or a config that starts as the identity. `layers` are indices from 0; the
    default is all of them. Create the optimizer afterwards, for example with `circuit_groups`, which assigns couplings
    to the QK circuit. `model.save_pretrained` saves the coupling as well. Load it with `load_retrofitted`:
    `from_pretrained` ignores it, with a warning about unexpected keys.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=8)).eval()
    >>> before = model(torch.tensor([[1, 2, 3]])).last_hidden_state
    >>> after = retrofit(model)(torch.tensor([[1, 2, 3]])).last_hidden_state
    >>> bool((before == after).all()), is_retrofitted(model), is_retrofitted(remove_retrofit(model))
    (True, True, False)
    """
    name, config = type(model).__name__, getattr(model, "config", None)
    if is_retrofitted(model):
        raise UsageError(f"{name} already has a coupling: remove it with remove_retrofit(model) first")
    if config is None:
        raise UsageError(f"{name} has no config: give a complete transformers model, not a submodule")
    if getattr(config, CONFIG_KEY, None) is not None:
        raise UsageError(
            f"the config of {name} has a coupling, but its layers have none: load its folder with load_retrofitted, or"
            f" delete model.config.{CONFIG_KEY} to start again"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(f"the weights of {name} are on the meta device: load them before retrofit(model)")
    setattr(config, CONFIG_KEY, to_dict(install_coupling(model, _identity_coupling(coupling), layers)))
    return model


def remove_retrofit(model: Model) -> Model:
    """Remove the coupling, in place. The model's own weights stay as they are."""
    if not is_retrofitted(model):
        raise UsageError(f"{type(model).__name__} has no coupling to remove: retrofit(model) installs one")
    for module in model.modules():
        if isinstance(module, _CoupledLayer):
            del module.coupling
            object.__setattr__(module, "__class__", type(module).base)
    config = cast(Any, model).config
    if hasattr(config, CONFIG_KEY):
        delattr(config, CONFIG_KEY)
    return model


def is_retrofitted(model: nn.Module) -> bool:
    """Whether a layer of the model has a coupling installed by `retrofit`."""
    return any(isinstance(module, _CoupledLayer) for module in model.modules())


def _identity_coupling(coupling: CouplingConfig | str) -> CouplingConfig:
    """The config of a coupling that starts as the identity and can be trained; else a `UsageError`."""
    if isinstance(coupling, str):
        if coupling not in DYNAMICS:
            raise unknown("coupling", coupling, DYNAMICS)
        drifts = coupling in ("hamiltonian", "euler")
        coupling = from_dict(CouplingConfig, {"dynamics": coupling, **({"dt": 0.0} if drifts else {})})
    if coupling.dynamics in ("hamiltonian", "euler") and coupling.dt != 0:
        raise UsageError(
            f"{coupling.dynamics} dynamics with dt={coupling.dt:g} would change the untrained model: give dt=0.0, which"
            " is learned from there, or affine dynamics"
        )
    if coupling.dynamics == "uncoupled" and coupling.dt == 0:
        raise UsageError("uncoupled dynamics with dt=0 have no gradient: give another dt, such as 0.1")
    if coupling.sharing == "layers":
        raise UsageError("networks shared by all layers cannot be saved with the model: give sharing='heads'")
    return coupling


def install_coupling(model: nn.Module, coupling: CouplingConfig, layers: Sequence[int] | None) -> RetrofitConfig:
    """Install a coupling in the given layers, in all or in none. Returns which layers they are."""
    all_layers = find_layers(model)
    indices = tuple(range(len(all_layers))) if layers is None else tuple(sorted(set(layers)))
    if not indices or not 0 <= indices[0] <= indices[-1] < len(all_layers):
        raise UsageError(
            f"layers {list(layers or ())} of {type(model).__name__}: expected some of its {len(all_layers)} attention"
            f" layers, from 0 to {len(all_layers) - 1}"
        )
    couplings = []
    for name, layer, projections, heads in (all_layers[index] for index in indices):
        if "forward" in vars(layer):
            raise UsageError(
                f"{name} has a forward that is not of its class ({type(layer).__name__}) and would skip the coupling:"
                " retrofit the model before it is dispatched or wrapped"
            )
        if hasattr(layer, "coupling"):
            raise UsageError(f"{name} already has an attribute called coupling: rename it")
        weight = next(layer.get_submodule(projections.names[0]).parameters())
        dtype = weight.dtype if weight.dtype in _DTYPES else None
        couplings.append(
            coupling(heads.queries, heads.keys, heads.width).to(weight.device, dtype).train(layer.training)
        )
    for index, module in zip(indices, couplings, strict=True):
        _, layer, projections, _ = all_layers[index]
        layer.coupling = module
        object.__setattr__(layer, "__class__", _coupled_class(type(layer), projections))
    return RetrofitConfig(coupling=coupling, layers=indices)


_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Precisions that a coupling can have; quantised projections get one in the default precision."""


class _CoupledLayer(nn.Module):
    """Mixed into the class of a layer with a coupling."""

    base: ClassVar[type[nn.Module]]
    projections: ClassVar[Projections]
    coupling: Coupling

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        coupled = type(self).projections.coupled(self, self.coupling)
        return type(self).base.forward(cast(nn.Module, _LayerView(self, coupled)), *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:  # a class made at run time cannot be pickled by name
        _, _, *state = super().__reduce_ex__(protocol)
        return (_new_coupled_layer, (type(self).base, type(self).projections), *state)


class _LayerView:
    """A layer with some submodules replaced."""

    def __init__(self, layer: nn.Module, replaced: Mapping[str, Any]) -> None:
        self._layer = layer
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


@cache
def _coupled_class(base: type[nn.Module], projections: Projections) -> type[nn.Module]:
    """The coupled subclass of a layer's class, under the same name, which other code may rely on."""
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (_CoupledLayer, base), {**names, "base": base, "projections": projections})


def _new_coupled_layer(base: type[nn.Module], projections: Projections) -> nn.Module:
    coupled = _coupled_class(base, projections)
    return coupled.__new__(coupled)
