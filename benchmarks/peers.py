"""Models and operators of other libraries, in the same shape as ours. They need the extra `[bench]`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

from torch import Tensor, nn

from qkflow import DecoderConfig

try:
    from transformers import LlamaConfig, LlamaForCausalLM
    from x_transformers import Decoder as XDecoder
    from x_transformers import TransformerWrapper
except ImportError as error:
    sys.exit(f'{error}. Install the benchmark extra: pip install -c constraints.txt -e ".[bench]"')


def hf_llama(config: DecoderConfig, positions: int = 16384) -> LlamaForCausalLM:
    """HF transformers' Llama: RoPE, RMSNorm, SwiGLU, fused attention."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocabulary,
            hidden_size=config.width,
            intermediate_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            tie_word_embeddings=config.tied is not False,
            max_position_embeddings=positions,
            attn_implementation="sdpa",
        )
    )


def x_transformer(config: DecoderConfig, positions: int) -> TransformerWrapper:
    """x-transformers with the same components: rotary, RMSNorm, SwiGLU without biases, fused attention, tied head."""
    return TransformerWrapper(
        num_tokens=config.vocabulary,
        max_seq_len=positions,
        tie_embedding=config.tied is not False,
        use_abs_pos_emb=False,
        attn_layers=XDecoder(
            dim=config.width,
            depth=config.layers,
            heads=config.heads,
            attn_dim_head=config.width // config.heads,
            rotary_pos_emb=True,
            rotary_emb_dim=config.width // config.heads,
            use_rmsnorm=True,
            ff_swish=True,
            ff_glu=True,
            ff_no_bias=True,
            ff_mult=config.hidden / config.width,
            attn_flash=True,
        ),
    )


def hf_gated_delta_rule() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """HF transformers' chunked gated delta rule in plain torch, without the wrapper that selects a GPU kernel."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    return inspect.unwrap(torch_chunk_gated_delta_rule)


def n_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
