"""Examples (inputs and targets) and the logits that a model gives for their targets."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkflow.layout import Layout
from qkflow.models import Decoder


@dataclass(frozen=True, eq=False, kw_only=True)
class Examples:
    """Rows of tokens, and what a model should predict from them.

    >>> rows = Examples(inputs=torch.tensor([[5, 6], [7, 0]]), targets=torch.tensor([[1], [0]]),
    ...                 lengths=torch.tensor([2, 1]))
    >>> rows.n_scored, rows.layout.lengths.tolist(), len(rows[0:1])
    (2, [2, 1], 1)
    """

    inputs: Int[Tensor, "b t"]
    """The tokens that the model reads."""
    targets: Int[Tensor, "b n"]
    """The token after each input (n = t), or the class of each row (n = 1)."""
    scored: Bool[Tensor, "b n"] | None = None
    """The targets that enter the loss; None means all of them."""
    lengths: Int[Tensor, " b"] | None = None
    """The tokens of each row before its padding on the right; None: no padding."""
    starts: Bool[Tensor, "b t"] | None = None
    """Where a new document starts that must not see those before it; None: nowhere."""

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: slice) -> Examples:
        return self._map(lambda tensor: tensor[rows])

    def to(self, device: torch.device) -> Examples:
        """The examples on a device."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, function: Any) -> Examples:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: function(tensor) for name, tensor in tensors.items() if tensor is not None})

    @property
    def n_scored(self) -> int:
        """The number of targets that enter the loss."""
        return self.targets.numel() if self.scored is None else int(self.scored.sum())

    @property
    def layout(self) -> Layout | None:
        """The documents or the padding of the rows."""
        if self.starts is not None:
            return Layout.segmented(self.starts)
        t = self.inputs.shape[1]
        if self.lengths is None or bool((self.lengths == t).all()):
            return None
        return Layout.padded(self.lengths, t, device=self.inputs.device)

    @property
    def checksum(self) -> str:
        """CRC-32 of the inputs and the last targets."""
        rows = torch.cat([self.inputs, self.targets[:, -1:]], dim=1)
        return f"{zlib.crc32(rows.numpy().tobytes()):08x}"


class TargetLogits(nn.Module):
    """A model that computes logits for the scored targets only: the module that ddp and fsdp wrap.

    >>> from qkflow.models import DecoderConfig
    >>> logits = TargetLogits(Decoder(DecoderConfig(width=8, layers=1, heads=1, hidden=8)))
    >>> tokens = torch.tensor([[72, 105, 33]])
    >>> logits(tokens).shape, logits(tokens, torch.tensor([[False, True, True]])).shape
    (torch.Size([1, 3, 257]), torch.Size([2, 257]))
    """

    def __init__(self, model: nn.Module, *, compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        self.compiled = compiled

    def forward(
        self,
        inputs: Int[Tensor, "b t"],
        scored: Bool[Tensor, "b t"] | None = None,
        layout: Layout | None = None,
        chunk: int | None = None,
    ) -> Float[Tensor, "... classes"]:
        """Logits `[b, t, v]` of the token after each input, `[n, v]` of the scored ones, or `[b, c]` of classes.

        With a `chunk`, so many tokens are read at a time and the state is carried along.
        """
        model = self.model
        if not isinstance(model, Decoder):
            return model(inputs, layout)
        if scored is None:
            return model(inputs, layout=layout)[0]
        if chunk is not None and layout is None:
            return model.logits(_read_in_chunks(model, inputs, chunk)[scored])
        if self.compiled and layout is None:  # only the whole model is compiled
            return model(inputs)[0][scored]
        return model.logits(model.read(inputs, layout=layout)[0][scored])


def _read_in_chunks(model: Decoder, inputs: Int[Tensor, "b t"], chunk: int) -> Float[Tensor, "b t p"]:
    """The stream before the output head."""
    outputs, state = [], None
    for tokens in inputs.split(chunk, dim=1):
        output, state = model.read(tokens, state)
        outputs.append(output)
    return torch.cat(outputs, dim=1)


def predict(
    module: nn.Module, examples: Examples, *, chunk: int | None = None
) -> tuple[Float[Tensor, "n classes"], Int[Tensor, " n"]]:
    """Logits, in float32 or more, and targets of everything that is scored; `module` is a `TargetLogits`."""
    device = examples.inputs.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = module(examples.inputs, examples.scored, examples.layout, chunk)
    targets = examples.targets.flatten() if examples.scored is None else examples.targets[examples.scored]
    return logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32)), targets
