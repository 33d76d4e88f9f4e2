"""Circuits of attention layers from other libraries, recognized by class or by the names of their children."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from qkflow.circuits.param_split import Circuit, ParamSlice

CircuitParam = tuple[Circuit, ParamSlice]
FusedLayout = tuple[int, tuple[int, ...]]
"""Layout of a fused matrix: number of repeats, and the rows of queries, keys and values in each repeat."""

_SEPARATE_NAMES = (
    ("q_proj", "k_proj", "v_proj"),  # Llama, Mistral, Qwen, Gemma, OPT, BART, GPT-J, CLIP
    ("query", "key", "value"),  # BERT, RoBERTa, ELECTRA, ViT
    ("q", "k", "v"),  # T5, MPNet
    ("query_proj", "key_proj", "value_proj"),  # DeBERTa
    ("q_lin", "k_lin", "v_lin"),  # DistilBERT
    ("wq", "wk", "wv"),  # the original Llama
    ("to_q", "to_k", "to_v"),  # x-transformers, diffusers
)
_FUSED_NAMES = ("c_attn", "query_key_value", "qkv_proj", "Wqkv")
_OUTPUT_NAMES = ("o_proj", "out_proj", "dense", "o", "out_lin", "wo", "Wo", "to_out", "c_proj")
_QK_CHILDREN = (
    *("q_norm", "k_norm", "q_layernorm", "k_layernorm", "q_conv1d", "k_conv1d", "relative_attention_bias"),
    "coupling",  # added by a retrofit
)
_OV_CHILDREN = ("v_conv1d",)
_MATRICES = ("query", "key", "value")
_CIRCUITS: tuple[Circuit, ...] = ("qk", "qk", "ov")


def multihead_attention_params(prefix: str, module: nn.MultiheadAttention) -> Iterator[CircuitParam]:
    """Yield the circuit parameters of `torch.nn.MultiheadAttention`, with fused or separate projections."""
    params: dict[str, Circuit] = {"q_proj_weight": "qk", "k_proj_weight": "qk", "bias_k": "qk"}
    params |= {"v_proj_weight": "ov", "bias_v": "ov"}
    for name, circuit in params.items():
        if module._parameters.get(name) is not None:
            yield circuit, ParamSlice(name=f"{prefix}{name}")
    for name in ("in_proj_weight", "in_proj_bias"):
        yield from _fused_slices(prefix, module, name, 0, (1, (module.embed_dim,) * 3))
    yield from _child_params(prefix, module, "out_proj", "ov")


def attention_params(prefix: str, module: nn.Module, parent: nn.Module | None) -> Iterator[CircuitParam]:
    """Yield the circuit parameters of a module whose children have the names of an attention layer.

    `parent` is the module that contains it: BERT keeps the output projection there.
    """
    children = dict(module.named_children())
    if separate := next((names for names in _SEPARATE_NAMES if all(name in children for name in names)), None):
        for name, circuit in zip(separate, _CIRCUITS, strict=True):
            yield from _child_params(prefix, module, name, circuit)
    elif fused := next((name for name in _FUSED_NAMES if name in children), None):
        if (layout := _fused_layout(module, fused, children[fused])) is None:
            return
        yield from _fused_slices(f"{prefix}{fused}.", children[fused], "weight", _dim(children[fused]), layout)
        yield from _fused_slices(f"{prefix}{fused}.", children[fused], "bias", 0, layout)
        yield from _child_params(prefix, module, "q_attn", "qk")
    else:
        return
    for name in _QK_CHILDREN:
        yield from _child_params(prefix, module, name, "qk")
    for name in _OV_CHILDREN:
        yield from _child_params(prefix, module, name, "ov")
    if output := next((name for name in _OUTPUT_NAMES if name in children), None):
        yield from _child_params(prefix, module, output, "ov")
    elif parent is not None and isinstance(getattr(parent, "output", None), nn.Module):
        above = prefix[:-1].rpartition(".")[0]
        yield from _child_params(
            f"{above}.output." if above else "output.", parent.get_submodule("output"), "dense", "ov"
        )


def _fused_layout(module: nn.Module, name: str, fused: nn.Module) -> FusedLayout | None:
    """Return the layout of a fused matrix; None if it is unknown."""
    rows = _n_rows(fused)
    layout: FusedLayout | None = None
    if _is_instance(module, "GPTBigCodeAttention", "FalconAttention"):
        if _read(module, "new_decoder_architecture"):
            layout = _head_layout(module, rows, _read(module, "num_kv_heads"), by_group=True)
        else:
            layout = _head_layout(module, rows, 1 if _read(module, "multi_query") else None)
    elif _is_instance(module, "GPTNeoXAttention", "BloomAttention", "PersimmonAttention"):
        layout = _head_layout(module, rows, None)
    elif _is_instance(module, "Phi3Attention", "Phi4MultimodalAttention"):
        layout = _head_layout(module, rows, _read(module, "num_key_value_heads"))
    elif name == "c_attn" and hasattr(module, "q_attn"):  # cross-attention: keys and values only
        layout = (1, (0, rows // 2, rows // 2))
    elif name == "c_attn" or _is_instance(module, "ModernBertAttention"):
        layout = (1, (rows // 3,) * 3)
    return layout if rows and layout is not None and layout[0] * sum(layout[1]) == rows else None


def _head_layout(module: nn.Module, rows: int, kv_heads: Any, *, by_group: bool = False) -> FusedLayout | None:
    """Return the layout for given numbers of heads.

    `kv_heads` is None if q, k and v alternate per head. `by_group`: each group holds its queries, its key, its value.
    """
    heads = _read(module, "num_heads", "num_attention_heads")
    if not isinstance(heads, int) or not isinstance(kv_heads, int | None):
        return None
    if kv_heads is None:
        return heads, (rows // (3 * heads),) * 3
    width = rows // (heads + 2 * kv_heads)
    if by_group:
        return kv_heads, (width * heads // kv_heads, width, width)
    return 1, (width * heads, width * kv_heads, width * kv_heads)


def _fused_slices(prefix: str, module: nn.Module, name: str, dim: int, layout: FusedLayout) -> Iterator[CircuitParam]:
    """Yield the slices of a fused parameter."""
    parameter = module._parameters.get(name)
    repeats, rows = layout
    if parameter is None or parameter.shape[dim] != repeats * sum(rows):
        return
    start = 0
    for _ in range(repeats):
        for matrix, circuit, length in zip(_MATRICES, _CIRCUITS, rows, strict=True):
            if length:
                yield (
                    circuit,
                    ParamSlice(name=f"{prefix}{name}", dim=dim, start=start, stop=start + length, matrix=matrix),
                )
            start += length


def _child_params(prefix: str, module: nn.Module, child: str, circuit: Circuit) -> Iterator[CircuitParam]:
    """Yield all parameters of a child module; adapters of a projection belong to its circuit."""
    child_module = getattr(module, child, None)
    if isinstance(child_module, nn.Module):
        for name, _ in child_module.named_parameters(remove_duplicate=False):
            yield circuit, ParamSlice(name=f"{prefix}{child}.{name}")


def _n_rows(fused: nn.Module) -> int:
    """Return the output size of a fused matrix; 0 if it is not a matrix, for example an adapter around one."""
    weight = getattr(fused, "weight", None)
    return weight.shape[_dim(fused)] if isinstance(weight, Tensor) and weight.ndim == 2 else 0


def _dim(fused: nn.Module) -> int:
    """Return the output dimension of the weight: GPT-2's `Conv1D` stores it transposed."""
    return 1 if type(fused).__name__ == "Conv1D" else 0


def _read(module: nn.Module, *names: str) -> Any:
    """Return the first of these attributes that the module, or else its config, has."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            if (value := getattr(owner, name, None)) is not None:
                return value
    return None


def _is_instance(module: nn.Module, *names: str) -> bool:
    return any(cls.__name__ in names for cls in type(module).__mro__)
