"""The papers' arms as models by name: `60m/hamiltonian` is coupled attention with as many parameters as `60m/standard`.

| name                                 | arm                                                          |
|--------------------------------------|--------------------------------------------------------------|
| `standard`, `differential`           | without a coupling                                           |
| `hamiltonian`, `euler`               | the paper's two couplings, one step                          |
| `hamiltonian-1` .. `hamiltonian-7`   | so many steps                                                |
| `uncoupled`                          | the control: as many parameters, and nothing passes          |
| `affine`, `differential-affine`      | the invertible coupling of the paper's second version        |
| `deltanet`, `gated-deltanet`         | memories that tokens correct                                 |
| `qdelta`                             | ... and correct for the query as well                        |
| `qdelta-0.2`, .. `qdelta-1`          | ... by a fixed part of it: 0.2, 0.5, 0.8 or all of it        |
| `qdelta-undecayed`                   | ... and never fade                                           |
| `kuramoto`, `kuramoto-frustrated`    | tokens as phases; drawn to successors, by a learned lag      |

The first five rows at 60m, 150m and 350m; without dynamics, and affine, at 455m too. The next two beside `standard` at
1m, 5m, and at the sizes of Q-Delta's paper, 340m and 1.3b, there with its heads: 6 with keys of 128 or 256 (ours at
those sizes: standard attention's 16 heads, a tied head, and the width of the feed-forward network). The two after them
at 340m, and the last at 1m and 5m.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from qkflow.errors import unknown
from qkflow.mechanisms.coupled import MAX_STEPS
from qkflow.models import DecoderConfig, matched, parameters, size

_ABLATION = {
    "qdelta-0.2": "qdelta:lam=0.2",
    "qdelta-0.5": "qdelta:lam=0.5",
    "qdelta-0.8": "qdelta:lam=0.8",
    "qdelta-1": "qdelta:lam=1.0",
    "qdelta-undecayed": "qdelta:decay=False",
}
ARMS: dict[str, str] = {
    "standard": "standard",
    "differential": "differential",
    "hamiltonian": "coupled",
    **{f"hamiltonian-{steps}": f"standard+hamiltonian:steps={steps}" for steps in range(1, MAX_STEPS + 1)},
    "euler": "standard+euler",
    "uncoupled": "standard+uncoupled",
    "affine": "standard+affine",
    "differential-affine": "differential+affine",
    "deltanet": "deltanet",
    "gated-deltanet": "gated-deltanet",
    "qdelta": "qdelta",
    **_ABLATION,
    "kuramoto": "kuramoto",
    "kuramoto-frustrated": "kuramoto:frustrated=True",
}
"""The spec of each arm by its short name."""

_MEMORIES = ("deltanet", "gated-deltanet", "qdelta")
_PHASES = ("kuramoto", "kuramoto-frustrated")
_HEADS = {"340m": "heads=6,key_width=128", "1.3b": "heads=6,key_width=256"}
"""What a memory's heads are where a paper says so."""
_FIRST = tuple(arm for arm in ARMS if arm not in (*_MEMORIES, *_ABLATION, *_PHASES))
_SECOND = ("standard", "differential", "affine", "differential-affine")
_SIZES = {
    **dict.fromkeys(("60m", "150m", "350m"), _FIRST),
    "455m": _SECOND,
    **dict.fromkeys(("1m", "5m"), ("standard", *_MEMORIES, *_PHASES)),
    "1.3b": ("standard", *_MEMORIES),
    "340m": ("standard", *_MEMORIES, *_ABLATION),
}
_NAMES = tuple(f"{size}/{arm}" for size, arms in _SIZES.items() for arm in arms)


def shape(name: str) -> DecoderConfig:
    """Standard attention at a size of the papers; 455m, which is not a size of `qkflow.models`, has a shape of ours.

    >>> parameters(shape("455m"))
    454166528
    """
    return replace(size("350m"), hidden=4096) if name == "455m" else size(name)


def models() -> Mapping[str, DecoderConfig]:
    """Every named model; a config is solved for when it is asked for, so that its parameters are `standard`'s.

    >>> models()["60m/hamiltonian"].mechanism, models()["60m/hamiltonian"].hidden
    ('coupled', 2107)
    >>> models()["340m/qdelta"].mechanism
    'qdelta:heads=6,key_width=128'
    """
    return _Models()


class _Models(Mapping[str, DecoderConfig]):
    def __getitem__(self, name: str) -> DecoderConfig:
        if name not in _NAMES:
            raise KeyError(str(unknown("model", name, _NAMES)))
        return _solved(*name.split("/"))

    def __contains__(self, name: object) -> bool:
        return name in _NAMES  # without solving for it

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


@cache
def _solved(size_name: str, arm: str) -> DecoderConfig:
    base, counted = shape(size_name), arm.partition("-")[0]
    if arm == "standard":
        return base
    if counted == "hamiltonian" and arm != counted:  # steps have no parameters of their own
        return replace(_solved(size_name, counted), mechanism=ARMS[arm])
    spec = ARMS[arm]
    if size_name in _HEADS:  # where every arm but standard is a memory
        spec += f"{',' if ':' in spec else ':'}{_HEADS[size_name]}"
    if arm in _PHASES:  # these have parameters outside their layers
        return matched(replace(base, mechanism=spec), parameters(base))
    return like_one_layer(base, spec)


def like_one_layer(base: DecoderConfig, spec: str, heads: int | None = None) -> DecoderConfig:
    """The base with this mechanism and, by the width of its feed-forward network, as many parameters as it has.

    For mechanisms that have parameters in their layers alone: then one layer tells the width of all, and is soon built.
    """
    one = replace(base, layers=1)
    found = matched(replace(one, heads=heads or base.heads, mechanism=spec), parameters(one))
    return replace(found, layers=base.layers)
