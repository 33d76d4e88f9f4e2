"""The config and the tokenizer of qkflow models in transformers."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerFast

from qkflow.data import Tokenizer
from qkflow.errors import UsageError
from qkflow.hub import config_json
from qkflow.hub.tokenizer import to_tokenizers, tokenizer_config
from qkflow.models import ClassifierConfig, DecoderConfig


class QKFlowConfig(PretrainedConfig):
    """The shape of a qkflow model, under the names that transformers uses. Unknown keys raise `UsageError`.

    >>> config = QKFlowConfig(hidden_size=32, num_hidden_layers=2, intermediate_size=64, mechanism="standard+affine")
    >>> config.decoder_config().width, QKFlowConfig.from_model_config(config.decoder_config()).mechanism
    (32, 'standard+affine')
    """

    model_type = config_json.MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    def __init__(
        self,
        *,
        vocab_size: int = 257,
        hidden_size: int = 128,
        num_hidden_layers: int = 5,
        num_attention_heads: int = 4,
        intermediate_size: int = 336,
        mechanism: str | list[str] | tuple[str, ...] = "standard",
        dropout: float | int = 0.0,
        rms_norm_eps: float | int = 1e-5,
        tie_word_embeddings: bool | None = None,
        classifier_norm: bool = True,
        classifier_spread: float | int = 1.0,
        classifier_qk_start: float | int = 1.0,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        special_tokens = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        config_json.validate_keys({**kwargs, **special_tokens, "use_cache": use_cache}, "the config")
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.mechanism = list(mechanism) if isinstance(mechanism, tuple) else mechanism
        self.dropout = dropout
        self.rms_norm_eps = rms_norm_eps
        self.classifier_norm = classifier_norm
        self.classifier_spread = classifier_spread
        self.classifier_qk_start = classifier_qk_start
        self.use_cache = use_cache
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id
        self.tie_word_embeddings = tie_word_embeddings
        self.classifier_config(kwargs.get("num_labels") or 2)  # before transformers compares the values
        super().__init__(**{key: value for key, value in kwargs.items() if value is not None})

    @classmethod
    def from_model_config(cls, config: DecoderConfig | ClassifierConfig, *, end: int | None = None) -> QKFlowConfig:
        """The same shape for transformers; `end` becomes the BOS, EOS and padding token."""
        options = config_json.model_keys(config)
        if isinstance(config, ClassifierConfig):
            options["num_labels"] = config.classes
        return cls(**options, bos_token_id=end, eos_token_id=end, pad_token_id=end)

    def decoder_config(self) -> DecoderConfig:
        """The language model that this config describes."""
        return config_json.decoder_config(vars(self))

    def classifier_config(self, labels: int) -> ClassifierConfig:
        """The classifier that this config describes."""
        if labels < 1:
            raise UsageError(f"a classifier needs at least one label, got {labels}")
        return config_json.classifier_config(vars(self), labels)


def to_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Convert a tokenizer to transformers. The end-of-document token is the BOS, EOS and padding token.

    >>> from qkflow.data import ByteTokenizer
    >>> to_transformers(ByteTokenizer())("hi", return_tensors="np").input_ids.tolist()
    [[104, 105]]
    """
    options = {key: value for key, value in tokenizer_config(tokenizer).items() if key != "tokenizer_class"}
    return PreTrainedTokenizerFast(tokenizer_object=to_tokenizers(tokenizer), **options)
