r"""The rule by which a study decides: seeds come in rounds, and every round tests the arms that are still open.

    better, worse    the p value of the difference, adjusted over the arms (`multiplicity`), is below alpha(k)
    equivalent       two one-sided tests at the margin (Schuirmann 1987), each at alpha(k), adjusted over the arms by
                     Holm: with the true difference at one margin, only one of the two can err

Round k may spend a share of the error rate, and the shares sum to at most one. alpha(k) is the level that spends this
share, given that rounds have their first seeds in common (`spending`). What a round does not use is not carried over,
so alpha(k) does not depend on the data. The levels are computed for eight arms, the most demanding case. With fewer
arms they are a little too small, which makes up for few seeds: rounds of t tests have less in common than those of a
random walk.

"Better or worse" and "equivalent" are two families with an error rate each: the true difference of an arm cannot be
both zero and beyond the margin. A rejected hypothesis leaves its family, so later rounds correct for fewer arms. An arm
that stopped as equivalent keeps its share in the first family, and one that stopped as better or worse keeps its share
in the second.

D. J. Schuirmann, A comparison of the two one-sided tests procedure and the power approach for assessing the
equivalence of average bioavailability, J. Pharmacokinetics and Biopharmaceutics 15 (1987).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from qkflow.errors import UsageError
from qkflow.experiment.stats.multiplicity import holm_adjusted, max_t_adjusted
from qkflow.experiment.stats.paired import PairedErrors
from qkflow.experiment.stats.prior import PRIOR, Prior, baseline_variance, moderated, prior_holds_for_all
from qkflow.experiment.stats.spending import round_levels

__all__ = ["MARGIN", "PRIOR", "ROUNDS", "RoundTests", "Rule", "plan_rounds", "run_tests"]

MARGIN = 0.005
"""The default equivalence margin, as a fraction of the baseline's loss."""

ROUNDS = (2, 3, 4, 5, 6, 8, 10, 13, 17, 22, 29, 38, 50, 65, 85, 110, 145, 190, 250)
"""Seeds by the end of each round."""

_MOST_SEEDS = 10_000
_MOST_ARMS = 8
_LATER = 0.8
"""What a round beyond the list spends of the rest."""
_PLANNED = 0.8
"""What a study that may go on spends by the end of its plan."""
_PRIOR_CAPS = {2: 0.04, 3: 0.15, 4: 0.33, 5: 0.6}
"""The most that rounds with few seeds may have spent if there is a prior, in a plan with more seeds."""
_LAST_CAPS = {2: 0.25, 3: 0.42, 4: 0.58, 5: 0.85}
"""The same if these are the seeds of the plan."""


def _schedule(seeds: int, *, is_limited: bool, has_prior: bool) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The rounds of a study that has time for `seeds` seeds, and the share of the error rate that each may spend.

    The spent share grows mostly with the square of the seeds, as power needs most of it late. A prior that is wrong
    errs most with two to four seeds, so these rounds spend little then. If the study is not limited, a fifth is kept
    for rounds beyond the plan; each of them spends a quarter of what is left.
    """
    planned = 1.0 if is_limited else _PLANNED
    early, last = (_PRIOR_CAPS, _LAST_CAPS) if has_prior else ({}, {})
    if not is_limited:
        last = {n: (cap + early[n]) / 2 for n, cap in last.items()}
    rounds = [*(n for n in ROUNDS if n < 0.9 * seeds), seeds]
    spent = [min((0.05 * n / seeds + 0.95 * (n / seeds) ** 2) * planned, early.get(n, 1.0)) for n in rounds[:-1]]
    spent.append(planned * last.get(seeds, 1.0))
    if not is_limited:
        for n in ROUNDS:
            if 1.1 * seeds < n <= max(50, 4 * seeds):
                rounds.append(n)
                left = 1 - spent[-1]
                spent.append(max(spent[-1] + left / 20, min(spent[-1] + left / 4, early.get(n, 1.0))))
    steps = [int(10_000 * share) for share in (0.0, *spent)]  # shares with four decimals
    return tuple(rounds), tuple((after - before) / 10_000 for before, after in itertools.pairwise(steps))


SEEDS_BY_ROUND, SPENDING = _schedule(8, is_limited=False, has_prior=True)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a study decides, fixed before its first run.

    >>> rule = Rule(seeds_by_round=(3, 5), spending=(0.5, 0.4))
    >>> [round(rule.alpha(k), 4) for k in (1, 2, 3, 4)]
    [0.025, 0.0265, 0.004, 0.0008]
    """

    error_rate: float = 0.05
    """The chance of a false better or worse over all arms and rounds; the same for a false equivalent."""
    margin: float = MARGIN
    """The equivalence margin, as a fraction of the baseline's mean loss."""
    prior: Prior | None = None
    """The calibrated spread over seeds; None to use the seeds of the study alone."""
    seeds_by_round: tuple[int, ...] = SEEDS_BY_ROUND
    """Seeds of each open arm by the end of each round. A single round of one seed decides nothing."""
    spending: tuple[float, ...] = SPENDING
    """The fraction of the error rate that each round may spend. Rounds beyond the list (a study that is extended) spend
    four fifths of what is left."""

    def __post_init__(self) -> None:
        if not 0 < self.error_rate < 1:
            raise UsageError(f"error_rate must lie between 0 and 1, got {self.error_rate}")
        if not 0 < self.margin < math.inf:
            raise UsageError(f"margin must be a fraction above 0 of the baseline's loss, got {self.margin}")
        seeds = self.seeds_by_round
        if not seeds or not all(a < b for a, b in zip((0, *seeds), seeds, strict=False)) or seeds[-1] > _MOST_SEEDS:
            raise UsageError(
                f"seeds_by_round must increase from at least 1 to at most {_MOST_SEEDS}, got {list(seeds)}"
            )
        if len(self.spending) != len(seeds) or not all(0 < x <= 1 for x in self.spending):
            raise UsageError(
                f"spending must have a fraction between 0 and 1 for each of {len(seeds)} rounds, got "
                f"{list(self.spending)}"
            )
        if math.fsum(self.spending) > 1 + 1e-12:
            raise UsageError(f"the spending must sum to at most 1, got {math.fsum(self.spending)}")

    def alpha(self, round: int) -> float:
        """The error rate at which a round (counted from 1) tests: the level that spends its share."""
        if round < 1:
            raise ValueError(f"rounds are counted from 1, got {round}")
        if round <= len(self.spending):
            spent = tuple(self.error_rate * share / _MOST_ARMS for share in self.spending)
            return _MOST_ARMS * round_levels(self.seeds_by_round, spent)[round - 1]
        left = max(0.0, 1 - math.fsum(self.spending))
        return self.error_rate * left * _LATER * (1 - _LATER) ** (round - len(self.spending) - 1)


