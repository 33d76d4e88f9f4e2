"""Train an encoder classifier on generated pairs of a key and a value: what is the value of the first token's key?"""

import torch
from torch import nn

from qkflow import EncoderLayer

KEYS, VALUES, LENGTH, WIDTH = 16, 4, 9, 32


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.key, self.value = nn.Embedding(KEYS, WIDTH), nn.Embedding(VALUES + 1, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, num_layers=1, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VALUES)

    def forward(self, keys, values, is_padding):
        return self.head(self.encoder(self.key(keys) + self.value(values), src_key_padding_mask=is_padding)[:, 0])


def batch(n: int):
    keys, values = torch.rand(n, KEYS).argsort(1)[:, :LENGTH], torch.randint(VALUES, (n, LENGTH))
    lengths, answer = torch.randint(3, LENGTH + 1, (n, 1)), torch.randint(1, 3, (n, 1))  # the answer's position
    keys[:, :1], values[:, 0] = keys.gather(1, answer), VALUES  # the first token has no value
    return (keys, values, torch.arange(LENGTH) >= lengths), values.gather(1, answer)[:, 0]


for spec in ("standard:rotary_base=None", "coupled:rotary_base=None"):
    torch.manual_seed(0)
    model = Model(EncoderLayer(WIDTH, nhead=4, dim_feedforward=64, dropout=0.0, norm_first=True, mechanism=spec))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(81):
        inputs, targets = batch(128)
        logits = model(*inputs)
        if step % 40 == 0:
            print(f"{spec}, step {step}: {(logits.argmax(1) == targets).float().mean():.0%} of answers are right")
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, targets).backward()
        optimizer.step()
