"""Tables and verdicts of `qkflow probe`: attention maps, couplings, delta-rule memories and phases.

A verdict states in words what the numbers show, and no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import TypeVar

from qkflow.formatting import MISSING, format_number, format_signed, plural, shorten
from qkflow.probes import AttentionStats, CouplingStats, MemoryStats, PhaseStats, RationaleConfidence
from qkflow.probes.attention import TAU, LayerAttention
from qkflow.report.probe_page import ProbePart
from qkflow.report.sections import Table, text_table

_Stats = TypeVar("_Stats")
_NOT_FINITE = "Some numbers are not finite: the model has diverged, or its activations overflow."
_MIN_DEPENDENCE = 0.01
"""A Jacobian block below this fraction of the identity counts as negligible."""
_MIN_GROWTH = 1e-6
"""A product whose norm exceeds one by no more than this does not count as growing."""
_MIN_CHANGE = 0.005
"""Smaller changes of order, locking and energy do not show in the table, and do not count as changes."""


def attention_section(stats: AttentionStats, rationale: RationaleConfidence | None, labels: Sequence[str]) -> ProbePart:
    """The attention maps of every mechanism; `labels` are the tokens of the text."""

    def cells(layer: LayerAttention) -> tuple[str, ...]:
        link = MISSING
        if (strongest := layer.strongest) is not None:
            query, key = (f"{_short(labels[n])} {n + 1}" for n in (strongest.query, strongest.key))
            weight = format_signed(strongest.weight, 2).lstrip("+")
            link = f"{query} ← {key}: {weight}, head {strongest.head + 1}"
        entropies = format_number(layer.entropy_last, 2), format_number(layer.entropy_mean, 2)
        tokens = format_number(layer.effective_tokens_last, 1), format_number(layer.effective_tokens_mean, 1)
        return *entropies, *tokens, link

    columns = ("layer", "H: last", "H: mean", "tokens: last", "tokens: mean", "strongest link")
    return ProbePart(
        name="maps",
        title="Attention of each layer",
        table=_layer_table("Sharpness of each layer's attention", columns, stats.layers, cells, text_columns=(0, 5)),
        verdict=_attention_verdict(stats, rationale, labels),
        note="H is the entropy of a head's attention in nats; tokens is exp(H), the effective number of attended"
        " tokens. Both are means over heads, for the last token and over all tokens. The strongest link is the largest"
        " weight between two different tokens in any head.",
    )


def _attention_verdict(stats: AttentionStats, rationale: RationaleConfidence | None, labels: Sequence[str]) -> str:
    counts = [layer.effective_tokens_last for layer in stats.layers]
    shares = stats.pooled["average"]
    if not _all_finite(shares):
        return _NOT_FINITE
    if sum(shares) == 0 or not _all_finite((counts[0], counts[-1])):
        return "On this text the last token attends to nothing in some layers."
    top = max(range(len(shares)), key=shares.__getitem__)
    attended = f"{counts[0]:.1f} of {len(shares)} tokens"
    if len(counts) > 1:
        attended = f"{attended} in the first layer and {counts[-1]:.1f} in the last"
    verdict = (
        f"On this text the last token attends to effectively {attended}; averaged over layers, most to"
        f" {_short(labels[top])} (token {top + 1}, {shares[top]:.2f} of its attention)."
    )
    if rationale is None:
        return f"{verdict} Sharp attention need not be on the right tokens: --rationale measures that."
    mass = rationale.mass["average"]
    return (
        f"{verdict} {mass:.2f} of it is on the rationale, {'at least' if mass >= TAU else 'less than'} {TAU:g};"
        f" uniform attention would have {rationale.uniform:.2f} there."
    )


def coupling_section(layers: Sequence[CouplingStats | None]) -> ProbePart:
    """The couplings of a model."""

    def cells(layer: CouplingStats) -> tuple[str, ...]:
        dt = MISSING if layer.dt is None else f"{layer.dt_start:g} → {format_number(layer.dt)}"
        blocks = format_number(layer.strength.key_on_query), format_number(layer.strength.query_on_key)
        drift = MISSING if layer.energy is None else f"{layer.energy.drift:.2g}"
        return layer.dynamics, dt, *blocks, drift

    columns = ("layer", "dynamics", "dt (initial → learned)", "|dk'/dq|", "|dq'/dk|", "energy drift")
    return ProbePart(
        name="coupling",
        title="Couplings",
        table=_layer_table("Strength of each layer's coupling", columns, layers, cells, text_columns=(0, 1)),
        verdict=coupling_verdict(layers),
        note="|dk'/dq| is how strongly a moved key depends on its query, |dq'/dk| the reverse; the identity has norm 1."
        " Energy drift is the relative energy error of a pair, if the force has a potential.",
    )


def coupling_verdict(layers: Sequence[CouplingStats | None]) -> str:
    """State whether queries and keys depend on each other."""
    stats = [layer for layer in layers if layer is not None]
    coupled = [layer for layer in stats if not layer.control]
    if not coupled:
        names = " and ".join(dict.fromkeys(layer.dynamics for layer in stats))
        return f"A control ({names}): queries and keys are independent by construction."
    on_query = [layer.strength.key_on_query for layer in coupled]
    on_key = [layer.strength.query_on_key for layer in coupled]
    if not _all_finite(on_query + on_key):
        return _NOT_FINITE
    n_layers = plural(len(coupled), "coupled layer")
    n_keys, n_queries = (sum(size >= _MIN_DEPENDENCE for size in sizes) for sizes in (on_query, on_key))
    if not n_keys and not n_queries:
        return f"Hardly used on this text: |dk'/dq| and |dq'/dk| are below {_MIN_DEPENDENCE} in all of {n_layers}."
    if not n_keys and all(layer.dt is not None for layer in coupled):
        return (
            f"Apparently unused on this text: |dk'/dq| is below {_MIN_DEPENDENCE} in all of {n_layers}. What remains is"
            " close to a drift of queries along their keys, which a linear projection could learn."
        )
    has_potential = any(layer.energy is not None for layer in coupled)
    return (
        f"On this text keys depend on their queries in {n_keys} of {n_layers} (|dk'/dq| at least {_MIN_DEPENDENCE}, up"
        f" to {max(on_query):.2g}), queries on their keys in {n_queries} (|dq'/dk| up to {max(on_key):.2g})."
        f"{' A potential does this before any training.' if has_potential else ''}"
        " Whether the coupling helps is a different question: qkflow compare answers it."
    )


def memory_section(layers: Sequence[MemoryStats | None]) -> ProbePart:
    """The delta-rule memories of a model."""
    window = max((norms.tokens for layer in layers if layer is not None for norms in layer.growth), default=0)
    product = f"{window} tokens" if window else "product"
    columns = ("layer", "beta a: mean", "95 %", "rho", "|T|", product, "|S| end", "bound/error")

    def cells(layer: MemoryStats) -> tuple[str, ...]:
        steps = format_number(layer.steps.mean), format_number(layer.steps.quantiles[-1])
        growth = _significant(layer.growth[-1].max) if layer.growth else MISSING
        sizes = format_number(layer.rho), format_number(layer.norm), growth, _significant(layer.memory[-1])
        return *steps, *sizes, _significant(layer.slack)

    return ProbePart(
        name="stability",
        title="Stability",
        table=_layer_table("Stability of each layer's memory", columns, layers, cells),
        verdict=_memory_verdict(layers),
        note="A token's error is multiplied by 1 - beta a, which shrinks it if beta a is in (0, 2); rho is the largest"
        " |1 - beta a|. |T| is the largest norm of a transition, then of a product of consecutive transitions. |S| is"
        " the norm of the memory at the end, bound/error the median ratio of the theorem's bound to the error.",
    )


def _memory_verdict(layers: Sequence[MemoryStats | None]) -> str:
    stats = [layer for layer in layers if layer is not None]
    numbers = [
        number
        for layer in stats
        for number in (layer.steps.mean, layer.rho, layer.norm, layer.allowed, layer.memory[-1])
    ]
    if not _all_finite((*numbers, *(norms.max for layer in stats for norms in layer.growth))):
        return _NOT_FINITE
    n_layers = plural(len(stats), "delta layer")
    outside = sum(layer.steps.outside for layer in stats) / len(stats)
    if outside == 0:
        rho = max(layer.rho for layer in stats)
        verdict = f"On this text every token's error shrinks in all of {n_layers} (rho at most {rho:.4g})"
    else:
        affected = sum(layer.steps.outside > 0 for layer in stats)
        verdict = (
            f"{100 * outside:.2g} % of the steps beta a are outside (0, 2), in {affected} of {n_layers}: these errors"
            " do not shrink"
        )
    growing = [layer for layer in stats if any(norms.max > 1 + _MIN_GROWTH for norms in layer.growth)]
    if growing:
        largest = max((norms for layer in growing for norms in layer.growth), key=lambda norms: norms.max)
        longest = max((layer.growth[-1] for layer in growing), key=lambda norms: norms.max)
        also = "" if longest.tokens == largest.tokens else f" and {longest.max:.3g} over {longest.tokens}"
        growth = f"grow in {len(growing)} of them, up to a factor of {largest.max:.3g} over {largest.tokens} tokens"
        verdict = f"{verdict}{', but' if outside == 0 else '; and'} products of transitions {growth}{also}"
    elif any(layer.growth for layer in stats):
        verdict = f"{verdict}{', and' if outside == 0 else '; but'} no product of transitions grows"
    allowed = max(layer.allowed for layer in stats)
    if allowed <= 1 + _MIN_GROWTH:
        return f"{verdict}. With these gates no queries and keys can make a memory grow over the whole text."
    return f"{verdict}. In the worst case a memory with these gates grows by a factor of {allowed:.3g} per token."


def phase_section(layers: Sequence[PhaseStats | None], labels: Sequence[str]) -> ProbePart:
    """The phases of a Kuramoto model; `labels` are the tokens of the text."""
    columns = ("layer", "R", "heads", "locking", "energy", "strongest pair")

    def cells(layer: PhaseStats) -> tuple[str, ...]:
        heads = [fmean(head) for head in layer.order]
        pair = MISSING
        if layer.strongest:
            tokens = (f"{_short(labels[n])} {n + 1}" for n in (layer.strongest[0].first, layer.strongest[0].second))
            pair = f"{' ~ '.join(tokens)}: {format_number(layer.strongest[0].after, 2)}"
        order = format_number(fmean(heads), 2), f"{format_number(min(heads), 2)}-{format_number(max(heads), 2)}"
        locking = _change(layer.locking_before, layer.locking_after)
        energy = _change(fmean(layer.energy.before), fmean(layer.energy.after))
        return *order, locking, energy, pair

    return ProbePart(
        name="phases",
        title="Phases",
        table=_layer_table("Synchronisation of the tokens", columns, layers, cells, text_columns=(0, 5)),
        verdict=_phase_verdict(layers, labels),
        note="R is the order parameter at the input of a layer, 1 if all phases are equal, and its range over heads."
        " Locking is the mean cosine between the phases of two tokens, before and after the layer. Energy is minus the"
        " similarity of tokens to what they attend to, before and after attention. The strongest pair is the pair of"
        " different tokens with the largest locking after the layer.",
    )


def _phase_verdict(layers: Sequence[PhaseStats | None], labels: Sequence[str]) -> str:
    stats = [layer for layer in layers if layer is not None]
    first, last = (fmean([fmean(head) for head in order]) for order in (stats[0].order, stats[-1].order_after))
    if not _all_finite((first, last, *(x for layer in stats for x in layer.energy.after))):
        return _NOT_FINITE
    change = "is about constant" if abs(last - first) < _MIN_CHANGE else "rises" if last > first else "falls"
    n_lower = sum(fmean(layer.energy.after) <= fmean(layer.energy.before) - _MIN_CHANGE for layer in stats)
    numbered = [(layer, number) for number, layer in enumerate(layers, start=1) if layer is not None]
    pairs = [(layer.most_increased[0], number) for layer, number in numbered if layer.most_increased]
    largest = ""
    if pairs:
        pair, number = max(pairs, key=lambda candidate: candidate[0].after - candidate[0].before)
        if pair.after - pair.before >= _MIN_CHANGE:
            largest = (
                f" Largest increase of locking: {_short(labels[pair.first])} (token {pair.first + 1}) and"
                f" {_short(labels[pair.second])} ({pair.second + 1}), from {format_signed(pair.before, 2)} to"
                f" {format_signed(pair.after, 2)} in layer {number}."
            )
    return (
        f"On this text the order parameter {change} from the first layer's input ({first:.2f}) to the last layer's"
        f" output ({last:.2f}), and attention lowers the energy by at least {_MIN_CHANGE} in {n_lower} of"
        f" {plural(len(stats), 'layer')}.{largest}"
        " Whether synchronization helps is a different question: qkflow compare answers it."
    )


def _layer_table(
    caption: str,
    columns: Sequence[str],
    layers: Sequence[_Stats | None],
    cells: Callable[[_Stats], tuple[str, ...]],
    text_columns: tuple[int, ...] = (0,),
) -> Table:
    """A table with one numbered row per layer; layers without statistics have empty cells."""
    empty = [MISSING] * (len(columns) - 1)
    rows = [(f"{n}", *(empty if layer is None else cells(layer))) for n, layer in enumerate(layers, start=1)]
    return text_table(caption=caption, columns=columns, rows=rows, text_columns=text_columns)


def _change(before: float, after: float) -> str:
    return f"{format_signed(before, 2)}→{format_signed(after, 2)}"


def _all_finite(values: Iterable[float]) -> bool:
    return all(map(math.isfinite, values))


def _significant(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else MISSING


def _short(label: str) -> str:
    return shorten(label, 8)
