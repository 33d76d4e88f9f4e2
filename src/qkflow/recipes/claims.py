"""The published claims, each with the studies that test it and the rule that decides it.

Every claim is tested at laptop scale. Language models have 100k parameters and are trained on two million tokens of
enwik8, with rates tuned per arm over the same three values; classifiers are those of `qkflow sharpen`. Rules and
margins are fixed here before any run. `main` (or the studies that the criterion names) decides the claim; the other
studies are controls for its confounds, or larger models, and are reported beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qkflow.errors import unknown
from qkflow.recipes.criteria import (
    MAIN,
    Criterion,
    all_of,
    equality,
    inferiority,
    interaction,
    non_inferiority,
    superiority,
    variance_ratio,
)
from qkflow.recipes.studies import SEEDS, LanguageStudy, Study, TaskStudy
from qkflow.recipes.task_criteria import accuracy, equal, higher, mass_between, mass_trend, metric, not_lower, stability


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published claim, and how it is tested."""

    number: int
    name: str
    """The name on the command line."""
    text: str
    """What is claimed, in one sentence."""
    published: str
    """The figure of the paper."""
    source: str
    kind: str
    """The kind of claim, for tables."""
    criterion: Criterion
    """Decides from the results of the studies."""
    studies: Mapping[str, Study]
    """The studies by name."""
    unclear: str = ""
    """What the paper leaves open, or what differs here."""
    deciding: tuple[str, ...] = field(default=(MAIN,))
    """The studies that the criterion reads."""


def study(
    *arms: str,
    source: str = "enwik8",
    size: str = "100k",
    tokens: int | None = None,
    seeds: int = SEEDS,
    **options: Any,
) -> LanguageStudy:
    """A study of language models."""
    return LanguageStudy(arms=arms, source=source, size=size, tokens=tokens, seeds=seeds, options=options)


_COUPLED = "Gahtan & Bronstein 2026, https://arxiv.org/abs/2604.01683"
_QDELTA = "Park, Kim & Park 2026, https://arxiv.org/abs/2606.08804"
_KURAMOTO = "Nunley 2026, https://arxiv.org/abs/2606.11585"
_FRUSTRATED = "Nunley 2026, https://arxiv.org/abs/2606.18694"
_STEPS = ("standard+hamiltonian:steps=3", "standard+hamiltonian:steps=7")
_FIXED_LAMBDA = tuple(f"qdelta:lam={value}" for value in (0.2, 0.5, 0.8, 1.0))
_SHARPEN = "Vashisht & Ramaswamy 2026, https://arxiv.org/abs/2608.06776"
_POINT = 0.01
"""One percentage point: the margin of accuracies and of attention mass."""
_FASTER = {"ratios": (1.0, 20.0)}
_TASKS = {
    "agreement": TaskStudy(
        task="agreement", files="agreement/lm_syneval_emnlp2018.jsonl.xz", readings=6, options=_FASTER
    ),
    "hatexplain": TaskStudy(task="hatexplain", files="hatexplain", readings=6, options=_FASTER),
    "squad": TaskStudy(task="squad-entities", files="squad", seeds=5, test=2500, readings=6, options=_FASTER),
}
"""Faster query-key learning against the baseline on the three tasks of the paper, each arm at its best rate."""
_STABILITY_RATES = {"best rate": 5e-3, "1.7 x": 8.7e-3, "3 x": 1.5e-2}
"""The best learning rate of Q-Delta at 100k parameters, and up to three times that."""
_CONVOLVED = study("standard", "standard:conv=4", "gated-deltanet", "qdelta")
LONG = "20m-tokens"
"""The name of the study with the longest runs."""
_LONG = study(
    "standard",
    "kuramoto",
    "kuramoto:frustrated=True",
    size="500k",
    tokens=20_000_000,
    seeds=2,
    adaptive=False,
)
"""The gap to standard attention over many tokens: Kuramoto attention is published at convergence."""

