"""Use a mechanism as the attention layer of your own model: train on whole sequences, then decode with a state."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from qkflow import CoupledAttention, QDelta


class Model(nn.Module):
    def __init__(self, attention: type[nn.Module], width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.attention = attention(width, heads=4)
        self.head = nn.Linear(width, 16)

    def forward(self, tokens: torch.Tensor, state=None):
        x = self.embedding(tokens)
        y, state = self.attention(x, state)
        return self.head(x + y), state


for attention in (CoupledAttention, QDelta):
    torch.manual_seed(0)
    model = Model(attention)
    tokens = torch.arange(200).view(1, -1) % 7
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        logits, _ = model(tokens)
        loss = cross_entropy(logits[0, :-1], tokens[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        _, state = model(tokens[:, :100])
        logits, state = model(tokens[:, 100:101], state)  # the same as one pass over 101 tokens
    next_token = logits.argmax().item()
    print(f"{attention.__name__}: loss {loss.item():.3f}, next token {next_token}, state of {state.nbytes:,} bytes")
