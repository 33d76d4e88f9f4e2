"""Attention maps and exhibits of the arms' trained models, as data small enough to lie in a page.

A weight w of a head becomes one signed byte, 127 sign(w) sqrt(|w| / scale): the root keeps the faint ones apart, and
scale is the largest weight of the head. Only what a causal map can have is kept: row t has the tokens 0 to t.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qkflow.data import Tokenizer
from qkflow.probes import LayerProbe, probe_layers
from qkflow.probes.diagnostics import Diagnostic
from qkflow.report.wording import token_label
from qkflow.training import LoadedRun, load_run

LONGEST = 64
"""Tokens of an excerpt."""
ROOM = 2_000_000
"""Characters that all maps together may take in the page."""


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """What the models have to show."""

    excerpts: list[dict[str, Any]] = field(default_factory=list)
    """Of each excerpt: the label of each token, and where lines end."""
    arms: list[dict[str, Any]] = field(default_factory=list)
    """Of each arm with weights: its name, the layers shown, and for each excerpt, layer and head the packed map."""
    exhibits: dict[str, list[tuple[Diagnostic, ...]]] = field(default_factory=dict)
    """Of each arm, by layer, on the first excerpt."""
    missing: list[str] = field(default_factory=list)
    """A line for whatever could not be shown, and why."""
    configs: dict[str, Any] = field(default_factory=dict)
    """The config of each arm's run."""


def gather(names: Sequence[str], folder: Path, runs: Mapping[str, Path]) -> Gallery:
    """Load the arms one by one and look at each on the study's excerpts; what is not there is said and left out."""
    gallery = Gallery()
    excerpts = _excerpts(folder / "corpus.json", gallery.missing)
    seen: list[tuple[str, list[list[LayerProbe]]]] = []
    for name in names:
        if name not in runs:
            gallery.missing.append(f"{name}: no run is finished, so there are no weights to look at.")
            continue
        try:
            gallery.configs[name] = json.loads((Path(runs[name]) / "config.json").read_bytes())
            run = load_run(runs[name])
            layers = [probe_layers(run.model, tokens) for tokens in excerpts]
            if layers and not gallery.excerpts:
                gallery.excerpts.extend(labels(run.tokenizer, tokens) for tokens in excerpts)
        except Exception as error:  # a mechanism of the user's may raise anything, and the page must not be lost to it
            gallery.missing.append(f"{name}: its maps cannot be shown ({type(error).__name__}: {error}).")
            continue
        _notices(run, name, gallery.missing)
        if layers:
            gallery.exhibits[name] = [layer.diagnostics for layer in layers[0]]
            seen.append((name, layers))
    kept, step = _fitting([maps for _, maps in seen], gallery.missing)
    del gallery.excerpts[kept:]
    gallery.arms.extend(_arm(name, maps[:kept], step) for name, maps in seen)
    return gallery


def alone(name: str, layers: Sequence[LayerProbe], labelled: dict[str, Any]) -> Gallery:
    """One model on one text: every head of it, and beside them the mean of each layer's."""
    means = [LayerProbe(weights=layer.weights.mean(0, keepdim=True), diagnostics=()) for layer in layers]
    gallery = Gallery(excerpts=[labelled])
    _, step = _fitting([[list(layers)], [means]], gallery.missing)
    heads, mean = _arm(name, [layers], step), _arm("mean of the heads", [means], step)
    gallery.arms.extend([heads, {**mean, "pooled": True}])
    return gallery


def pack(weights: np.ndarray) -> dict[str, Any]:
    """One head `[t, s]` as a scale and the bytes of its lower triangle, row after row.

    >>> pack(np.array([[1.0, 0.0], [0.25, -1.0]]))
    {'scale': 1.0, 'data': 'f0CB'}
    """
    scale = float(np.abs(np.nan_to_num(weights)).max(initial=0.0))
    part = np.nan_to_num(weights[np.tril_indices(len(weights))]) / (scale or 1.0)
    packed = np.rint(127 * np.sign(part) * np.sqrt(np.abs(part))).astype(np.int8)
    return {"scale": float(f"{scale:.5g}"), "data": base64.b64encode(packed.tobytes()).decode()}


def unpack(head: Mapping[str, Any], tokens: int) -> np.ndarray:
    """What the page sees of a packed head.

    >>> unpack(pack(np.array([[1.0, 0.0], [0.25, -1.0]])), 2).round(2).tolist()
    [[1.0, 0.0], [0.25, -1.0]]
    """
    packed = np.frombuffer(base64.b64decode(head["data"]), dtype=np.int8).astype(np.float64)
    weights = np.zeros((tokens, tokens))
    weights[np.tril_indices(tokens)] = head["scale"] * np.sign(packed) * (packed / 127) ** 2
    return weights


def _excerpts(path: Path, missing: list[str]) -> list[list[int]]:
    try:
        data = json.loads(path.read_bytes())
        found = [[int(token) for token in item["tokens"][:LONGEST]] for item in data["excerpts"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        missing.append(f"The excerpts for attention maps cannot be read ({type(error).__name__}: {error}).")
        return []
    return [tokens for tokens in found if tokens]


def labels(tokenizer: Tokenizer, tokens: Sequence[int]) -> dict[str, Any]:
    """The name of each token, and the places where lines end."""
    pieces = [tokenizer.piece(token) for token in tokens]
    names = [token_label(piece, end=token == tokenizer.end) for piece, token in zip(pieces, tokens, strict=True)]
    return {"tokens": names, "breaks": [n for n, piece in enumerate(pieces) if piece.endswith(b"\n")]}


def _notices(run: LoadedRun, name: str, missing: list[str]) -> None:
    missing += [f"{name}: {notice}" for notice in run.notices]
    if not run.finished:
        missing.append(f"{name}: maps are those of step {run.step} of {run.config.steps}; the run is not finished.")


def _fitting(arms: Sequence[list[list[LayerProbe]]], missing: list[str]) -> tuple[int, int]:
    """How many excerpts, and every how many-th layer, fit into the page's room."""
    if not arms:
        return 0, 1
    excerpts, depth = len(arms[0]), max(len(layers) for maps in arms for layers in maps)
    kept, step = excerpts, 1
    while _characters(arms, kept, step) > ROOM and kept > 1:
        kept -= 1
    while _characters(arms, kept, step) > ROOM and step < depth:
        step += 1
    if kept < excerpts or step > 1:
        layers = "all layers" if step == 1 else f"every {step}th layer" if step > 3 else f"one layer in {step}"
        texts = "" if excerpts == 1 else f"{kept} of {excerpts} excerpts and "
        missing.append(f"To keep the page small, {texts}{layers} are shown.")
    return kept, step


def _characters(arms: Sequence[list[list[LayerProbe]]], kept: int, step: int) -> int:
    sizes = [layer.weights.shape for maps in arms for layers in maps[:kept] for layer in layers[::step]]
    return sum(heads * (4 * ((tokens * (tokens + 1) // 2 + 2) // 3) + 40) for heads, tokens, _ in sizes)


def _arm(name: str, maps: Sequence[Sequence[LayerProbe]], step: int) -> dict[str, Any]:
    layers = list(range(1, len(maps[0]) + 1))[::step] if maps else []
    packed = [[[pack(head) for head in layer.weights.double().numpy()] for layer in one[::step]] for one in maps]
    return {"name": name, "layers": layers, "depth": len(maps[0]) if maps else 0, "maps": packed}
