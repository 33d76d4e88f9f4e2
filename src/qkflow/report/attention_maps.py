"""Attention maps of trained models, packed for a page, and texts shaded by their attention.

A weight w of a head becomes one signed byte, 127 sign(w) sqrt(|w| / scale), where scale is the largest weight of the
head: the square root keeps small weights distinguishable. Only the lower triangle of a causal map is stored.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from qkflow.data import Tokenizer
from qkflow.formatting import format_number, token_label
from qkflow.probes import LayerProbe, probe_layers
from qkflow.probes.diagnostics import Diagnostic
from qkflow.training import load_run

MAX_TOKENS = 64
"""Tokens of an excerpt."""
MAX_CHARACTERS = 2_000_000
"""Characters of all maps together in the page."""
MAX_WORDS = 80
"""In longer texts, stretches without attention are left out."""
CONTEXT_WORDS = 4
"""Words kept on either side of one that matters."""
_NOTED = 0.25
"""A word matters if its share is at least this fraction of the largest one."""
_MAX_ALPHA = 0.55
"""Opacity of the largest share; words stay readable."""


@dataclass(frozen=True, kw_only=True)
class AttentionMaps:
    """Attention maps and diagnostics of the trained model of each arm, on the same excerpts."""

    excerpts: list[dict[str, Any]] = field(default_factory=list)
    """For each excerpt: the label of each token, and the tokens that end a line."""
    arms: list[dict[str, Any]] = field(default_factory=list)
    """For each arm: its name, the layers shown, and the packed map of each excerpt, layer and head."""
    diagnostics: dict[str, list[tuple[Diagnostic, ...]]] = field(default_factory=dict)
    """For each arm, by layer, on the first excerpt."""
    missing: list[str] = field(default_factory=list)
    """What could not be shown, and why."""
    configs: dict[str, Any] = field(default_factory=dict)
    """The config of each arm's run."""


def load_maps(names: Sequence[str], study: Path, runs: Mapping[str, Path]) -> AttentionMaps:
    """Load the run of each arm and compute its maps on the excerpts of the study; report what is missing."""
    maps = AttentionMaps()
    excerpts = _read_excerpts(study / "corpus.json", maps.missing)
    by_arm: list[tuple[str, list[list[LayerProbe]]]] = []
    for name in names:
        if name not in runs:
            maps.missing.append(f"{name}: no finished run, so there are no attention maps.")
            continue
        try:
            maps.configs[name] = json.loads((Path(runs[name]) / "config.json").read_bytes())
            run = load_run(runs[name])
            looks = [probe_layers(run.model, tokens) for tokens in excerpts]
            if looks and not maps.excerpts:
                maps.excerpts.extend(label_tokens(run.tokenizer, tokens) for tokens in excerpts)
        except Exception as error:  # a user's mechanism may raise anything; the rest of the page is still useful
            maps.missing.append(f"{name}: attention maps failed ({type(error).__name__}: {error}).")
            continue
        maps.missing.extend(f"{name}: {notice}" for notice in run.notices)
        if not run.finished:
            maps.missing.append(f"{name}: unfinished run; the maps are of step {run.step} of {run.config.steps}.")
        if looks:
            maps.diagnostics[name] = [layer.diagnostics for layer in looks[0]]
            by_arm.append((name, looks))
    n_excerpts, step = _fit([looks for _, looks in by_arm], maps.missing)
    del maps.excerpts[n_excerpts:]
    maps.arms.extend(_pack_arm(name, looks[:n_excerpts], step) for name, looks in by_arm)
    return maps


def single_model_maps(name: str, layers: Sequence[LayerProbe], labels: dict[str, Any]) -> AttentionMaps:
    """The maps of one model on one text: every head, and the mean over heads next to it."""
    means = [LayerProbe(weights=layer.weights.mean(0, keepdim=True), diagnostics=()) for layer in layers]
    maps = AttentionMaps(excerpts=[labels])
    _, step = _fit([[list(layers)], [means]], maps.missing)
    heads, mean = _pack_arm(name, [layers], step), _pack_arm("mean over heads", [means], step)
    maps.arms.extend([heads, {**mean, "pooled": True}])
    return maps


def label_tokens(tokenizer: Tokenizer, tokens: Sequence[int]) -> dict[str, Any]:
    """The label of each token, and the indices of the tokens that end a line."""
    pieces = [tokenizer.piece(token) for token in tokens]
    labels = [token_label(piece, is_end=token == tokenizer.end) for piece, token in zip(pieces, tokens, strict=True)]
    return {"tokens": labels, "breaks": [n for n, piece in enumerate(pieces) if piece.endswith(b"\n")]}


def pack(weights: np.ndarray) -> dict[str, Any]:
    """One head `[t, s]` as its scale and the bytes of its lower triangle, row by row.

    >>> pack(np.array([[1.0, 0.0], [0.25, -1.0]]))
    {'scale': 1.0, 'data': 'f0CB'}
    """
    scale = float(np.abs(np.nan_to_num(weights)).max(initial=0.0))
    relative = np.nan_to_num(weights[np.tril_indices(len(weights))]) / (scale or 1.0)
    packed = np.rint(127 * np.sign(relative) * np.sqrt(np.abs(relative))).astype(np.int8)
    return {"scale": float(f"{scale:.5g}"), "data": base64.b64encode(packed.tobytes()).decode()}


