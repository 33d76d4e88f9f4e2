"""A mechanism as a layer of a model of your own: trained on whole sequences, then run token by token with its state."""

import torch
from torch import nn

from qkflow import CoupledAttention, QDelta


class Model(nn.Module):
    def __init__(self, mixer: type[nn.Module], width: int = 32) -> None:
        super().__init__()
        self.embedding, self.mixer, self.head = nn.Embedding(16, width), mixer(width, heads=4), nn.Linear(width, 16)

    def forward(self, tokens: torch.Tensor, state=None):
        x = self.embedding(tokens)
        y, state = self.mixer(x, state)
        return self.head(x + y), state


for mixer in (CoupledAttention, QDelta):
    torch.manual_seed(0)
    model, tokens = Model(mixer), torch.arange(200).view(1, -1) % 7
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(tokens)[0][0, :-1], tokens[0, 1:])
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    with torch.no_grad():
        logits, state = model(tokens[:, :100])
        token, state = model(tokens[:, 100:101], state)  # one token more: the same as 101 at once
    print(f"{mixer.__name__}: loss {loss.item():.3f}; then {token.argmax().item()}; a state of {state.nbytes:,} bytes")
