"""Fine-tune a language model with LoRA on its queries, feed-forward networks and head, then merge and save it."""

import tempfile

import torch

from qkflow.hf import QKFlowConfig, QKFlowForCausalLM

try:
    from peft import LoraConfig, get_peft_model
except ImportError:
    raise SystemExit("this example needs peft: pip install peft") from None


def train(model: torch.nn.Module, tokens: torch.Tensor, lr: float) -> None:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr)
    for step in range(31):
        loss = model(input_ids=tokens, labels=tokens).loss
        if step % 30 == 0:
            print(f"step {step}: loss {loss.item():.2f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


torch.manual_seed(0)
config = QKFlowConfig(hidden_size=32, num_hidden_layers=1, intermediate_size=64, mechanism="kuramoto")
model = QKFlowForCausalLM(config)  # or QKFlowForCausalLM.from_pretrained(...)
train(model, torch.tensor([list(f"{n:02} plus {n:02} is {2 * n:04}; ".encode()) for n in range(1, 33)]), lr=2e-2)

lora = LoraConfig(r=4, lora_alpha=8, target_modules=["query", "gate", "up", "output", "head"])
adapted = get_peft_model(model, lora)
tokens = torch.tensor([list(f"{n:02} times {n:02} is {n * n:04}; ".encode()) for n in range(1, 33)])
train(adapted, tokens, lr=2e-2)

merged = adapted.eval().merge_and_unload()  # an ordinary model again
with tempfile.TemporaryDirectory() as folder:
    merged.save_pretrained(folder)
    loaded = QKFlowForCausalLM.from_pretrained(folder)
print(f"the merged model predicts the same: {torch.allclose(loaded(tokens).logits, merged(tokens).logits, atol=1e-4)}")
