"""Small transformers models, with weights large enough that a change of their scores is visible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "vocab_size": 29,
    "max_position_embeddings": 48,
}
GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {
    **GROUPED,
    "num_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "experts_implementation": "eager",  # supports any precision
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "attention_bias": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "head_dim": 8}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**SMALL, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 29, "n_positions": 48},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**SMALL, "rotary_pct": 0.5}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", GROUPED),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", EXPERTS),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", EXPERTS),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 8}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, "head_dim": 8}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", GROUPED),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", GROUPED),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config", GROUPED),
    "phi": ("PhiForCausalLM", "PhiConfig", GROUPED),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", GROUPED),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", GROUPED),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", GROUPED),
}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


class Models:
    """Builds models and randomises their couplings."""

    def __call__(self, kind: str, *, dtype: torch.dtype = torch.float32, suffix: str = "", **more: Any) -> Any:
        """A model of this kind, always with the same weights; `suffix` replaces ForCausalLM in its class name."""
        model, config, shape = MODELS[kind]
        model = model.replace("ForCausalLM", suffix) if suffix else model
        torch.manual_seed(0)
        instance = getattr(transformers, model)(getattr(transformers, config)(**shape, **NO_TOKENS, **more)).eval()
        with torch.no_grad():
            for parameter in instance.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return instance.to(dtype)

    def randomise_couplings(self, model: nn.Module, scale: float = 0.5) -> nn.Module:
        """Give the couplings random weights."""
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".coupling." in name:
                    parameter.normal_(std=scale)
        return model

    def tokens(self, rows: int = 2, length: int = 9, seed: int = 2) -> Tensor:
        """Random tokens without padding."""
        return torch.randint(1, 29, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def models() -> Models:
    """Builds small transformers models."""
    return Models()


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    """Turn off progress bars and loading reports."""
    level: Callable[[int], None] = transformers.logging.set_verbosity
    before = transformers.logging.get_verbosity()
    transformers.logging.disable_progress_bar()
    level(transformers.logging.ERROR)
    yield
    level(before)
    transformers.logging.enable_progress_bar()
