"""The papers' arms as named models: `60m/hamiltonian` is coupled attention with the parameter count of `60m/standard`.

`docs/reproduce.md` lists the arms of each size. At 340m and 1.3b the arms have the heads of Q-Delta's paper, except
`standard`, whose 16 heads, tied head and feed-forward width are ours.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from qkflow.errors import unknown
from qkflow.mechanisms.coupling import MAX_STEPS
from qkflow.models import DecoderConfig, matched, parameters, size

_COUPLED = {
    "standard": "standard",
    "differential": "differential",
    "hamiltonian": "coupled",
    **{f"hamiltonian-{steps}": f"standard+hamiltonian:steps={steps}" for steps in range(1, MAX_STEPS + 1)},
    "euler": "standard+euler",
    "uncoupled": "standard+uncoupled",
    "affine": "standard+affine",
    "differential-affine": "differential+affine",
}
_DELTA = {"deltanet": "deltanet", "gated-deltanet": "gated-deltanet", "qdelta": "qdelta"}
_ABLATION = {
    "qdelta-0.2": "qdelta:lam=0.2",
    "qdelta-0.5": "qdelta:lam=0.5",
    "qdelta-0.8": "qdelta:lam=0.8",
    "qdelta-1": "qdelta:lam=1.0",
    "qdelta-undecayed": "qdelta:decay=False",
}
_KURAMOTO = {"kuramoto": "kuramoto", "kuramoto-frustrated": "kuramoto:frustrated=True"}
ARMS: dict[str, str] = {**_COUPLED, **_DELTA, **_ABLATION, **_KURAMOTO}
"""The mechanism of each arm."""

_SIZES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("60m", "150m", "350m"), tuple(_COUPLED)),
    "455m": ("standard", "differential", "affine", "differential-affine"),
    **dict.fromkeys(("1m", "5m"), ("standard", *_DELTA, *_KURAMOTO)),
    "1.3b": ("standard", *_DELTA),
    "340m": ("standard", *_DELTA, *_ABLATION),
}
_HEADS = {"340m": "heads=6,key_width=128", "1.3b": "heads=6,key_width=256"}

MODELS: tuple[str, ...] = tuple(f"{size_name}/{arm}" for size_name, arms in _SIZES.items() for arm in arms)
"""The names that `named_model` takes."""


@cache
def named_model(name: str) -> DecoderConfig:
    """Return the config of a named model, with the feed-forward width that gives it the parameters of `standard`.

    >>> named_model("60m/hamiltonian").mechanism, named_model("60m/hamiltonian").hidden
    ('coupled', 2107)
    >>> named_model("340m/qdelta").mechanism
    'qdelta:heads=6,key_width=128'
    """
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    size_name, arm = name.split("/")
    base, spec = standard_config(size_name), ARMS[arm]
    if arm == "standard":
        return base
    if arm.startswith("hamiltonian-"):  # the number of steps does not change the parameters
        return replace(named_model(f"{size_name}/hamiltonian"), mechanism=spec)
    if arm in _KURAMOTO:  # which has parameters outside its layers
        return matched(replace(base, mechanism=spec), parameters(base))
    if size_name in _HEADS:
        spec += f"{',' if ':' in spec else ':'}{_HEADS[size_name]}"
    return match_layer(base, spec, base.heads)


def standard_config(size_name: str) -> DecoderConfig:
    """Return standard attention at a size of the papers; the shape at 455m is ours.

    >>> parameters(standard_config("455m"))
    454166528
    """
    return replace(size("350m"), hidden=4096) if size_name == "455m" else size(size_name)


def match_layer(base: DecoderConfig, spec: str, heads: int) -> DecoderConfig:
    """Return the base with this mechanism and, by its feed-forward width, the same number of parameters.

    Only for mechanisms whose parameters are all in their layers: one layer is matched, which is faster.
    """
    layer = replace(base, layers=1)
    return replace(matched(replace(layer, heads=heads, mechanism=spec), parameters(layer)), layers=base.layers)