CLAIMS: tuple[Claim, ...] = (
    Claim(
        number=1,
        name="coupled-better",
        text="coupled attention has a lower loss than standard attention at equal tokens",
        published="perplexity 24.22 to 22.55 (60M, WikiText-103)",
        source=_COUPLED,
        kind="superiority",
        criterion=superiority("coupled"),
        studies={
            MAIN: study("standard", "coupled"),
            "qk-norm": study("standard:qk_norm=True", "coupled:qk_norm=before", "coupled:qk_norm=after"),
            "nonlinear": study("standard", "coupled", "nonlinear-query", "standard+residual-query"),
            "500k": study("standard", "coupled", size="500k", seeds=5),
        },
    ),
    Claim(
        number=2,
        name="hamiltonian-equals-euler",
        text="the Hamiltonian and the Euler coupling perform the same",
        published="perplexity 22.55 and 22.62",
        source=_COUPLED,
        kind="equality",
        criterion=equality("standard+euler"),
        studies={MAIN: study("coupled", "standard+euler", seeds=30)},
    ),
    Claim(
        number=3,
        name="uncoupled-between",
        text="the uncoupled control lies between standard and coupled attention",
        published="perplexity 24.22, 23.81, 22.55",
        source=_COUPLED,
        kind="two superiorities",
        criterion=all_of(inferiority("standard"), superiority("coupled")),
        studies={MAIN: study("standard+uncoupled", "standard", "coupled", seeds=15)},
    ),
    Claim(
        number=4,
        name="uncoupled-variance",
        text="the uncoupled control has several times the variance over seeds of coupled attention",
        published="8 times",
        source=_COUPLED,
        kind="variance ratio above 2",
        criterion=variance_ratio("standard+uncoupled", "coupled", above=2.0),
        studies={MAIN: study("coupled", "standard+uncoupled", seeds=20, adaptive=False)},
        unclear="we do not know the number of seeds behind the published ratio",
    ),
    Claim(
        number=5,
        name="steps-equal",
        text="one, three and seven steps of the coupling do not differ",
        published="no difference from 1 to 7 steps",
        source=_COUPLED,
        kind="equality",
        criterion=equality(*_STEPS),
        studies={MAIN: study("coupled", *_STEPS, seeds=30)},
    ),
    Claim(
        number=6,
        name="coupled-seconds",
        text="coupled attention is at least level with standard attention at equal training time",
        published="standard attention with 2.4 times the tokens draws level",
        source=_COUPLED,
        kind="non-inferiority",
        criterion=non_inferiority("coupled"),
        studies={MAIN: study("standard", "coupled", seeds=15, match="seconds")},
        unclear="the published model takes 2.4 times as long per token; ours does not",
    ),
    Claim(
        number=7,
        name="coupled-text",
        text="coupled attention helps on coherent text and hurts on mixed web text",
        published="PubMed -4.5 %, web text +10.3 % perplexity",
        source=_COUPLED,
        kind="interaction",
        criterion=interaction("coupled", helps="medline", hurts="web"),
        studies={
            "medline": study("standard", "coupled", source="medline.jsonl", seeds=15, adaptive=False),
            "web": study("standard", "coupled", source="web.jsonl", seeds=15, adaptive=False),
        },
        deciding=("medline", "web"),
        unclear="MEDLINE abstracts and a mixture of six sources instead of the paper's texts",
    ),
    Claim(
        number=8,
        name="coupled-glue",
        text="coupled attention makes no difference on GLUE",
        published="no difference",
        source=_COUPLED,
        kind="equality, 1 point",
        criterion=metric("performance", "coupled", equal(_POINT)),
        studies={
            MAIN: TaskStudy(task="sst2", files="glue/SST-2", seeds=20, options={"arms": ("standard", "coupled")}),
        },
        unclear="accuracy on phrases of SST-2, by models trained from scratch; the paper fine-tunes",
    ),
    Claim(
        number=9,
        name="mass-grows",
        text="attention mass on relevant tokens grows with r at equal loss",
        published="the mass increases with r (figure)",
        source=_SHARPEN,
        kind="trend over r",
        criterion=mass_trend(higher(_POINT)),
        studies={
            MAIN: TaskStudy(
                task="agreement",
                files="agreement/lm_syneval_emnlp2018.jsonl.xz",
                options={"ratios": (1.0, 5.0, 20.0)},
            ),
        },
        unclear="per doubling of r, at the lowest validation loss that all runs reach",
    ),
    Claim(
        number=10,
        name="confidence-up",
        text="faster query-key learning raises attention confidence at equal performance on three tasks",
        published="AC 41.67 to 76.85 (agreement), 0.00 to 43.50 (HateXplain), 12.65 to 42.95 (SQuAD)",
        source=_SHARPEN,
        kind="superiority and non-inferiority",
        criterion=all_of(
            *(metric("confident", "r = 20", higher(_POINT), study=name) for name in _TASKS),
            *(metric("performance", "r = 20", not_lower(_POINT), study=name) for name in _TASKS),
        ),
        studies=_TASKS,
        deciding=tuple(_TASKS),
        unclear="the published arms speed up embeddings, too, and are not tuned alike; SQuAD here: which "
        "entity of the sentence answers the question?",
    ),
    Claim(
        number=11,
        name="comprehensiveness-up",
        text="faster query-key learning raises comprehensiveness on three tasks",
        published="0.24 to 0.30 (agreement), 0.40 to 0.48 (HateXplain), 0.38 to 0.53 (SQuAD)",
        source=_SHARPEN,
        kind="superiority",
        criterion=all_of(*(metric("comprehensiveness", "r = 20", higher(_POINT), study=name) for name in _TASKS)),
        studies=_TASKS,
        deciding=tuple(_TASKS),
        unclear="as for the claim before",
    ),
    Claim(
        number=12,
        name="factorised-collapsed",
        text="factorised training equals collapsed training with a growing rate",
        published="the same attention mass at equal loss (figure)",
        source=_SHARPEN,
        kind="equality, 5 points",
        criterion=mass_between(("factorised", "r = 1"), ("collapsed", "r = 1 to 10"), equal(0.05)),
        studies={
            "factorised": TaskStudy(task="synthetic", options={"ratios": (1.0, 20.0), "form": "FAFO"}),
            "collapsed": TaskStudy(task="synthetic", options={"ratios": (1.0,), "growths": (10.0,), "form": "CACO"}),
        },
        deciding=("factorised", "collapsed"),
        unclear="the growth of 10 is that of the published code for collapsed training",
    ),
    Claim(
        number=13,
        name="qdelta-better",
        text="Q-Delta is at least as good as Gated DeltaNet in language modelling, and better",
        published="average accuracy 46.01 to 47.24 (340M)",
        source=_QDELTA,
        kind="superiority",
        criterion=superiority("qdelta"),
        studies={
            MAIN: study("gated-deltanet", "qdelta", seeds=20),
            "own-erase": study("gated-deltanet", "qdelta", "qdelta:erase=own"),
            "convolved": _CONVOLVED,
            "500k": study("gated-deltanet", "qdelta", size="500k", seeds=5),
        },
        unclear="the paper's main figures are accuracies on tasks; here it is the loss",
    ),
    Claim(
        number=14,
        name="qdelta-needles",
        text="Q-Delta finds needles better than Gated DeltaNet",
        published="accuracy 83.51 to 90.02 (S-NIAH, 1.3B)",
        source=_QDELTA,
        kind="superiority",
        criterion=accuracy("qdelta", higher(_POINT)),
        studies={
            MAIN: LanguageStudy(
                arms=("gated-deltanet", "qdelta"),
                source="s-niah-2:length=128",
                tokens=1_000_000,
                seeds=10,
                options={"adaptive": False},
            ),
        },
        unclear="trained on the task itself, with texts of 128 words, and tested on 128 to 1,024",
    ),
    Claim(
        number=15,
        name="learned-lambda",
        text="a learned lambda is better than any fixed one",
        published="accuracy 47.24 against 46.36 to 47.20; perplexity 26.89 against 26.55 to 26.96 (340M)",
        source=_QDELTA,
        kind="superiority",
        criterion=inferiority(*_FIXED_LAMBDA),
        studies={MAIN: study("qdelta", *_FIXED_LAMBDA)},
        unclear="in the paper, accuracy and perplexity disagree",
    ),
    Claim(
        number=16,
        name="qdelta-stable",
        text="Q-Delta trains stably",
        published="stable training (shown for one rate)",
        source=_QDELTA,
        kind="no divergence in 30 runs",
        criterion=stability("qdelta", studies=tuple(_STABILITY_RATES)),
        studies={
            name: LanguageStudy(
                arms=("gated-deltanet", "qdelta"),
                tokens=1_000_000,
                seeds=10,
                rates=(rate,),
                options={"adaptive": False},
            )
            for name, rate in _STABILITY_RATES.items()
        },
        deciding=tuple(_STABILITY_RATES),
        unclear="a run diverges if it fails, or ends 10 % above the median loss at the best rate",
    ),
    Claim(
        number=17,
        name="kuramoto-close",
        text="Kuramoto attention is within 0.02 bits per byte of the transformer",
        published="1.637 and 1.616 bits per character (1M, enwik8)",
        source=_KURAMOTO,
        kind="non-inferiority, 0.02 bits",
        criterion=non_inferiority("kuramoto", margin=0.02),
        studies={
            MAIN: study("standard", "kuramoto"),
            "500k": study("standard", "kuramoto", size="500k", seeds=5),
            LONG: _LONG,
        },
        unclear="the paper trains to convergence, on billions of characters",
    ),
    Claim(
        number=18,
        name="frustrated-better",
        text="frustrated Kuramoto attention is better than the transformer",
        published="1.5953 and 1.611 bits per character (1M, enwik8)",
        source=_FRUSTRATED,
        kind="superiority",
        criterion=superiority("kuramoto:frustrated=True"),
        studies={
            MAIN: study("standard", "kuramoto:frustrated=True"),
            "key-shift": study("standard:key_shift=True", "kuramoto:frustrated=True"),
            "500k": study("standard", "kuramoto:frustrated=True", size="500k", seeds=5),
            LONG: _LONG,
        },
        unclear="the paper trains to convergence, on billions of characters",
    ),
)


def is_claim(name: str) -> bool:
    """Whether this is the name or the number of a claim."""
    return any(name in (candidate.name, str(candidate.number)) for candidate in CLAIMS)


def claim(name: str) -> Claim:
    """The claim of that name or number.

    >>> claim("coupled-better").number, claim("1").name
    (1, 'coupled-better')
    """
    for candidate in CLAIMS:
        if name in (candidate.name, str(candidate.number)):
            return candidate
    raise unknown("claim", name, [candidate.name for candidate in CLAIMS])
