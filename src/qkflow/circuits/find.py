"""Find the QK and OV parameters of a model: QK decides where to attend, OV what to pass on.

| layers                                                    | QK                               | OV                    |
|-----------------------------------------------------------|----------------------------------|-----------------------|
| any with `circuits() -> Circuits`: all of qkflow's        | as declared                      | as declared           |
| `nn.MultiheadAttention`, also in torch's transformers     | q, k of `in_proj_*`, or `q_proj_weight`, `k_proj_weight`; `bias_k` | v, `v_proj_weight`, `bias_v`, `out_proj` |
| Llama, Mistral, Qwen, Gemma, OPT, BART, GPT-J, CLIP, ...  | `q_proj`, `k_proj`, their norms  | `v_proj`, `o_proj` or `out_proj` |
| BERT, RoBERTa, ELECTRA, ViT, DeBERTa                      | `query`, `key`                   | `value`, `output.dense` |
| T5, MPNet; DistilBERT; `wq wk wv wo`; `to_q to_k to_v to_out` | `q`, `k`, `relative_attention_bias` | `v`, `o`        |
| GPT-2, nanoGPT: fused `c_attn` [q, k, v]; `q_attn`, `c_attn` [k, v] in cross-attention | its q and k | its v, `c_proj` |
| GPT-BigCode `c_attn`; GPT-NeoX, BLOOM, Persimmon `query_key_value`: q, k, v per head | q, k  | v, `c_proj` or `dense` |
| Falcon `query_key_value`: queries, key, value per group   | its q and k                      | its v, `dense`        |
| Phi-3 `qkv_proj`, ModernBERT `Wqkv`: [q, k, v]            | its q and k                      | its v, `o_proj` or `Wo` |

Biases belong to the circuit of their matrices. A `coupling` that a retrofit added to one of these layers is QK. The
layout of any other fused matrix is unknown: name its slices with patterns.
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from qkflow.circuits.architectures import CircuitParam, attention_params, multihead_attention_params
from qkflow.circuits.param_split import ParamSlice, all_splits
from qkflow.errors import UsageError
from qkflow.mechanisms.base import Circuits

_SLICE = re.compile(r"(.+)\[(\d+):(\d+):(\d+)\]")
_MAX_NAMES = 24
"""Maximum number of parameter names in an error message."""


@dataclass(frozen=True, kw_only=True)
class ModelCircuits:
    """The circuits of a model."""

    qk: tuple[ParamSlice, ...]
    """Where to attend."""
    ov: tuple[ParamSlice, ...]
    """What to pass on."""
    rest: tuple[str, ...]
    """Names of all other parameters."""


def find_circuits(model: nn.Module, *, qk: Sequence[str] = (), ov: Sequence[str] = ()) -> ModelCircuits:
    """Return the circuits of a model, from its layers' declarations or the table of known architectures above.

    Args:
        model: The model.
        qk: Parameter name patterns that replace the QK circuit: `*` matches any characters, `name[dim:start:stop]`
            is a slice of a fused matrix.
        ov: The same for the OV circuit.

    >>> circuits = find_circuits(nn.MultiheadAttention(4, 2, bias=False))
    >>> [(param.name, param.start, param.stop) for param in circuits.qk]
    [('in_proj_weight', 0, 4), ('in_proj_weight', 4, 8)]
    >>> [param.matrix or param.name for param in circuits.ov], circuits.rest
    (['value', 'out_proj.weight'], ())
    >>> find_circuits(nn.Linear(4, 6), qk=["weight[0:0:4]"]).rest
    ('bias',)
    """
    first_name: dict[int, str] = {}  # a shared parameter goes by the first of its names
    names = {name: first_name.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    known: dict[str, list[ParamSlice]] = {"qk": [], "ov": []}
    for circuit, param in _known_params(model):
        if circuit != "rest" and param.name in names:
            known[circuit].append(param)
    matched = {"qk": match_patterns(model, qk), "ov": match_patterns(model, ov)}
    params = {  # each slice once, under the first name of its parameter
        circuit: list(dict.fromkeys(replace(p, name=names[p.name]) for p in matched[circuit] or known[circuit]))
        for circuit in known
    }
    for circuit, other in (("qk", "ov"), ("ov", "qk")):
        if matched[circuit] and not matched[other]:  # patterns take precedence over known parameters
            by_name = _group_by_name(params[circuit])
            params[other] = [param for param in params[other] if not _overlaps_any(param, by_name.get(param.name, ()))]
    _check_overlaps(params["qk"], params["ov"])
    if not params["qk"] and not params["ov"]:
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        raise UsageError(
            f"the architecture of {type(model).__name__} is unknown: name the parameters of its circuits, as in "
            "qk=['*.query.weight', '*.key.weight'], ov=['*.value.weight'], or slices of a fused parameter, as in "
            f"qk=['*.qkv.weight[0:0:128]'] (dimension:start:stop). Its parameters: {summarize_names(shapes) or 'none'}"
        )
    assigned = {param.name for circuit_params in params.values() for param in circuit_params}
    rest = tuple(name for name in dict.fromkeys(names.values()) if name not in assigned)
    return ModelCircuits(qk=tuple(params["qk"]), ov=tuple(params["ov"]), rest=rest)


def _known_params(model: nn.Module) -> Iterator[CircuitParam]:
    """Yield the parameters of declared or known circuits; a split parameter is replaced by its pieces."""
    pieces = {f"{prefix}{piece.attribute}": piece for prefix, split in all_splits(model) for piece in split.pieces}
    for circuit, param in _layer_params(model):
        if param.name not in pieces:
            yield circuit, param
    for name, piece in pieces.items():
        yield piece.circuit, ParamSlice(name=name)


def _layer_params(model: nn.Module) -> Iterator[CircuitParam]:
    finished: list[str] = []  # prefixes of modules whose children are not searched
    modules = dict(model.named_modules())
    for name, module in modules.items():
        prefix = f"{name}." if name else ""
        if any(prefix.startswith(parent) for parent in finished):
            continue
        declare = getattr(type(module), "circuits", None)  # on the class: wrappers forward instance attributes
        if callable(declare) and isinstance(circuits := declare(module), Circuits):
            finished.append(prefix)
            for param_name in circuits.qk:
                yield "qk", ParamSlice(name=f"{prefix}{param_name}")
            for param_name in circuits.ov:
                yield "ov", ParamSlice(name=f"{prefix}{param_name}")
        elif isinstance(module, nn.MultiheadAttention):
            finished.append(prefix)
            yield from multihead_attention_params(prefix, module)
        else:
            yield from attention_params(prefix, module, modules.get(name.rpartition(".")[0]) if name else None)


def _group_by_name(params: Iterable[ParamSlice]) -> dict[str, list[ParamSlice]]:
    groups: dict[str, list[ParamSlice]] = {}
    for param in params:
        groups.setdefault(param.name, []).append(param)
    return groups


def _overlaps_any(param: ParamSlice, others: Iterable[ParamSlice]) -> bool:
    return any(param.overlaps(other) for other in others)


def _check_overlaps(qk: Sequence[ParamSlice], ov: Sequence[ParamSlice]) -> None:
    qk_by_name = _group_by_name(qk)
    for param in ov:
        if _overlaps_any(param, qk_by_name.get(param.name, ())):
            raise UsageError(
                f"{param.name} is in both circuits: assign it, or each slice of it along one dimension, to one "
                "circuit; if layers share it, name it with a pattern"
            )
    for name, params in (*qk_by_name.items(), *_group_by_name(ov).items()):
        if any(_overlaps_any(param, params[:index]) for index, param in enumerate(params)):
            raise UsageError(f"slices of {name} overlap: name each of its rows once, along one dimension")


def match_patterns(model: nn.Module, patterns: Sequence[str]) -> list[ParamSlice]:
    """Return the parameters that match name patterns; `name[dim:start:stop]` is a slice of a parameter.

    Names are those of the state dict: a parameter that is already split matches under its original name.

    >>> [(param.name, param.dim, param.stop) for param in match_patterns(nn.Linear(4, 6), ["weight[0:0:2]", "b*"])]
    [('weight', 0, 2), ('bias', None, 0)]
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    for prefix, split in all_splits(model):
        for piece in split.pieces:
            shapes.pop(f"{prefix}{piece.attribute}")
    params: list[ParamSlice] = []
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        sliced = _SLICE.fullmatch(pattern)
        stem, span = (pattern, None) if sliced is None else (sliced[1], tuple(map(int, sliced.groups()[1:])))
        whole = [_slice_of(name, shape, span) for name, shape in shapes.items() if fnmatchcase(name, stem)]
        pieces = _match_pieces(model, stem, span)
        if not whole and not pieces:
            raise UsageError(
                f"{pattern!r} matches no parameter: expected a name, with * for any characters, or a slice of a "
                f"parameter as in name[0:0:64] (dimension:start:stop). Parameters: {summarize_names(shapes)}"
            )
        params += [*whole, *pieces]
    return params


