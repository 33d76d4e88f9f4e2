"""Where attention layers of transformers compute their queries and keys, and how to couple the two there.

| family                                               | projections        | layout of their output                |
|------------------------------------------------------|--------------------|---------------------------------------|
| Llama, Mistral, Qwen, Gemma, OLMo, Granite, Phi, ... | `q_proj`, `k_proj` | query heads; fewer key heads          |
| GPT-2                                                | `c_attn`           | queries, keys, values                 |
| Phi-3                                                | `qkv_proj`         | queries, fewer keys, fewer values     |
| GPT-NeoX                                             | `query_key_value`  | query, key and value of head 0, 1 ... |

Everything after the projections (norms, rotary positions, cache, scores) is left to the layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from qkflow.errors import UsageError
from qkflow.mechanisms.coupling import Coupling

Projection = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class QKHeads:
    """The numbers of query and key heads of a layer."""

    queries: int
    keys: int
    width: int
    """Dimension of one head."""


class Projections(ABC):
    """The submodules of a layer that compute its queries and keys."""

    names: tuple[str, ...]

    @abstractmethod
    def heads(self, layer: nn.Module) -> QKHeads | None:
        """The heads of the layer; None if its submodules are not as expected."""

    @abstractmethod
    def coupled(self, layer: nn.Module, coupling: Coupling) -> Mapping[str, Projection]:
        """Replacements for the submodules, for one call of the layer, whose queries and keys are coupled."""


@dataclass(frozen=True)
class SeparateProjections(Projections):
    """One matrix for the queries and one for the keys."""

    names: tuple[str, ...] = ("q_proj", "k_proj")

    def heads(self, layer: nn.Module) -> QKHeads | None:
        """Divide the output of each projection by the head dimension."""
        width, (queries, keys) = _head_width(layer), (_output_size(layer, name) for name in self.names)
        if not width or not queries or not keys or queries % width or keys % width:
            return None
        return QKHeads(queries=queries // width, keys=keys // width, width=width)

    def coupled(self, layer: nn.Module, coupling: Coupling) -> Mapping[str, Projection]:
        """The projection that is called first computes both; the second call returns the rest."""
        query, key = (layer.get_submodule(name) for name in self.names)
        computed: list[tuple[Tensor, Tensor, Tensor]] = []

        def both(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            if not computed:
                q, k = (projection(x).unflatten(-1, (-1, coupling.width)) for projection in (query, key))
                q, k = _couple(coupling, q, k)
                computed.append((x, q.flatten(-2), k.flatten(-2)))
            if computed[0][0] is not x:
                raise UsageError(
                    f"{type(layer).__name__} computes queries and keys from different inputs: cross-attention cannot be"
                    " coupled; leave that layer out (layers=[...])"
                )
            return computed[0]

        return dict(zip(self.names, (lambda x: both(x)[1], lambda x: both(x)[2]), strict=True))


@dataclass(frozen=True)
class FusedProjections(Projections):
    """One matrix for queries, keys and values."""

    names: tuple[str, ...]
    order: Literal["blocks", "heads"]
    """All queries, all keys, all values; or the query, key and value of each head in turn."""

    def heads(self, layer: nn.Module) -> QKHeads | None:
        """Take the query heads from the layer's config; keys and values share the rest."""
        width, size = _head_width(layer), _output_size(layer, self.names[0])
        queries = getattr(getattr(layer, "config", None), "num_attention_heads", None)
        if not width or not size or not isinstance(queries, int):
            return None
        keys, rest = divmod(size - queries * width, 2 * width)
        if rest or keys < 1 or (self.order == "heads" and keys != queries):
            return None
        return QKHeads(queries=queries, keys=keys, width=width)

    def coupled(self, layer: nn.Module, coupling: Coupling) -> Mapping[str, Projection]:
        """Call the projection and replace the queries and keys in its output."""
        projection, is_blocks = layer.get_submodule(self.names[0]), self.order == "blocks"
        queries, keys, width = coupling.queries, coupling.keys, coupling.width

        def project(x: Tensor) -> Tensor:
            y = projection(x)
            if is_blocks:
                q, k, v = y.unflatten(-1, (-1, width)).split([queries, keys, keys], -2)
                q, k = _couple(coupling, q, k)
                return torch.cat([q, k, v], -2).flatten(-2)
            q, k, v = y.unflatten(-1, (queries, 3, width)).unbind(-2)
            q, k = _couple(coupling, q, k)
            return torch.stack([q, k, v], -2).flatten(-3)

        return {self.names[0]: project}


