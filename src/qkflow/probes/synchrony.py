r"""Synchronisation of the tokens of a text along the depth of a Kuramoto model.

    R_j = |\frac{1}{T} \sum_t g_{tj}| / |g|                           order parameter of a coordinate              (1)
    L_{tu} = \frac{1}{J} \sum_j <g_{tj}, g_{uj}> / |g|^2              phase locking of two tokens, j over a head   (2)
    E_t = -\frac{1}{J} \sum_j <g_{tj}, \sum_u A_{tu} g_{uj}> / |g|^2  energy of a row, A the layer's map           (3)

All elements of a group have the same norm |g|. On the torus (2) is the mean of \cos(\theta_{tj} - \theta_{uj}): 1 for
equal phases, 0 for unrelated ones, -1 for opposite ones. It is the score without gates and rotary positions, so it
measures similarity, not attention; its mean over all pairs, t = u included, is the mean of R_j^2. (3) is
`qkflow.ops.kuramoto.energy` per coordinate: the layer's update is its descent in g_t. With frustration the sum over u
is rotated by the lag, and harmonics m add the terms a_m / m <g_t^m, ...>, so this stays true.

A layer is measured at three stages: its input (`before`), after its attention (`attended`), and its output (`after`),
because the feed-forward network moves tokens as well. Numbers are computed in float64 on the CPU, on the first sequence
of a batch. They describe synchronization, not whether it helps; `qkflow compare` measures that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from qkflow.mechanisms.base import Stream
from qkflow.mechanisms.kuramoto import SynchronyMechanism
from qkflow.models import Decoder
from qkflow.ops import kuramoto
from qkflow.ops.groups import Group
from qkflow.probes.attention import cpu_float64, mechanism_inputs, record_inputs
from qkflow.probes.diagnostics import Diagnostic, diagnostics

Elements = Float[Tensor, "t h e a"]
"""The group elements of each head as points, for one sequence."""
Stage = Literal["before", "attended", "after"]

_MAX_WHEELS = 4
"""Maximum number of heads whose phases are drawn."""
_DIGITS = 3
"""Decimal digits in diagnostics, which have many numbers."""


@dataclass(frozen=True, kw_only=True)
class RowEnergy:
    """Energy per head, averaged over tokens, all with the layer's own map."""

    before: tuple[float, ...]
    """At the input of the layer."""
    single: tuple[float, ...]
    """With one token updated and the others fixed: decreases for small steps."""
    after: tuple[float, ...]
    """With all tokens updated: need not decrease."""


