"""Where others' layers make their queries and keys, and how to move the two between there and everything after.

| family                                               | parts                | order of what they give              |
|------------------------------------------------------|----------------------|--------------------------------------|
| Llama, Mistral, Qwen, Gemma, OLMo, Granite, Phi, ... | `q_proj`, `k_proj`   | heads of queries; fewer of keys      |
| GPT-2                                                | `c_attn`             | queries, keys, values                |
| Phi-3                                                | `qkv_proj`           | queries, then fewer keys and values  |
| GPT-NeoX                                             | `query_key_value`    | a query, a key, a value of each head |

What a layer makes of them afterwards is its own matter: norms, rotary positions, the cache, the scores.
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

Call = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The shape of a layer's queries and keys."""

    queries: int
    """Heads of queries."""
    keys: int
    """Heads of keys."""
    width: int
    """Numbers in a head."""


class Projections(ABC):
    """The parts of a layer that make its queries and keys."""

    parts: tuple[str, ...]
    """What the layer calls them."""

    @abstractmethod
    def heads(self, layer: nn.Module) -> Heads | None:
        """The layer's shape; None if its parts are not as expected."""

    @abstractmethod
    def moved(self, layer: nn.Module, coupling: Coupling) -> Mapping[str, Call]:
        """Stand-ins for the parts, good for one call of the layer: they give what the parts give, moved."""


@dataclass(frozen=True)
class Separate(Projections):
    """A matrix for the queries and one for the keys."""

    parts: tuple[str, ...] = ("q_proj", "k_proj")

    def heads(self, layer: nn.Module) -> Heads | None:
        """As many heads as fit into what each part gives."""
        width, (queries, keys) = _width(layer), (_outputs(layer, part) for part in self.parts)
        if not width or not queries or not keys or queries % width or keys % width:
            return None
        return Heads(queries=queries // width, keys=keys // width, width=width)

    def moved(self, layer: nn.Module, coupling: Coupling) -> Mapping[str, Call]:
        """Whichever part is called first makes both; the other one's share waits for its call."""
        query, key = (layer.get_submodule(part) for part in self.parts)
        seen: list[tuple[Tensor, Tensor, Tensor]] = []

        def pair(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            if not seen:
                q, k = (part(x).unflatten(-1, (-1, coupling.width)) for part in (query, key))
                q, k = _move(coupling, q, k)
                seen.append((x, q.flatten(-2), k.flatten(-2)))
            if seen[0][0] is not x:
                raise UsageError(
                    f"{type(layer).__name__} made queries and keys of different tokens: only the two of one token move"
                    " each other, so cross-attention cannot be coupled; leave that layer out (layers=[...])"
                )
            return seen[0]

        return dict(zip(self.parts, (lambda x: pair(x)[1], lambda x: pair(x)[2]), strict=True))


@dataclass(frozen=True)
class Fused(Projections):
    """One matrix for queries, keys and values."""

    parts: tuple[str, ...]
    order: Literal["blocks", "heads"]
    """All queries, all keys, all values; or the three of each head in turn."""

    def heads(self, layer: nn.Module) -> Heads | None:
        """As many queries as the config says, and as many keys as there is room for beside as many values."""
        width, rows = _width(layer), _outputs(layer, self.parts[0])
        queries = getattr(getattr(layer, "config", None), "num_attention_heads", None)
        if not width or not rows or not isinstance(queries, int):
            return None
        keys, rest = divmod(rows - queries * width, 2 * width)
        if rest or keys < 1 or (self.order == "heads" and keys != queries):
            return None
        return Heads(queries=queries, keys=keys, width=width)

    def moved(self, layer: nn.Module, coupling: Coupling) -> Mapping[str, Call]:
        """The part itself, and then its queries and keys moved in their places."""
        part, blocks = layer.get_submodule(self.parts[0]), self.order == "blocks"
        queries, keys, width = coupling.queries, coupling.keys, coupling.width

        def whole(x: Tensor) -> Tensor:
            y = part(x)
            if blocks:
                q, k, v = y.unflatten(-1, (-1, width)).split([queries, keys, keys], -2)
                q, k = _move(coupling, q, k)
                return torch.cat([q, k, v], -2).flatten(-2)
            q, k, v = y.unflatten(-1, (queries, 3, width)).unbind(-2)
            q, k = _move(coupling, q, k)
            return torch.stack([q, k, v], -2).flatten(-3)

        return {self.parts[0]: whole}


def _move(coupling: Coupling, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of any leading dimensions: a coupling takes two."""
    leading = q.shape[:-2]
    if len(leading) == 2:
        return coupling(q, k)
    q, k = coupling(q.reshape(1, -1, *q.shape[-2:]), k.reshape(1, -1, *k.shape[-2:]))
    return q.reshape(*leading, *q.shape[-2:]), k.reshape(*leading, *k.shape[-2:])


_SEPARATE = Separate()
FAMILIES: Mapping[str, Projections] = {
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
        _SEPARATE,
    ),
    "GPT2Attention": Fused(("c_attn",), "blocks"),
    "GPTNeoXAttention": Fused(("query_key_value",), "heads"),
    "Phi3Attention": Fused(("qkv_proj",), "blocks"),
}
"""The layers whose order of computing is known: their classes, and what makes their queries and keys."""


def find_layers(model: nn.Module) -> list[tuple[str, nn.Module, Projections, Heads]]:
    """The model's layers of self-attention, in order, with their names; a model without a known one is refused."""
    found = list(_known(model))
    if not found:
        raise UsageError(f"no layer of {type(model).__name__} can be coupled: looked for {_wanted()}; {_had(model)}")
    return found


def _known(model: nn.Module) -> Iterator[tuple[str, nn.Module, Projections, Heads]]:
    for name, module in model.named_modules():
        kind = next((FAMILIES[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in FAMILIES), None)
        if kind is None or getattr(module, "is_cross_attention", False):
            continue
        if (heads := kind.heads(module)) is not None:
            yield name, module, kind, heads


def _wanted() -> str:
    classes: dict[tuple[str, ...], list[str]] = {}
    for cls, kind in FAMILIES.items():
        classes.setdefault(kind.parts, []).append(cls)
    return ", ".join(f"{' and '.join(parts)} in {' or '.join(some)}" for parts, some in classes.items())


def _had(model: nn.Module) -> str:
    """What there is that attends, a line for each class of it."""
    kinds: dict[str, str] = {}
    for name, module in model.named_modules():
        if name and "attention" in type(module).__name__.lower():
            children = ", ".join(child for child, _ in module.named_children()) or "nothing"
            kinds.setdefault(type(module).__name__, f"{name}, a {type(module).__name__} of {children}")
    return f"it has {'; '.join(kinds.values())}" if kinds else "it has nothing that is called attention"


def _width(layer: nn.Module) -> int | None:
    """Numbers in a head, by whichever name the layer has for it."""
    for name in ("head_dim", "head_size"):
        if isinstance(width := getattr(layer, name, None), int):
            return width
    return None


def _outputs(layer: nn.Module, part: str) -> int | None:
    """How many numbers a part gives for a token: linear maps call it so, GPT-2's `nf`."""
    module = getattr(layer, part, None)
    for name in ("out_features", "nf"):
        if isinstance(count := getattr(module, name, None), int):
            return count
    return None
