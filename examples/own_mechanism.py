"""A mechanism of your own in a few lines, tried on the laws: attention by the cosine of queries and keys."""

from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from qkflow import StandardAttention, StandardConfig, check, register


class CosineAttention(StandardAttention):  # projections, cache, window, positions, padding and packing are inherited
    def __init__(self, width, heads, layer=0, layers=1, *, config):
        super().__init__(width, heads, layer, layers, config=config)
        self.sharpness = torch.nn.Parameter(torch.tensor(10.0))

    def attend(self, rows):
        return super().attend(rows._replace(q=self.sharpness * normalize(rows.q, dim=-1), k=normalize(rows.k, dim=-1)))

    def map(self, rows):
        return super().map(rows._replace(q=self.sharpness * normalize(rows.q, dim=-1), k=normalize(rows.k, dim=-1)))


@dataclass(frozen=True, kw_only=True)
class CosineConfig(StandardConfig):
    def __call__(self, width, heads, layer, layers):
        return CosineAttention(width, heads, layer, layers, config=self)


register("cosine", CosineConfig)  # `cosine:window=8` is a mechanism like any other now, in this process
print(*(f"{law.law}: {law.outcome} {law.detail}" for law in check(CosineConfig(window=8), backend="eager")), sep="\n")
