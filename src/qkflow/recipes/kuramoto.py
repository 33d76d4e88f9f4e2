"""The tables of "Kuramoto attention" (Nunley, https://arxiv.org/abs/2606.11585) and of its successor on frustration.

| what is published                                                     | recipe                                   |
|-----------------------------------------------------------------------|------------------------------------------|
| bits a character of enwik8 at 1M, five seeds                          | `kuramoto_1m`                            |
| the same at 5M, where the median and the mean go different ways       | `kuramoto_5m`                            |
| changes in bits a byte of CodeParrot (a later version)                | `kuramoto_code_1m`, `kuramoto_code_5m`   |
| bits a character of enwik8 at 1M with frustration                     | `frustrated_1m`                          |

The baseline is a transformer with rotary positions and SwiGLU: `standard`.
"""

from __future__ import annotations

from collections.abc import Mapping

from qkflow.data import CorpusConfig
from qkflow.recipes import scales
from qkflow.recipes.base import Recipe
from qkflow.recipes.claims import BitsChange, BitsPerCharacter, Claim, Outcome
from qkflow.recipes.scales import LAPTOP_TEXT, laptop, paper

_PAPER = "Nunley 2026, https://arxiv.org/abs/2606.11585"
_LATER = f"{_PAPER}, a later version, figures as reported by others who read it"
_SUCCESSOR = "Nunley 2026, frustrated synchronisation, https://arxiv.org/abs/2606.18694"

_ENWIK8 = CorpusConfig(source="enwik8")
_SEEDS = 5
"""The first paper's on enwik8; ours elsewhere."""
_BATCH = 32
_TOKENS, _PASSES = 1_000_000_000, 12.0
"""Bytes a run: the published figures are of convergence. enwik8 has 90M to train on."""
_RATE = 3e-3
"""That of studies at a laptop's scale, for models as small."""
_ARMS = "heads, gates, start, feed-forward, read-out and rates of their own"
_PLUS_MINUS = "whether a figure behind +- is a deviation over seeds or an error of the mean, we do not know"


def kuramoto_1m() -> Recipe:
    """Bits a character of enwik8 at 1M parameters, where Kuramoto attention is behind."""
    return _recipe(
        title="Kuramoto against standard attention, 1M parameters, enwik8",
        table={"standard": BitsPerCharacter(1.616, spread=0.004), "kuramoto": BitsPerCharacter(1.637, spread=0.010)},
        unclear=_PLUS_MINUS,
        size="1m",
    )


def kuramoto_5m() -> Recipe:
    """Bits a character of enwik8 at 5M parameters, better by the median of five seeds and worse by their mean."""
    words = "median 1.448 against 1.452, mean 1.468 against 1.456 bits a character, five seeds"
    return _recipe(
        title="Kuramoto against standard attention, 5M parameters, enwik8",
        table={"standard": None, "kuramoto": Outcome("unclear", words)},
        unclear="which way it went: Kuramoto attention is better by the median of the seeds (by 0.004 bits) and worse"
        " by their mean (by 0.012), so that there is no direction to agree with; a study judges the mean",
        size="5m",
    )


def kuramoto_code_1m() -> Recipe:
    """The change in bits a byte of CodeParrot at 1M parameters."""
    return _of_code("1m", BitsChange(0.013, 0.015))


def kuramoto_code_5m() -> Recipe:
    """The change in bits a byte of CodeParrot at 5M parameters."""
    return _of_code("5m", BitsChange(-0.012, -0.010), "0.012 less is of validation text, 0.010 of test text; ")


def frustrated_1m() -> Recipe:
    """Bits a character of enwik8 at 1M parameters, coupled to the successors of the attended tokens by a lag."""
    return _recipe(
        title="Frustrated Kuramoto against standard attention, 1M parameters, enwik8",
        source=_SUCCESSOR,
        table={
            "standard": BitsPerCharacter(1.611),
            "kuramoto:frustrated=True": BitsPerCharacter(1.5953, spread=0.0014),
        },
        unclear=f"how many harmonics the published kernel has, and how many seeds; {_PLUS_MINUS}",
        size="1m",
        arms="harmonics (1), ",
    )


def _of_code(size: str, change: BitsChange, which: str = "") -> Recipe:
    return _recipe(
        title=f"Kuramoto against standard attention, {size.upper()} parameters, CodeParrot",
        source=_LATER,
        table={"standard": None, "kuramoto": change},
        unclear=f"{which}the losses themselves, and how many seeds, we do not know",
        size=size,
        text="CodeParrot",
        bring=True,
    )


def _recipe(
    *,
    title: str,
    table: Mapping[str, Claim | None],
    unclear: str,
    size: str,
    source: str = _PAPER,
    text: str = "enwik8",
    bring: bool = False,
    arms: str = "",
) -> Recipe:
    names = tuple(table)
    at_size = paper(names, size, seeds=_SEEDS, batch=_BATCH, tokens=_TOKENS, rate=_RATE, passes=_PASSES)
    chosen = scales.ours(
        f"batch ({_BATCH} windows)",
        details="shape",
        tokens="bytes",
        seeds=None if source == _PAPER else _SEEDS,
        count=_TOKENS,
        rate=_RATE,
    )
    return Recipe(
        title=title,
        source=source,
        text=text,
        table=table,
        unclear=unclear,
        studies={"laptop": laptop(names), "paper": at_size},
        corpora={"laptop": LAPTOP_TEXT, "paper": CorpusConfig() if bring else _ENWIK8},
        bring=bring,
        ours=f"of the arms {arms}{_ARMS} (docs/kuramoto.md); {chosen}",
    )
