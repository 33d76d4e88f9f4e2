"""Circuits of layers that are not ours, told by their class or by what their parts are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from qkflow.circuits.param_slice import Circuit, ParamSlice

Claim = tuple[Circuit, ParamSlice]
Sizes = tuple[int, tuple[int, ...]]
"""A fused matrix: so many times in a row, these rows of queries, of keys and of values."""

_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),  # Llama, Mistral, Qwen, Gemma, OPT, BART, GPT-J, CLIP
    ("query", "key", "value"),  # BERT, RoBERTa, ELECTRA, ViT
    ("q", "k", "v"),  # T5, MPNet
    ("query_proj", "key_proj", "value_proj"),  # DeBERTa
    ("q_lin", "k_lin", "v_lin"),  # DistilBERT
    ("wq", "wk", "wv"),  # the original Llama
    ("to_q", "to_k", "to_v"),  # x-transformers, diffusers
)
_OUTPUTS = ("o_proj", "out_proj", "dense", "o", "out_lin", "wo", "Wo", "to_out", "c_proj")
_QK_TOO = (
    *("q_norm", "k_norm", "q_layernorm", "k_layernorm", "q_conv1d", "k_conv1d", "relative_attention_bias"),
    "coupling",  # what a retrofit adds
)
_OV_TOO = ("v_conv1d",)
_MATRICES = ("query", "key", "value")
_CIRCUITS: tuple[Circuit, ...] = ("qk", "qk", "ov")


def of_attention(prefix: str, module: nn.MultiheadAttention) -> Iterator[Claim]:
    """`torch.nn.MultiheadAttention`, its projections fused or not."""
    sizes = (1, (module.embed_dim,) * 3)
    for name in ("q_proj_weight", "k_proj_weight", "bias_k"):
        yield from _own(prefix, module, name, "qk")
    for name in ("v_proj_weight", "bias_v"):
        yield from _own(prefix, module, name, "ov")
    for name in ("in_proj_weight", "in_proj_bias"):
        yield from _slices(prefix, module, name, 0, sizes)
    yield from _all(prefix, module, "out_proj", "ov")


def by_names(prefix: str, module: nn.Module, parent: nn.Module | None) -> Iterator[Claim]:
    """A layer whose children are called as attention's are; nothing for any other. `parent` is what it is a part of."""
    children = dict(module.named_children())
    if separate := next((names for names in _SEPARATE if all(name in children for name in names)), None):
        for name, circuit in zip(separate, _CIRCUITS, strict=True):
            yield from _all(prefix, module, name, circuit)
    elif fused := next((name for name in _FUSED if name in children), None):
        sizes = _FUSED[fused](module, children[fused]) if _rows(children[fused]) else None
        if sizes is None:
            return
        yield from _slices(f"{prefix}{fused}.", children[fused], "weight", _dim(children[fused]), sizes)
        yield from _slices(f"{prefix}{fused}.", children[fused], "bias", 0, sizes)
        yield from _all(prefix, module, "q_attn", "qk")
    else:
        return
    for name in _QK_TOO:
        yield from _all(prefix, module, name, "qk")
    for name in _OV_TOO:
        yield from _all(prefix, module, name, "ov")
    if output := next((name for name in _OUTPUTS if name in children), None):
        yield from _all(prefix, module, output, "ov")
    elif parent is not None and isinstance(getattr(parent, "output", None), nn.Module):
        above = prefix[:-1].rpartition(".")[0]
        yield from _all(f"{above}.output." if above else "output.", parent.get_submodule("output"), "dense", "ov")


