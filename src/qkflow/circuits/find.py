"""Which parameters of a model decide where it looks (QK), and which what it passes on (OV).

| layers                                                    | QK                               | OV                    |
|-----------------------------------------------------------|----------------------------------|-----------------------|
| any with `circuits() -> Circuits`: all of qkflow's        | as it says                       | as it says            |
| `nn.MultiheadAttention`, also in torch's transformers     | q, k of `in_proj_*`, or `q_proj_weight`, `k_proj_weight`; `bias_k` | v, `v_proj_weight`, `bias_v`, `out_proj` |
| Llama, Mistral, Qwen, Gemma, OPT, BART, GPT-J, CLIP, ...  | `q_proj`, `k_proj`, their norms  | `v_proj`, `o_proj` or `out_proj` |
| BERT, RoBERTa, ELECTRA, ViT, DeBERTa                      | `query`, `key`                   | `value`, `output.dense` |
| T5, MPNet; DistilBERT; `wq wk wv wo`; `to_q to_k to_v to_out` | `q`, `k`, `relative_attention_bias` | `v`, `o`        |
| GPT-2, nanoGPT: fused `c_attn` [q, k, v]; `q_attn`, `c_attn` [k, v] across | its q and k     | its v, `c_proj`       |
| GPT-BigCode `c_attn`; GPT-NeoX, BLOOM, Persimmon `query_key_value`: q, k, v of each head in turn | q, k | v, `c_proj` or `dense` |
| Falcon `query_key_value`: queries, key, value of each group in turn | its q and k            | its v, `dense`        |
| Phi-3 `qkv_proj`, ModernBERT `Wqkv`: [q, k, v]            | its q and k                      | its v, `o_proj` or `Wo` |

Biases go with their matrices, key biases too, though no softmax sees them; a `coupling` that was fitted to one of these
layers is QK. Others' orders of fused matrices are not guessed: name them by hand.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from qkflow.circuits.architectures import Claim, by_names, of_attention
from qkflow.circuits.param_slice import ParamSlice
from qkflow.circuits.patterns import by_hand, folded
from qkflow.circuits.split import all_splits
from qkflow.errors import UsageError
from qkflow.mechanisms.base import Circuits

__all__ = ["ModelCircuits", "ParamSlice", "find_circuits"]


@dataclass(frozen=True, kw_only=True)
class ModelCircuits:
    """The circuits of a model."""

    qk: tuple[ParamSlice, ...]
    """Where to look."""
    ov: tuple[ParamSlice, ...]
    """What to pass on."""
    rest: tuple[str, ...]
    """Every other parameter; what slices leave of one is of the rest, too."""


def find_circuits(model: nn.Module, *, qk: Sequence[str] = (), ov: Sequence[str] = ()) -> ModelCircuits:
    """The circuits of a model, as its layers say or are known to have them; see the module's text for which are.

    What is named by hand is the whole circuit, whatever else would have been found for it: patterns on parameter names,
    with `name[dim:start:stop]` for a slice of a fused matrix.

    >>> found = find_circuits(nn.MultiheadAttention(4, 2, bias=False))
    >>> [(part.name, part.start, part.stop) for part in found.qk]
    [('in_proj_weight', 0, 4), ('in_proj_weight', 4, 8)]
    >>> [part.matrix or part.name for part in found.ov], found.rest
    (['value', 'out_proj.weight'], ())
    >>> find_circuits(nn.Linear(4, 6), qk=["weight[0:0:4]"]).rest
    ('bias',)
    """
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    known: dict[str, list[ParamSlice]] = {"qk": [], "ov": []}
    for circuit, part in _known(model):
        if circuit != "rest" and part.name in names:
            known[circuit].append(part)
    hand = {"qk": by_hand(model, qk), "ov": by_hand(model, ov)}
    parts = {circuit: _once(hand[circuit] or known[circuit], names) for circuit in known}
    for circuit, other in (("qk", "ov"), ("ov", "qk")):
        if hand[circuit] and not hand[other]:  # what is named by hand comes first
            named = _by_name(parts[circuit])
            parts[other] = [part for part in parts[other] if not _overlapping(part, named.get(part.name, ()))]
    _refuse_overlaps(parts["qk"], parts["ov"])
    if not parts["qk"] and not parts["ov"]:
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        raise UsageError(
            f"no circuits are known in {type(model).__name__}: name their parameters by hand, as in "
            "qk=['*.query.weight', '*.key.weight'], ov=['*.value.weight'], or slices of a fused one, as in "
            f"qk=['*.qkv.weight[0:0:128]'] (dimension:start:stop). Its parameters: {folded(shapes) or 'none'}"
        )
    taken = {part.name for some in parts.values() for part in some}
    rest = tuple(name for name in dict.fromkeys(names.values()) if name not in taken)
    return ModelCircuits(qk=tuple(parts["qk"]), ov=tuple(parts["ov"]), rest=rest)


def _known(model: nn.Module) -> Iterator[Claim]:
    """What layers say, or are known for; where a parameter was split, what it was split for."""
    pieces = {f"{prefix}{piece.attribute}": piece for prefix, split in all_splits(model) for piece in split.pieces}
    for circuit, part in _layers(model):
        if part.name not in pieces:
            yield circuit, part
    for name, piece in pieces.items():
        yield piece.circuit, ParamSlice(name=name)


def _layers(model: nn.Module) -> Iterator[Claim]:
    told: list[str] = []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        prefix = f"{name}." if name else ""
        if any(prefix.startswith(above) for above in told):
            continue
        if (circuits := _said(module)) is not None:
            told.append(prefix)
            for own in circuits.qk:
                yield "qk", ParamSlice(name=f"{prefix}{own}")
            for own in circuits.ov:
                yield "ov", ParamSlice(name=f"{prefix}{own}")
        elif isinstance(module, nn.MultiheadAttention):
            told.append(prefix)
            yield from of_attention(prefix, module)
        else:
            yield from by_names(prefix, module, modules.get(name.rpartition(".")[0]) if name else None)


def _said(module: nn.Module) -> Circuits | None:
    if not callable(method := getattr(type(module), "circuits", None)):  # of its class: wrappers pass on what they wrap
        return None
    return found if isinstance(found := method(module), Circuits) else None


def _once(parts: Iterable[ParamSlice], names: dict[str, str]) -> list[ParamSlice]:
    """Each part once, under the first name of its parameter: layers may share it."""
    return list(dict.fromkeys(replace(part, name=names[part.name]) for part in parts))


def _by_name(parts: Iterable[ParamSlice]) -> dict[str, list[ParamSlice]]:
    found: dict[str, list[ParamSlice]] = {}
    for part in parts:
        found.setdefault(part.name, []).append(part)
    return found


def _overlapping(part: ParamSlice, others: Iterable[ParamSlice]) -> bool:
    return any(part.overlaps(other) for other in others)


def _refuse_overlaps(qk: Sequence[ParamSlice], ov: Sequence[ParamSlice]) -> None:
    looking = _by_name(qk)
    for part in ov:
        if _overlapping(part, looking.get(part.name, ())):
            raise UsageError(
                f"{part.name} would be in both circuits: give it, or each slice of it along one dimension, to one of "
                "them, by hand if layers share it"
            )
    for name, parts in (*looking.items(), *_by_name(ov).items()):
        if any(_overlapping(part, parts[:number]) for number, part in enumerate(parts)):
            raise UsageError(f"slices of {name} overlap: name each of its rows once, along one dimension")
