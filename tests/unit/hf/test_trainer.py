"""`Trainer` trains, saves and resumes qkflow models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from qkflow.hf import QKFlowForCausalLM, read_folder


class Lines(Dataset[dict[str, torch.Tensor]]):
    """Rows of a few tokens, padded on the right."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(6) * 3 + item) % 257
        mask = torch.arange(6) < 6 - item % 3
        return {"input_ids": tokens, "attention_mask": mask.long(), "labels": tokens.masked_fill(~mask, -100)}


def trainer(model: QKFlowForCausalLM, out: Path, **options: Any) -> Trainer:
    defaults = {"max_steps": 3, "per_device_train_batch_size": 4, "save_steps": 2, "logging_steps": 1}
    quiet = {
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
    }
    return Trainer(
        model=model, args=TrainingArguments(str(out), **{**defaults, **quiet, **options}), train_dataset=Lines()
    )


@pytest.mark.filterwarnings("ignore")  # the data loader and transformers emit warnings
def test_a_resumed_trainer_reaches_the_same_weights_and_its_checkpoints_are_readable(
    causal: Callable[..., QKFlowForCausalLM], tmp_path: Path
) -> None:
    start = causal("standard+affine:sharing=layers").float()
    first = {name: tensor.clone() for name, tensor in start.state_dict().items()}
    whole = trainer(start, tmp_path / "whole")
    whole.train()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    saved = read_folder(tmp_path / "whole" / "checkpoint-2")
    assert saved.config == start.config.decoder_config()
    other = causal("standard+affine:sharing=layers").float()
    other.load_state_dict(first)
    again = trainer(other, tmp_path / "whole")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for name, tensor in start.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
        assert not torch.equal(tensor, first[name]) or name.endswith("rotary")


@pytest.mark.filterwarnings("ignore")
def test_gradient_accumulation_weights_every_token_equally(
    causal: Callable[..., QKFlowForCausalLM], tmp_path: Path
) -> None:
    embeddings = []
    for size, parts in ((4, 1), (1, 4)):
        torch.manual_seed(0)
        model = causal("standard")
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts, "max_steps": 1}
        trainer(model, tmp_path / str(parts), save_strategy="no", optim="sgd", max_grad_norm=0.0, **options).train()
        embeddings.append(model.model.embedding.weight.detach())
    torch.testing.assert_close(embeddings[0], embeddings[1], rtol=0, atol=1e-7)