def _c_attn(module: nn.Module, fused: nn.Module) -> Sizes | None:
    """GPT-2's way, also nanoGPT's: queries, keys and values in turn; a layer that looks elsewhere has no queries."""
    rows = _rows(fused)
    if _is(module, "GPTBigCodeAttention"):
        return _grouped(module, fused, 1) if _read(module, "multi_query") else _grouped(module, fused, None)
    if "q_attn" in dict(module.named_children()):
        return None if rows % 2 else (1, (0, rows // 2, rows // 2))
    return None if rows % 3 else (1, (rows // 3,) * 3)


def _query_key_value(module: nn.Module, fused: nn.Module) -> Sizes | None:
    """Head by head in GPT-NeoX, BLOOM and Persimmon; group by group in Falcon. Others' orders are not known."""
    if _is(module, "GPTNeoXAttention", "BloomAttention", "PersimmonAttention"):
        return _grouped(module, fused, None)
    if _is(module, "FalconAttention"):
        if _read(module, "new_decoder_architecture"):
            return _grouped(module, fused, _read(module, "num_kv_heads"), apart=True)
        return _grouped(module, fused, 1 if _read(module, "multi_query") else None)
    return None


def _qkv_proj(module: nn.Module, fused: nn.Module) -> Sizes | None:
    """Phi-3's way: the heads of the queries, then the fewer ones of keys and values."""
    if _is(module, "Phi3Attention", "Phi4MultimodalAttention"):
        return _grouped(module, fused, _read(module, "num_key_value_heads"))
    return None


def _wqkv(module: nn.Module, fused: nn.Module) -> Sizes | None:
    rows = _rows(fused)
    return (1, (rows // 3,) * 3) if _is(module, "ModernBertAttention") and rows % 3 == 0 else None


_FUSED: dict[str, Callable[[nn.Module, nn.Module], Sizes | None]] = {
    "c_attn": _c_attn,
    "query_key_value": _query_key_value,
    "qkv_proj": _qkv_proj,
    "Wqkv": _wqkv,
}


def _grouped(module: nn.Module, fused: nn.Module, keys: Any, *, apart: bool = False) -> Sizes | None:
    """Sizes from the numbers of heads: of queries, and of keys (None: as many, and head by head).

    `apart`: one group after the other, each with its queries, its key and its value.
    """
    heads, rows = _read(module, "num_heads", "num_attention_heads"), _rows(fused)
    if not isinstance(heads, int) or not isinstance(keys, int | None):
        return None
    width = rows // (3 * heads if keys is None else heads + 2 * keys)
    if keys is None:
        found: Sizes = (heads, (width,) * 3)
    elif apart:
        found = (keys, (width * heads // keys, width, width))
    else:
        found = (1, (width * heads, width * keys, width * keys))
    return found if found[0] * sum(found[1]) == rows else None


def _slices(prefix: str, module: nn.Module, name: str, dim: int, sizes: Sizes) -> Iterator[Claim]:
    """The slices of a parameter that several matrices share."""
    parameter = module._parameters.get(name)
    repeats, rows = sizes
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


def _own(prefix: str, module: nn.Module, name: str, circuit: Circuit) -> Iterator[Claim]:
    if module._parameters.get(name) is not None:
        yield circuit, ParamSlice(name=f"{prefix}{name}")


def _all(prefix: str, module: nn.Module, child: str, circuit: Circuit) -> Iterator[Claim]:
    """Every parameter of a child, however deep: adapters of a projection belong to its circuit."""
    found = getattr(module, child, None)
    if isinstance(found, nn.Module):
        for name, _ in found.named_parameters(remove_duplicate=False):
            yield circuit, ParamSlice(name=f"{prefix}{child}.{name}")


def _rows(fused: nn.Module) -> int:
    """Rows of a fused matrix; 0 for what is no matrix, such as an adapter around one."""
    weight = getattr(fused, "weight", None)
    return weight.shape[_dim(fused)] if isinstance(weight, Tensor) and weight.ndim == 2 else 0


def _dim(fused: nn.Module) -> int:
    """The dimension of the outputs: GPT-2's matrices lie the other way round."""
    return 1 if type(fused).__name__ == "Conv1D" else 0


def _read(module: nn.Module, *names: str) -> Any:
    """The first of these that the module has, or else its config."""
    for place in (module, getattr(module, "config", None)):
        for name in names:
            if (value := getattr(place, name, None)) is not None:
                return value
    return None


def _is(module: nn.Module, *names: str) -> bool:
    return any(kind.__name__ in names for kind in type(module).__mro__)
