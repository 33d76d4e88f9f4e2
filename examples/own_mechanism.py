"""Define a mechanism, register it, and check it against the laws: attention by cosine similarity."""

from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from qkflow import StandardAttention, StandardConfig, check, register


class CosineAttention(StandardAttention):  # inherits projections, cache, window, positions, padding and packing
    def __init__(self, width, heads, layer=0, layers=1, *, config):
        super().__init__(width, heads, layer, layers, config=config)
        self.sharpness = torch.nn.Parameter(torch.tensor(10.0))

    def attend(self, inputs):
        return super().attend(self.normalized(inputs))

    def map(self, inputs):
        return super().map(self.normalized(inputs))

    def normalized(self, inputs):
        return inputs._replace(q=self.sharpness * normalize(inputs.q, dim=-1), k=normalize(inputs.k, dim=-1))


@dataclass(frozen=True, kw_only=True)
class CosineConfig(StandardConfig):
    def __call__(self, width, heads, layer, layers):
        return CosineAttention(width, heads, layer, layers, config=self)


register("cosine", CosineConfig)  # `cosine:window=4` is now a mechanism in this process
for result in check(CosineConfig(window=4), backend="eager"):
    print(f"{result.law}: {result.outcome} {result.detail}".rstrip())