def _slice_of(name: str, shape: torch.Size, span: tuple[int, ...] | None) -> ParamSlice:
    if span is None:
        return ParamSlice(name=name)
    dim, start, stop = span
    if dim >= len(shape) or not 0 <= start < stop <= shape[dim]:
        raise UsageError(
            f"{name}[{dim}:{start}:{stop}] is not a slice of a parameter of shape {list(shape)}: expected "
            "name[dimension:start:stop] with start < stop <= size of the dimension"
        )
    if stop - start == shape[dim]:
        return ParamSlice(name=name)
    return ParamSlice(name=name, dim=dim, start=start, stop=stop, matrix=f"{start}_{stop}")


def _match_pieces(model: nn.Module, stem: str, span: tuple[int, ...] | None) -> list[ParamSlice]:
    """Return the pieces of parameters that are already split and whose original name matches."""
    params = []
    for prefix, split in all_splits(model):
        if not fnmatchcase(name := f"{prefix}{split.name}", stem):
            continue
        dim, start, stop = (split.dim, 0, split.n_rows) if span is None else span
        for piece in split.pieces:
            inside = [start <= first and last <= stop for first, last in piece.spans]
            outside = [last <= start or stop <= first for first, last in piece.spans]
            if dim == split.dim and all(inside):
                params.append(ParamSlice(name=f"{prefix}{piece.attribute}"))
            elif dim != split.dim or not all(outside):
                raise UsageError(
                    f"{name} is already split along dimension {split.dim} at rows other than [{dim}:{start}:{stop}]: "
                    "use the same slices as before, or create the model again"
                )
    return params


def summarize_names(shapes: Mapping[str, torch.Size]) -> str:
    """Return parameter names with their shapes as patterns: `*` replaces the numbers of repeated layers.

    >>> summarize_names({f"h.{i}.attn.weight": torch.Size([2, 3]) for i in range(12)})
    'h.*.attn.weight [2, 3]'
    """
    pattern_shapes = {re.sub(r"(?<=\.)\d+(?=\.)", "*", name): shape for name, shape in shapes.items()}
    summaries = [f"{pattern} {list(shape)}" for pattern, shape in pattern_shapes.items()]
    more = f" and {len(summaries) - _MAX_NAMES} more" if len(summaries) > _MAX_NAMES else ""
    return ", ".join(summaries[:_MAX_NAMES]) + more