def plan_rounds(
    seeds: int,
    *,
    is_limited: bool,
    error_rate: float = 0.05,
    margin: float = MARGIN,
    prior: Prior | None = None,
) -> Rule:
    """The rule of a study that has time for `seeds` seeds of every arm.

    If `is_limited`, these are the most seeds, and the last round spends what is left of the error rate. Otherwise arms
    that are decided leave their time to the others, and a fifth of the error rate is kept for further rounds.

    >>> rule = plan_rounds(6, is_limited=True)
    >>> rule.seeds_by_round, rule.spending
    ((2, 3, 4, 5, 6), (0.1222, 0.1403, 0.193, 0.2458, 0.2987))
    """
    seeds = seeds if is_limited else max(2, seeds)  # one seed gives no verdict
    rounds, spending = _schedule(seeds, is_limited=is_limited, has_prior=prior is not None)
    return Rule(error_rate=error_rate, margin=margin, prior=prior, seeds_by_round=rounds, spending=spending)


class RoundTests(NamedTuple):
    """The tests of the open arms in one round; arrays [..., arms]."""

    errors: PairedErrors
    """With moderated variances if there is a prior."""
    prior_used: Any
    p_adjusted: np.ndarray
    p_equivalent: np.ndarray
    """Adjusted over the arms too."""
    is_different: np.ndarray
    is_equivalent: np.ndarray
    """Within the margin and not different: where both hold, better or worse wins."""


def run_tests(
    errors: PairedErrors,
    by_seed: Float[np.ndarray, "*studies arms seeds"],
    *,
    rule: Rule,
    round: int,
    loss: Any,
    margin: Any = None,
    n_equivalent: int = 0,
    n_different: int = 0,
    n_untested: int = 0,
) -> RoundTests:
    """Test the open arms of one round, of one study or of many at once.

    Args:
        errors: The differences of the open arms, each with at least two seeds.
        by_seed: Their differences by seed, NaN where an arm lacks a seed.
        rule: How to decide.
        round: The round, counted from 1.
        loss: The baseline's mean loss, [...].
        margin: The equivalence margin in the unit of the loss; by default the rule's fraction of the loss.
        n_equivalent: Arms that stopped as equivalent in earlier rounds.
        n_different: Arms that stopped as better or worse in earlier rounds.
        n_untested: Open arms that have fewer than two seeds.
    """
    loss = np.abs(np.asarray(loss, np.float64))[..., None]
    margin = rule.margin * loss if margin is None else margin
    shared_variance, shared_freedom = baseline_variance(by_seed)
    prior_used = np.full(np.shape(errors.mean), False)
    if rule.prior is not None:
        prior_variance = (rule.prior.spread * loss) ** 2
        holds = prior_holds_for_all(shared_variance[..., None], shared_freedom, prior_variance)
        keep = holds & ((errors.spread > 0) | (errors.mean != 0))  # identical runs need no prior
        variance, freedom, prior_used = moderated(
            errors.spread**2, errors.seeds, prior_variance, rule.prior.freedom, keep=keep
        )
        errors = errors.moderated(variance, freedom)
    p, alpha = np.asarray(errors.p()), rule.alpha(round)
    freedom = np.broadcast_to(np.asarray(errors.freedom, np.float64), p.shape)
    p_adjusted = max_t_adjusted(p, freedom, _share(errors, shared_variance, shared_freedom), n_equivalent + n_untested)
    within = np.asarray(errors.one_sided_p(margin - np.abs(errors.mean)))
    p_equivalent = holm_adjusted(within, n_different + n_untested)
    is_different = p_adjusted < alpha
    return RoundTests(
        errors, prior_used, p_adjusted, p_equivalent, is_different, (p_equivalent < alpha) & ~is_different
    )


def _share(errors: PairedErrors, shared_variance: Any, shared_freedom: int) -> np.ndarray:
    """The share of the baseline's seeds in the variance of each difference. Documents count as independent.

    Two seeds say too little about a covariance: the share is zero then.
    """
    variance = errors.seeds_variance + errors.documents_variance
    if shared_freedom < 2:
        return np.zeros(np.shape(errors.mean))
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.maximum(0.0, shared_variance[..., None]) / errors.seeds / variance
    return np.where(np.isfinite(share), share, 0.0)
