"""Our classifier as a sequence classifier of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from qkflow.errors import UsageError
from qkflow.hf.base import QKFlowPreTrainedModel, changed, packed, refuse_embeddings
from qkflow.hf.config import QKFlowConfig
from qkflow.hf.layouts import layout_of
from qkflow.hf.outputs import output
from qkflow.hub.folder import check_folder, label_count, read_description
from qkflow.models import Classifier

_HEAD = "model.head.weight"


class QKFlowForSequenceClassification(QKFlowPreTrainedModel):
    """A `Classifier` over any mechanism: a text's last token says which label it has, or labels, or which number.

    From the folder of a language model it takes everything but the head, which begins anew.

    >>> config = QKFlowConfig(hidden_size=32, num_hidden_layers=1, intermediate_size=0, num_labels=3)
    >>> QKFlowForSequenceClassification(config)(torch.tensor([[72, 105]])).logits.shape
    torch.Size([1, 3])
    """

    def __init__(self, config: QKFlowConfig) -> None:
        self.num_labels = config.num_labels or 2
        stack = Classifier(config.classifier_config(self.num_labels))
        if self.num_labels == 1:
            stack.head = nn.Linear(stack.read_width, 1, bias=False)
            _begin(stack.head)
        super().__init__(config, stack)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutputWithPast | tuple[Any, ...]:
        """Scores of every label, read at the last token of each text; with `labels` the loss of the problem type."""
        refuse_embeddings(inputs_embeds)
        layout = None if input_ids is None else layout_of(input_ids, attention_mask, position_ids, 0, None)
        usual = vars(self.config)
        found = self._read(input_ids, None, layout, maps=output_attentions, streams=output_hidden_states, usual=usual)
        x, last = found.x, -1
        if layout is not None:
            if packed(layout, x) or bool((layout.lengths == 0).any()):
                raise UsageError("a classifier reads one text a row, of at least one token")
            last = (layout.valid * torch.arange(1, x.shape[1] + 1, device=x.device)).argmax(1)
        logits = self.model.head(x[torch.arange(len(x), device=x.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        made = output(
            SequenceClassifierOutputWithPast,
            {"loss": loss, "logits": logits, "hidden_states": found.streams, "attentions": found.maps},
        )
        return made if (usual["return_dict"] if return_dict is None else return_dict) else made.to_tuple()

    @classmethod
    def _check(cls, folder: Path, options: dict[str, Any]) -> bool:
        config = options.get("config")
        asked = options.get("num_labels") or (config.num_labels if isinstance(config, QKFlowConfig) else None)
        return check_folder(folder, labels=asked or label_count(read_description(folder)), changes=changed(options))

    def _complete(self, missing: set[str]) -> None:
        if missing == {_HEAD}:
            _begin(self.model.head)
            return
        super()._complete(missing)


def _begin(head: nn.Linear) -> None:
    """As the head of a `Classifier` begins."""
    nn.init.normal_(head.weight, std=head.in_features**-0.5)