def _couple(coupling: Coupling, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the coupling, which takes two leading dimensions, to any number of them."""
    leading = q.shape[:-2]
    if len(leading) == 2:
        return coupling(q, k)
    q, k = coupling(q.reshape(1, -1, *q.shape[-2:]), k.reshape(1, -1, *k.shape[-2:]))
    return q.reshape(*leading, *q.shape[-2:]), k.reshape(*leading, *k.shape[-2:])


LAYER_CLASSES: Mapping[str, Projections] = {
    **dict.fromkeys(
        (
            "LlamaAttention",
            "MistralAttention",
            "MixtralAttention",
            "Qwen2Attention",
            "Qwen2MoeAttention",
            "Qwen3Attention",
            "Qwen3MoeAttention",
            "GemmaAttention",
            "Gemma2Attention",
            "Gemma3Attention",
            "GraniteAttention",
            "OlmoAttention",
            "Olmo2Attention",
            "Olmo3Attention",
            "PhiAttention",
            "SmolLM3Attention",
            "StableLmAttention",
            "Starcoder2Attention",
        ),
        SeparateProjections(),
    ),
    "GPT2Attention": FusedProjections(("c_attn",), "blocks"),
    "GPTNeoXAttention": FusedProjections(("query_key_value",), "heads"),
    "Phi3Attention": FusedProjections(("qkv_proj",), "blocks"),
}
"""The supported layer classes and their projections."""

FoundLayer = tuple[str, nn.Module, Projections, QKHeads]


def find_layers(model: nn.Module) -> list[FoundLayer]:
    """The supported self-attention layers of a model, in order, with their names. Raises `UsageError` without any."""
    layers = list(_supported_layers(model))
    if not layers:
        supported: dict[tuple[str, ...], list[str]] = {}
        for layer_class, projections in LAYER_CLASSES.items():
            supported.setdefault(projections.names, []).append(layer_class)
        expected = ", ".join(f"{' and '.join(names)} in {' or '.join(found)}" for names, found in supported.items())
        raise UsageError(
            f"no layer of {type(model).__name__} can be coupled: expected {expected}; {_attention_modules(model)}"
        )
    return layers


def _supported_layers(model: nn.Module) -> Iterator[FoundLayer]:
    for name, module in model.named_modules():
        class_names = (cls.__name__ for cls in type(module).__mro__)
        projections = next((LAYER_CLASSES[cls] for cls in class_names if cls in LAYER_CLASSES), None)
        if projections is None or getattr(module, "is_cross_attention", False):
            continue
        if (heads := projections.heads(module)) is not None:
            yield name, module, projections, heads


def _attention_modules(model: nn.Module) -> str:
    """Describe one module of each class whose name contains attention."""
    modules: dict[str, str] = {}
    for name, module in model.named_modules():
        class_name = type(module).__name__
        if name and "attention" in class_name.lower():
            children = ", ".join(child for child, _ in module.named_children()) or "no submodules"
            modules.setdefault(class_name, f"{name} ({class_name} with {children})")
    return f"the model has {'; '.join(modules.values())}" if modules else "the model has no module called attention"


def _head_width(layer: nn.Module) -> int | None:
    return _first_int(layer, ("head_dim", "head_size"))


def _output_size(layer: nn.Module, name: str) -> int | None:
    return _first_int(getattr(layer, name, None), ("out_features", "nf"))  # nf: GPT-2's Conv1D


def _first_int(module: nn.Module | None, attributes: tuple[str, ...]) -> int | None:
    values = (getattr(module, attribute, None) for attribute in attributes)
    return next((value for value in values if isinstance(value, int)), None)
