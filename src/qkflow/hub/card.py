"""The model card of an exported run: what it is, what it was trained on, how good it is, and how to use it."""

from __future__ import annotations

import shlex
from typing import Any

from qkflow.data import Tokenizer, WordTokenizer
from qkflow.training import LoadedRun

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- qkflow
---

# {title}

A causal language model of qkflow: attention whose queries and keys move.

| | |
|---|---|
{rows}

## Use

```python
{use}
```

{loading}

## Trained with

```
{command}
```
"""


def usage(folder: str, tokenizer: Tokenizer) -> tuple[str, ...]:
    """What to type to load the model of a folder and let it write."""
    prompt = tokenizer.words[0] if isinstance(tokenizer, WordTokenizer) else "The "
    return (
        "import qkflow.hf",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"model = AutoModelForCausalLM.from_pretrained({folder!r})",
        f"tokenizer = AutoTokenizer.from_pretrained({folder!r})",
        f"prompt = tokenizer({prompt!r}, return_tensors='pt')",
        "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=40)[0]))",
    )


def model_card(run: LoadedRun, environment: dict[str, Any], metrics: dict[str, Any] | None) -> str:
    """README.md of an exported run."""
    config, model = run.config, run.model.config
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    mechanism = model.mechanism if isinstance(model.mechanism, str) else ", ".join(model.mechanism)
    corpus = environment.get("corpus", {})
    rows = {
        "mechanism": f"`{mechanism}`",
        "parameters": f"{parameters:,} ({model.layers} layers of width {model.width}, {model.heads} heads)",
        "tokens": f"{run.tokenizer.vocabulary:,} of kind `{run.tokenizer.kind}`",
        "corpus": f"`{corpus.get('name', run.corpus.source)}` (SHA-256 `{corpus.get('digest', 'unknown')}`)",
        "trained for": f"{run.step:,} of {config.steps:,} steps of {config.batch} x {config.context} tokens",
        "seeds": f"{config.seed} for the model, {config.data_seed} for the data",
        **_quality(metrics),
    }
    return _CARD.format(
        title=f"A {mechanism} language model",
        rows="\n".join(f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in rows.items()),
        use="\n".join(usage("FOLDER", run.tokenizer)),
        loading="The first line needs `pip install 'qkflow[hf]'`; nothing in this folder is code.",
        command=shlex.join(environment.get("command") or ["qkflow", "train"]),
    )


def _quality(metrics: dict[str, Any] | None) -> dict[str, str]:
    """The last evaluation on held-out documents, if there was one."""
    if metrics is None:
        return {"held out": "not evaluated"}
    names = {"bits_per_byte": "bits per byte", "perplexity": "perplexity of a token", "accuracy": "accuracy"}
    found = {name: metrics[key] for key, name in names.items() if isinstance(metrics.get(key), int | float)}
    return {f"held-out {name}": f"{value:.4f} after {metrics['step']:,} steps" for name, value in found.items()}
