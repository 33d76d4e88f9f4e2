"""Where a classifier looks whose answer hangs on one word, with queries and keys that learn 1 and 5 times as fast."""

import torch

from qkflow import Classifier, ClassifierConfig, circuit_groups
from qkflow.probes import effective_tokens, maps

torch.manual_seed(0)
MARKS, LENGTH = 2, 12  # tokens 1 and 2 decide the class; the others, 3 to 29, say nothing
texts = torch.randint(3, 30, (512, LENGTH))
labels, places = torch.randint(MARKS, (512,)), torch.randint(LENGTH - 1, (512,))
texts[torch.arange(512), places] = labels + 1

for r in (1.0, 5.0):
    torch.manual_seed(0)
    model = Classifier(ClassifierConfig(width=32, layers=1, heads=2, vocabulary=30, classes=MARKS))
    optimizer = torch.optim.AdamW(circuit_groups(model, lr=2e-3, r=r))
    for step in range(60):
        rows = torch.arange(64) + 64 * (step % 8)
        loss = torch.nn.functional.cross_entropy(model(texts[rows]), labels[rows])
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    looked = torch.stack([maps(model, text)[0][:, -1].mean(0) for text in texts[:64]])  # of the last token, over heads
    mass = looked[torch.arange(64), places[:64]].mean()
    print(f"r = {r:g}: loss {loss.item():.3f}, {mass:.0%} of attention on the word that decides,")
    print(f"       {effective_tokens(looked).mean():.1f} of {LENGTH} tokens attended to")
