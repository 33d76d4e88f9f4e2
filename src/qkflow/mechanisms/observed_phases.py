r"""What can be seen of tokens on a group: how far they are in step, and what becomes of their energy.

    R_j = |\frac{1}{T} \sum_t g_{tj}| / |g|                           the order parameter of a coordinate          (1)
    L_{tu} = \frac{1}{J} \sum_j <g_{tj}, g_{uj}> / |g|^2              the locking of two tokens, j over a head     (2)
    E_t = -\frac{1}{J} \sum_j <g_{tj}, \sum_u A_{tu} g_{uj}> / |g|^2  the energy of a row, with the layer's map    (3)

All elements of a group are as long as each other. On the torus (2) is the mean of  \cos(\theta_{tj} - \theta_{uj}):  1
for the same phases, 0 for phases that have nothing to do with each other, -1 for opposite ones. It is the score without
gates and drift, so it says how alike two tokens are, not whether one looks at the other; its mean over all pairs, those
of a token with itself included, is the mean of R_j^2. And (3) is `qkflow.ops.kuramoto.energy`, for one coordinate: the
layer's update is its descent in g_t. With frustration the sum over u is turned by the lag, and with harmonics m there
are terms  a_m / m <g_t^m, ...>,  so that this stays true.

Figures are made in float64 on the CPU, from the first sequence of a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from qkflow.mechanisms.base import Diagnostic, Stream
from qkflow.ops import kuramoto
from qkflow.ops.groups import Group

Elements = Float[Tensor, "t h e a"]
"""The elements of each head as points in space, of one sequence."""

WHEELS = 4
"""Heads whose phases are shown, at most."""
DIGITS = 3
"""Digits of the numbers in an exhibit: there are many."""


@runtime_checkable
class Synchronising(Protocol):
    """What is looked at of a mechanism on a group."""

    @property
    def group(self) -> Group:
        """The group whose elements the stream holds."""
        ...

    @property
    def lag(self) -> Tensor | None:
        """What each harmonic's mean is turned by, `[m h e]`."""
        ...

    @property
    def amplitude(self) -> Tensor | None:
        """How strong the harmonics after the first are."""
        ...

    def __call__(self, x: Stream) -> tuple[Stream, object]:
        """How each token's coordinates change."""
        ...

    def points(self, x: Stream) -> Float[Tensor, "b t h p"]:
        """The elements of each head."""
        ...

    def weights(self, x: Stream) -> Float[Tensor, "b h t s"]:
        """The map."""
        ...

    def values(self, x: Stream) -> Float[Tensor, "b s h v"]:
        """What tokens pass on."""
        ...


@dataclass(frozen=True, kw_only=True)
class RowEnergy:
    """The energy of rows, by head, the mean over tokens; the map stays that of the layer."""

    before: tuple[float, ...]
    """As the layer finds them."""
    pulled: tuple[float, ...]
    """Of each token moved by the layer while all others stay: with small steps towards the mean it falls."""
    after: tuple[float, ...]
    """With all tokens moved: nothing says that this one falls."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pull:
    """What one layer's attention does to the tokens of a text."""

    before: Elements
    """As the layer finds them."""
    after: Elements
    """As it has drawn them."""
    energy: RowEnergy
    """Of the rows, before and after."""


def order(points: Elements) -> Float[Tensor, "h e"]:
    """The order parameter (1) of each head and coordinate: 0 for elements all around, 1 for elements in step.

    >>> half_a_turn = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]], [[[-1.0, 0.0], [0.0, 1.0]]]])
    >>> order(half_a_turn).tolist()
    [[0.0, 1.0]]
    """
    return points.mean(0).norm(dim=-1) / _length(points)


def locking(points: Elements) -> Float[Tensor, "h t u"]:
    """How far each two tokens are in step in each head (2), from -1 to 1.

    >>> locking(torch.tensor([[[[1.0, 0.0]]], [[[0.6, 0.8]]]])).round(decimals=6).tolist()
    [[[1.0, 0.6000000238418579], [0.6000000238418579, 1.0]]]
    """
    return einsum(points, points, "t h e a, u h e a -> h t u") / (points.shape[2] * _length(points) ** 2)


def row_energy(
    points: Elements,
    gathered: Float[Tensor, "t h v"],
    on: Group,
    lag: Float[Tensor, "m h e"] | None = None,
    amplitude: Float[Tensor, "n h e"] | None = None,
) -> Float[Tensor, "t h"]:
    """The energy (3) of each token in each head, from what its map gathers."""
    here, energy = points, torch.zeros_like(points[..., 0, 0])
    parts = gathered.unflatten(-1, (-1, *points.shape[2:])).unbind(2)  # [t h e a] for each harmonic
    for m, mean in enumerate(parts):
        if m:
            here = kuramoto.rotate_points(here, points)
        if lag is not None:
            mean = on.multiply(on.turn(lag[m]).expand_as(mean), mean)
        alike = on.similarity(here, mean)
        energy = energy - (alike if m == 0 or amplitude is None else alike * amplitude[m - 1] / (m + 1)).mean(-1)
    return energy / _length(points) ** 2