@dataclass(frozen=True, kw_only=True)
class TokenPair:
    """The phase locking of two tokens, averaged over heads; positions count from 0."""

    first: int
    second: int
    tokens: tuple[int, int]
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class PhaseStats:
    """Synchronisation in one layer on one text; order parameters per head and coordinate."""

    group: str
    order: tuple[tuple[float, ...], ...]
    """At the input."""
    order_attended: tuple[tuple[float, ...], ...]
    """After attention."""
    order_after: tuple[tuple[float, ...], ...]
    """At the output."""
    locking_before: float
    """Mean over heads and pairs of different tokens."""
    locking_after: float
    energy: RowEnergy
    strongest: tuple[TokenPair, ...]
    """The pairs with the largest locking at the output."""
    most_increased: tuple[TokenPair, ...]
    """The pairs whose locking increases most."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerPhases:
    """The phases of one text in one layer: float64 on the CPU."""

    tokens: tuple[int, ...]
    group: Group
    before: Elements
    attended: Elements
    after: Elements
    energy: RowEnergy

    def order(self, stage: Stage = "before") -> Float[Tensor, "h e"]:
        """Return the order parameter (1) of each head and coordinate."""
        return order(getattr(self, stage))

    def locking(self, stage: Stage = "before") -> Float[Tensor, "h t u"]:
        """Return the phase locking (2) of each pair of tokens in each head."""
        return locking(getattr(self, stage))

    def pairs(self, count: int = 5, *, by: Literal["locking", "change"] = "locking") -> tuple[TokenPair, ...]:
        """Return the pairs with the largest locking at the output, or with the largest increase.

        Only pairs of different tokens: equal tokens have equal embeddings.
        """
        before, after = self.locking("before").mean(0), self.locking("after").mean(0)
        ids = torch.tensor(self.tokens)
        later, earlier = torch.tril_indices(len(ids), len(ids), -1)
        is_different = ids[later] != ids[earlier]
        later, earlier = later[is_different], earlier[is_different]
        score = (after if by == "locking" else after - before)[later, earlier]
        best = score.argsort(descending=True, stable=True)[:count]
        return tuple(
            TokenPair(
                first=first,
                second=second,
                tokens=(self.tokens[first], self.tokens[second]),
                before=float(before[second, first]),
                after=float(after[second, first]),
            )
            for first, second in zip(earlier[best].tolist(), later[best].tolist(), strict=True)
        )

    def summary(self, pairs: int = 5) -> PhaseStats:
        """Return everything but the matrices, as plain data."""
        orders = {stage: tuple(map(tuple, self.order(stage).tolist())) for stage in ("before", "attended", "after")}
        return PhaseStats(
            group=self.group.name,
            order=orders["before"],
            order_attended=orders["attended"],
            order_after=orders["after"],
            locking_before=_mean_locking(self.locking("before")),
            locking_after=_mean_locking(self.locking("after")),
            energy=self.energy,
            strongest=self.pairs(pairs),
            most_increased=self.pairs(pairs, by="change"),
        )


def layer_phases(model: Decoder, tokens: Sequence[int] | Int[Tensor, " t"]) -> list[LayerPhases | None]:
    """Return the phases of each layer on one text; `None` for a layer without phases.

    >>> from qkflow.models import DecoderConfig
    >>> model = Decoder(DecoderConfig(width=32, layers=2, heads=4, hidden=64, mechanism="kuramoto"))
    >>> first, second = layer_phases(model, [72, 105, 33])
    >>> first.order().shape, first.locking("after").shape, second.before is not None
    (torch.Size([2, 16]), torch.Size([2, 3, 3]), True)
    """
    with record_inputs([model.norm]) as last_output:
        inputs = mechanism_inputs(model, tokens)
    outputs = [x for _, x in inputs[1:]] + last_output  # phase blocks pass their input to the mechanism unchanged
    layers: list[LayerPhases | None] = []
    for (layer, x), after in zip(inputs, outputs, strict=True):
        if isinstance(layer, SynchronyMechanism):
            before, attended, energy = attention_step(layer, x)
            stages = {"before": before, "attended": attended, "after": elements(layer, after)}
            ids = tuple(torch.as_tensor(tokens).tolist())
            layers.append(LayerPhases(tokens=ids, group=layer.group, energy=energy, **stages))
        else:
            layers.append(None)
    return layers


def _mean_locking(by_head: Float[Tensor, "h t u"]) -> float:
    """Mean over heads and pairs of different tokens; NaN for a single token."""
    n_tokens = by_head.shape[1]
    later, earlier = torch.tril_indices(n_tokens, n_tokens, -1)
    return float(by_head[:, later, earlier].mean())


def order(points: Elements) -> Float[Tensor, "h e"]:
    """Return the order parameter (1) of each head and coordinate: 0 for uniform phases, 1 for equal ones.

    >>> points = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]], [[[-1.0, 0.0], [0.0, 1.0]]]])
    >>> order(points).tolist()
    [[0.0, 1.0]]
    """
    return points.mean(0).norm(dim=-1) / _norm(points)


def locking(points: Elements) -> Float[Tensor, "h t u"]:
    """Return the phase locking (2) of each pair of tokens in each head, from -1 to 1.

    >>> locking(torch.tensor([[[[1.0, 0.0]]], [[[0.6, 0.8]]]])).round(decimals=6).tolist()
    [[[1.0, 0.6000000238418579], [0.6000000238418579, 1.0]]]
    """
    return einsum(points, points, "t h e a, u h e a -> h t u") / (points.shape[2] * _norm(points) ** 2)


def row_energy(
    points: Elements,
    z: Float[Tensor, "t h v"],
    group: Group,
    lag: Float[Tensor, "m h e"] | None = None,
    amplitude: Float[Tensor, "n h e"] | None = None,
) -> Float[Tensor, "t h"]:
    """Return the energy (3) of each token in each head, given the weighted values `z`."""
    power, energy = points, torch.zeros_like(points[..., 0, 0])
    means = z.unflatten(-1, (-1, *points.shape[2:])).unbind(2)  # [t h e a] per harmonic
    for m, mean in enumerate(means):
        if m:
            power = kuramoto.rotate_points(power, points)
        if lag is not None:
            mean = group.multiply(group.turn(lag[m]).expand_as(mean), mean)
        similarity = group.similarity(power, mean)
        term = similarity if m == 0 or amplitude is None else similarity * amplitude[m - 1] / (m + 1)
        energy = energy - term.mean(-1)
    return energy / _norm(points) ** 2


def elements(layer: SynchronyMechanism, x: Stream) -> Elements:
    """Return the elements of each head for the first sequence of a batch."""
    return layer.points(cpu_float64(x)).unflatten(-1, (-1, layer.group.ambient))[0]


def attention_step(layer: SynchronyMechanism, x: Stream) -> tuple[Elements, Elements, RowEnergy]:
    """Return the elements of the first sequence before and after the layer's attention, and the energies."""
    with torch.no_grad():
        x, group = x[:1], layer.group
        change = layer(x)[0]
        moved = group.retract(*(coordinates.unflatten(-1, (-1, group.size)) for coordinates in (x, change))).flatten(-2)
        map = cpu_float64(layer.weights(x))
        before, after = elements(layer, x), elements(layer, moved)
        z_before, z_after = (
            einsum(map, cpu_float64(layer.values(stream)), "b h t s, b s h v -> b t h v")[0] for stream in (x, moved)
        )
        lag, amplitude = (None if p is None else cpu_float64(p) for p in (layer.lag, layer.amplitude))
        energies = [
            tuple(row_energy(points, z, group, lag, amplitude).mean(0).tolist())
            for points, z in ((before, z_before), (after, z_before), (after, z_after))
        ]
    return before, after, RowEnergy(before=energies[0], single=energies[1], after=energies[2])