def _read_excerpts(path: Path, missing: list[str]) -> list[list[int]]:
    try:
        record = json.loads(path.read_bytes())
        excerpts = [[int(token) for token in excerpt["tokens"][:MAX_TOKENS]] for excerpt in record["excerpts"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        missing.append(f"cannot read the excerpts for attention maps ({type(error).__name__}: {error}).")
        return []
    return [tokens for tokens in excerpts if tokens]


def _fit(arms: Sequence[list[list[LayerProbe]]], missing: list[str]) -> tuple[int, int]:
    """The number of excerpts, and the step between layers, that fit in the page."""
    if not arms:
        return 0, 1
    n_excerpts, depth = len(arms[0]), max(len(layers) for looks in arms for layers in looks)
    kept, step = n_excerpts, 1
    while _packed_size(arms, kept, step) > MAX_CHARACTERS and kept > 1:
        kept -= 1
    while _packed_size(arms, kept, step) > MAX_CHARACTERS and step < depth:
        step += 1
    if kept < n_excerpts or step > 1:
        layers = "all layers" if step == 1 else f"one layer in {step}"
        excerpts = "" if n_excerpts == 1 else f"{kept} of {n_excerpts} excerpts and "
        missing.append(f"To keep the page small, it shows {excerpts}{layers}.")
    return kept, step


def _packed_size(arms: Sequence[list[list[LayerProbe]]], n_excerpts: int, step: int) -> int:
    shapes = [layer.weights.shape for looks in arms for layers in looks[:n_excerpts] for layer in layers[::step]]
    return sum(heads * (4 * ((tokens * (tokens + 1) // 2 + 2) // 3) + 40) for heads, tokens, _ in shapes)


def _pack_arm(name: str, looks: Sequence[Sequence[LayerProbe]], step: int) -> dict[str, Any]:
    depth = len(looks[0]) if looks else 0
    maps = [[[pack(head) for head in layer.weights.double().numpy()] for layer in layers[::step]] for layers in looks]
    return {"name": name, "layers": list(range(1, depth + 1))[::step], "depth": depth, "maps": maps}


# Texts shaded by their attention.


@dataclass(frozen=True, kw_only=True)
class ColoredWord:
    """A word, or a stretch of words that was left out, under one model."""

    text: str
    hover: str
    """The share, shown under the pointer."""
    alpha: float
    """Opacity of the background."""
    is_marked: bool = False
    """Whether the word is part of the rationale."""
    is_gap: bool = False
    """Whether it stands for words that were left out."""
    ends_line: bool = False


@dataclass(frozen=True, kw_only=True)
class ColoredLine:
    """A text under one model."""

    name: str
    words: Sequence[ColoredWord]
    end: str
    """The text at the end of the row: a prediction or a number."""


def color_lines(
    words: Sequence[str],
    shares: Mapping[str, Sequence[float]],
    ends: Mapping[str, str],
    *,
    marked: Collection[int] = (),
    breaks: Collection[int] = (),
    max_words: int = MAX_WORDS,
) -> list[ColoredLine]:
    """One line per model, all on the scale of the largest share; `marked` words are the rationale.

    In a text of more than `max_words`, stretches without attention are left out.

    >>> lines = color_lines(["a", "b"], {"r = 1": [0.1, 0.9]}, {}, marked=[1])
    >>> [(word.hover, word.alpha, word.is_marked) for word in lines[0].words]
    [('a: 0.100', 0.183, False), ('b: 0.900', 0.55, True)]
    """
    largest = max((share for own in shares.values() for share in own if math.isfinite(share)), default=0.0)
    spans = [(0, len(words), False)] if len(words) <= max_words else _spans(words, shares, marked, largest)
    lines = []
    for name, own in shares.items():
        colored = []
        for begin, end, is_gap in spans:
            if is_gap:
                total = math.fsum(share for share in own[begin:end] if math.isfinite(share))
                hover = f"{end - begin} words: {format_number(total, 3)} in total"
                colored.append(ColoredWord(text=f"… {end - begin} words …", hover=hover, alpha=0.0, is_gap=True))
                continue
            for n in range(begin, end):
                colored.append(
                    ColoredWord(
                        text=words[n],
                        hover=f"{words[n]}: {format_number(own[n], 3)}",
                        alpha=opacity(own[n], largest),
                        is_marked=n in marked,
                        ends_line=n in breaks,
                    )
                )
        lines.append(ColoredLine(name=name, words=colored, end=ends.get(name, "")))
    return lines


def opacity(share: float, largest: float) -> float:
    """The opacity of a share; the square root keeps small ones distinguishable.

    >>> opacity(0.25, 1.0), opacity(0.0, 0.0), opacity(float("nan"), 1.0)
    (0.275, 0.0, 0.0)
    """
    if not math.isfinite(share) or largest <= 0:
        return 0.0
    return round(_MAX_ALPHA * math.sqrt(min(1.0, max(0.0, share) / largest)), 3)


def _spans(
    words: Sequence[str], shares: Mapping[str, Sequence[float]], marked: Collection[int], largest: float
) -> list[tuple[int, int, bool]]:
    """(begin, end, is_gap) of the stretches of a long text."""
    noted = {n for own in shares.values() for n, share in enumerate(own) if share >= _NOTED * largest > 0}
    matters = noted | set(marked) | {0, len(words) - 1}
    near = [any(abs(n - other) <= CONTEXT_WORDS for other in matters) for n in range(len(words))]
    spans = []
    for is_near, group in groupby(range(len(words)), key=near.__getitem__):
        indices = list(group)
        spans.append((indices[0], indices[-1] + 1, not is_near))
    return spans
