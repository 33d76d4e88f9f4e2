"""Measure where a classifier attends when one token decides the class, with query-key learning at ratios 1 and 5."""

import torch
from torch.nn.functional import cross_entropy

from qkflow import Classifier, ClassifierConfig, circuit_groups
from qkflow.probes import attention_maps, effective_tokens

CLASSES, LENGTH = 2, 12

# Tokens 1 and 2 decide the class; tokens 3 to 29 are noise.
torch.manual_seed(0)
texts = torch.randint(3, 30, (512, LENGTH))
labels = torch.randint(CLASSES, (512,))
positions = torch.randint(LENGTH - 1, (512,))
texts[torch.arange(512), positions] = labels + 1

for r in (1.0, 5.0):
    torch.manual_seed(0)
    model = Classifier(ClassifierConfig(width=32, layers=1, heads=2, vocabulary=30, classes=CLASSES))
    optimizer = torch.optim.AdamW(circuit_groups(model, lr=2e-3, r=r))
    for step in range(60):
        batch = torch.arange(64) + 64 * (step % 8)
        loss = cross_entropy(model(texts[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    # Attention of the last token, averaged over heads.
    attention = torch.stack([attention_maps(model, text)[0][:, -1].mean(0) for text in texts[:64]])
    mass = attention[torch.arange(64), positions[:64]].mean()
    print(
        f"r = {r:g}: loss {loss.item():.3f}, {mass:.0%} of attention on the deciding token, "
        f"{effective_tokens(attention).mean():.1f} effective tokens of {LENGTH}"
    )