def _norm(points: Elements) -> Float[Tensor, ""]:
    return points[0, 0, 0].norm()  # the same for all elements


@diagnostics.register(SynchronyMechanism)
def _diagnostics(mechanism: SynchronyMechanism, x: Stream) -> tuple[Diagnostic, ...]:
    """Return order, energy and locking, and on the torus the phases."""
    before, _, energy = attention_step(mechanism, x)
    figures = [_order_figure(before), _energy_figure(energy), _locking_figure(before)]
    if before.shape[-1] == 2:  # elements of the torus are angles
        figures.append(_phase_figure(before))
    return tuple(figures)


def _order_figure(points: Elements) -> Diagnostic:
    n_tokens, heads = len(points), order(points).mean(1).tolist()
    return Diagnostic(
        title="order parameter along depth",
        kind="lines",
        x=("R",),
        series=tuple(f"head {n}" for n in range(1, len(heads) + 1)),
        values=tuple((round(value, _DIGITS),) for value in heads),
        y_label="order parameter R",
        note="Synchronisation of the tokens at the input of each layer, averaged over a head's coordinates: 1 if all"
        f" phases are equal, about {n_tokens**-0.5:.2f} for {n_tokens} random phases.",
    )


def _energy_figure(energy: RowEnergy) -> Diagnostic:
    series = {"input": energy.before, "one token updated": energy.single, "all tokens updated": energy.after}
    return Diagnostic(
        title="energy along depth",
        kind="lines",
        x=("E",),
        series=tuple(series),
        values=tuple((round(math.fsum(heads) / len(heads), _DIGITS),) for heads in series.values()),
        y_label="energy of a row",
        note="Minus the similarity of a token to what it attends to, averaged over heads; attention descends this"
        " energy. Shown at the input, with each token updated while the others are fixed, and with all tokens updated.",
    )


def _locking_figure(points: Elements) -> Diagnostic:
    by_head, n_tokens = locking(points), len(points)
    not_earlier = torch.ones(n_tokens, n_tokens, dtype=torch.bool).triu(0)
    cells = by_head.mean(0).masked_fill(not_earlier, math.nan).tolist()
    return Diagnostic(
        title="phase locking of tokens",
        kind="heat",
        x=tuple(float(n) for n in range(1, n_tokens + 1)),
        series=tuple(f"{n}" for n in range(1, n_tokens + 1)),
        values=tuple(tuple(round(value, _DIGITS) for value in row) for row in cells),
        x_label="token",
        y_label="locking",
        note="Mean cosine between the phases of two tokens at the input of the layer: 1 equal, 0 unrelated, -1"
        " opposite. Before the first layer, equal tokens have locking 1.",
    )


def _phase_figure(points: Elements) -> Diagnostic:
    by_coordinate = order(points)
    ranked = by_coordinate.mean(1).argsort(descending=True)
    evenly = torch.linspace(0, len(ranked) - 1, min(_MAX_WHEELS, len(ranked))).round().long()
    angles, series, values = torch.atan2(points[..., 1], points[..., 0]), [], []
    for choose in (torch.argmax, torch.argmin)[: points.shape[2]]:
        for head in sorted(ranked[evenly].tolist()):
            coordinate = int(choose(by_coordinate[head]))
            series.append(f"head {head + 1}, coordinate {coordinate + 1}")
            values.append(tuple(round(angle, _DIGITS) for angle in angles[:, head, coordinate].tolist()))
    return Diagnostic(
        title="phases of the tokens",
        kind="wheel",
        x=tuple(float(n) for n in range(1, len(points) + 1)),
        series=tuple(series),
        values=tuple(values),
        x_label="token",
        y_label="phase",
        note="The most and then the least synchronised coordinate of each head, at the input of the layer. Each point"
        " is a token at its phase, later tokens further out; the line is the mean, of length R.",
    )
