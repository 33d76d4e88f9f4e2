"""The tables of "Coupled query-key dynamics" (Gahtan & Bronstein, https://arxiv.org/abs/2604.01683), one function each.

| what is published                                        | recipe                                            |
|----------------------------------------------------------|---------------------------------------------------|
| perplexities at 60M, and that the control spreads more   | `coupled_60m`, `coupled_control`                  |
| Hamiltonian and Euler perform the same; so do 1-7 steps  | `coupled_integrators`, `coupled_steps`            |
| a change of perplexity at 150M, three figures at 350M    | `coupled_150m`, `coupled_350m`                    |
| a change of perplexity on two other texts                | `coupled_corpora_pubmed`, `coupled_corpora_web`   |
| p = 0.003 for the affine coupling (second version)       | `coupled_affine`                                  |
"""

from __future__ import annotations

from collections.abc import Mapping

from qkflow.data import CorpusConfig
from qkflow.mechanisms.coupled import MAX_STEPS
from qkflow.recipes import scales
from qkflow.recipes.base import Recipe
from qkflow.recipes.claims import Claim, Outcome, Perplexity, PerplexityChange
from qkflow.recipes.ratios import PublishedRatio
from qkflow.recipes.scales import LAPTOP_TEXT, WIKITEXT, laptop, paper

_PAPER = "Gahtan & Bronstein 2026, https://arxiv.org/abs/2604.01683"
_SECOND = "Gahtan & Bronstein 2026, second version, https://arxiv.org/abs/2604.01683v2"

_COUPLED = Perplexity(22.55, 22.62)
_UNCOUPLED = Perplexity(23.81)
_WHICH = "22.55 and 22.62 are Hamiltonian's and Euler's, we do not know which is whose: both are shown with the range"
_SPREADS = PublishedRatio(quantity="variance over seeds", arm="standard+uncoupled", against="coupled", published=8.0)
_TIMES = PublishedRatio(quantity="seconds a token", arm="coupled", against="standard", published=2.4)
_WHERE = "the {} may be of another size or text: we do not know of which"


def coupled_60m() -> Recipe:
    """Perplexity of WikiText-103 at 60M parameters, with the control."""
    return _recipe(
        title="Coupled against standard attention, 60M parameters, WikiText-103",
        table={
            "standard": Perplexity(24.22),
            "coupled": _COUPLED,
            "standard+euler": _COUPLED,
            "standard+uncoupled": _UNCOUPLED,
        },
        unclear=f"{_WHICH}; {_WHERE.format('ratios of variances and of times')}",
        ratios=(_SPREADS, _TIMES),
        seeds=5,
    )


def coupled_control() -> Recipe:
    """Whether it is the coupling: against the control, which has as many parameters and passes nothing."""
    return _recipe(
        title="Coupled attention against its uncoupled control, 60M parameters, WikiText-103",
        table={"standard+uncoupled": _UNCOUPLED, "coupled": _COUPLED, "standard+euler": _COUPLED},
        unclear=f"{_WHICH}; {_WHERE.format('ratio of variances')}",
        ratios=(_SPREADS,),
        seeds=5,
    )


def coupled_integrators() -> Recipe:
    """Hamiltonian against Euler, which have the same parameters."""
    return _recipe(
        title="Euler against Hamiltonian coupling",
        table={"coupled": None, "standard+euler": Outcome("equivalent", "performs the same as Hamiltonian")},
        unclear="at 60M one of them has perplexity 22.55 and the other 22.62, we do not know which",
        seeds=5,
        ours=scales.ours("margin of equivalence", seeds=5),
    )


def coupled_steps() -> Recipe:
    """One to seven steps of the Hamiltonian coupling."""
    first, *others = (f"standard+hamiltonian:steps={steps}" for steps in range(1, MAX_STEPS + 1))
    same = Outcome("equivalent", "1 to 7 steps perform the same")
    return _recipe(
        title="Two to seven steps of Hamiltonian coupling against one",
        table={first: None, **dict.fromkeys(others, same)},
        unclear="at which size and on which text, we do not know",
        text="a text that is not known",
        ours=scales.ours("size (60m)", "text (WikiText-103)", "margin of equivalence"),
    )


def coupled_150m() -> Recipe:
    """The change of perplexity on WikiText-103 at 150M parameters."""
    return _recipe(
        title="Coupled against standard attention, 150M parameters, WikiText-103",
        table={"standard": None, "coupled": PerplexityChange(-0.067)},
        size="150m",
    )


def coupled_350m() -> Recipe:
    """Perplexity of WikiText-103 at 350M parameters, with differential attention."""
    return _recipe(
        title="Coupled and differential against standard attention, 350M parameters, WikiText-103",
        table={
            "standard": Perplexity(19.55, derived=True),
            "coupled": Perplexity(19.35),
            "differential": Perplexity(18.93),
        },
        derived="standard's 19.55: coupled attention's 19.35 is printed as 1.0 % below it",
        size="350m",
    )


def coupled_corpora_pubmed() -> Recipe:
    """The change of perplexity on PubMed."""
    return _of_text("PubMed", PerplexityChange(-0.045))


def coupled_corpora_web() -> Recipe:
    """The change of perplexity on heterogeneous web text, where coupling harms."""
    return _of_text("heterogeneous web text", PerplexityChange(0.103))


def coupled_affine() -> Recipe:
    """The affine coupling on top of differential attention, of which only a p value is known."""
    better = Outcome("better", "p = 0.003 over six seeds, at length 512")
    return _recipe(
        title="Affine coupling on differential attention, 455M parameters, WikiText-103",
        source=_SECOND,
        table={"differential": None, "differential+affine": better},
        unclear="by how much, we do not know; that the p value is of a gain over differential alone is our reading",
        size="455m",
        seeds=6,
        ours=scales.ours(context=False, seeds=None),
    )


def _of_text(text: str, change: PerplexityChange) -> Recipe:
    return _recipe(
        title=f"Coupled against standard attention, {text}",
        table={"standard": None, "coupled": change},
        unclear="at which size, we do not know",
        text=text,
        bring=True,
        ours=scales.ours("size (60m)"),
    )


def _recipe(
    *,
    title: str,
    table: Mapping[str, Claim | None],
    source: str = _PAPER,
    text: str = "WikiText-103",
    derived: str | None = None,
    unclear: str | None = None,
    ratios: tuple[PublishedRatio, ...] = (),
    size: str = "60m",
    seeds: int = 3,
    bring: bool = False,
    ours: str | None = None,
) -> Recipe:
    arms = tuple(table)
    return Recipe(
        title=title,
        source=source,
        text=text,
        table=table,
        derived=derived,
        unclear=unclear,
        ratios=ratios,
        studies={"laptop": laptop(arms), "paper": paper(arms, size, seeds=seeds)},
        corpora={"laptop": LAPTOP_TEXT, "paper": CorpusConfig(tokens="gpt2") if bring else WIKITEXT},
        bring=bring,
        ours=scales.ours(seeds=seeds) if ours is None else ours,
    )
