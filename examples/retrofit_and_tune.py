"""Add a coupling to an existing Llama, tune it with faster queries and keys, save it and load it."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qkflow import circuit_groups
from qkflow.hf import load_retrofitted, retrofit

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config)  # or LlamaForCausalLM.from_pretrained(...)
tokens = torch.tensor([list(f"{n:02} times {n:02} is {n * n:04}; ".encode()) for n in range(1, 65)])

before = model(tokens).logits
after = retrofit(model, "affine")(tokens).logits
print(f"the coupling changed the outputs by {(after - before).abs().max().item()}")

optimizer = torch.optim.AdamW(circuit_groups(model, 1e-3, r=10.0, weight_decay=0.01))
for step in range(61):
    loss = model(tokens, labels=tokens).loss
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    loaded = load_retrofitted(folder)
print(f"the loaded model has the same outputs: {torch.equal(loaded(tokens).logits, model(tokens).logits)}")