def elements(layer: Synchronising, x: Stream) -> Elements:
    """The elements of each head in the first sequence of a stream."""
    return layer.points(_precise(x)).unflatten(-1, (-1, layer.group.ambient))[0]


def pull(layer: Synchronising, x: Stream) -> Pull:
    """What a layer does to the first sequence of what it is given."""
    with torch.no_grad():
        x, on = x[:1], layer.group
        change = layer(x)[0]
        moved = on.retract(*(each.unflatten(-1, (-1, on.size)) for each in (x, change))).flatten(-2)
        map = _precise(layer.weights(x))
        before, after = (elements(layer, each) for each in (x, moved))
        found, left = (
            einsum(map, _precise(layer.values(each)), "b h t s, b s h v -> b t h v")[0] for each in (x, moved)
        )
        kernel = [None if part is None else _precise(part) for part in (layer.lag, layer.amplitude)]
        rows = [row_energy(*each, on, *kernel) for each in ((before, found), (after, found), (after, left))]
    means = [tuple(energy.mean(0).tolist()) for energy in rows]
    return Pull(before=before, after=after, energy=RowEnergy(before=means[0], pulled=means[1], after=means[2]))


def phase_exhibits(layer: Synchronising, x: Stream) -> tuple[Diagnostic, ...]:
    """Order along depth, energy along depth, the locking of tokens, and the wheels of phases that are angles."""
    seen = pull(layer, x)
    shown = [_order(order(seen.before), len(seen.before)), _energy(seen.energy), _locking(locking(seen.before))]
    if seen.before.shape[-1] == 2:  # else there is no circle to show them on
        shown.append(_wheels(seen.before))
    return tuple(shown)


def _order(by_coordinate: Float[Tensor, "h e"], tokens: int) -> Diagnostic:
    heads = by_coordinate.mean(1).tolist()
    return Diagnostic(
        title="order parameter along depth",
        kind="lines",
        x=("R",),
        series=tuple(f"head {n}" for n in range(1, len(heads) + 1)),
        values=tuple((round(value, DIGITS),) for value in heads),
        y_label="order parameter R",
        note="How far the tokens of a text are in step where each layer finds them, the mean over a head's coordinates:"
        f" 1 is all in one phase, and {tokens} tokens without any order come to about {tokens**-0.5:.2f}.",
    )


def _energy(energy: RowEnergy) -> Diagnostic:
    series = {"as found": energy.before, "each drawn alone": energy.pulled, "all drawn": energy.after}
    return Diagnostic(
        title="energy along depth",
        kind="lines",
        x=("E",),
        series=tuple(series),
        values=tuple((round(math.fsum(heads) / len(heads), DIGITS),) for heads in series.values()),
        y_label="energy of a row",
        note="Minus the likeness of a token to what it attends to, which is what attention descends: before it moves"
        " anything, for each token moved while the others stay, and with all of them moved; the mean over heads.",
    )


def _locking(by_head: Float[Tensor, "h t u"]) -> Diagnostic:
    tokens = by_head.shape[1]
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(0)
    cells = by_head.mean(0).masked_fill(later, math.nan).tolist()
    return Diagnostic(
        title="which tokens are in step",
        kind="heat",
        x=tuple(float(n) for n in range(1, tokens + 1)),
        series=tuple(f"{n}" for n in range(1, tokens + 1)),
        values=tuple(tuple(round(value, DIGITS) for value in row) for row in cells),
        x_label="token",
        y_label="locking",
        note="The mean over all coordinates of the cosine between two tokens' phases, where the layer finds them: 1 in"
        " step, 0 unrelated, -1 opposite. Before the first layer the same token is in step with itself everywhere.",
    )


def _wheels(points: Elements) -> Diagnostic:
    by_coordinate = order(points)
    ranked = by_coordinate.mean(1).argsort(descending=True)
    evenly = torch.linspace(0, len(ranked) - 1, min(WHEELS, len(ranked))).round().long()
    angles, series, values = torch.atan2(points[..., 1], points[..., 0]), [], []
    for choose in (torch.argmax, torch.argmin)[: points.shape[2]]:
        for head in sorted(ranked[evenly].tolist()):
            best = int(choose(by_coordinate[head]))
            series.append(f"head {head + 1}, coordinate {best + 1}")
            values.append(tuple(round(angle, DIGITS) for angle in angles[:, head, best].tolist()))
    return Diagnostic(
        title="phases of the tokens",
        kind="wheel",
        x=tuple(float(n) for n in range(1, len(points) + 1)),
        series=tuple(series),
        values=tuple(values),
        x_label="token",
        y_label="phase",
        note="Of each head the coordinate that is the most in step, then the one that is the least, where the layer"
        " finds them. A token lies at its phase, the later the further out; the line is the mean, R long.",
    )


def _precise(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float64)


def _length(points: Elements) -> Float[Tensor, ""]:
    """How long an element is, as a point in space: they are all alike."""
    return points[0, 0, 0].norm()
