"""Recipes of Kuramoto attention: figures in bits, a table that goes both ways, phases with standard's parameters."""

import math
from types import ModuleType
from typing import Literal

import pytest
from rich.console import Console

from qkflow.cli.reproduce import about, beside
from qkflow.data import CorpusConfig
from qkflow.errors import UsageError
from qkflow.experiment.matching import match_arms
from qkflow.experiment.stats.verdict import Verdict
from qkflow.models import parameters
from qkflow.recipes import BitsChange, BitsPerCharacter, Finding, direction, models, recipe

OURS = ("kuramoto-1m", "kuramoto-5m", "kuramoto-code-1m", "kuramoto-code-5m", "frustrated-1m")
BROUGHT = ("kuramoto-code-1m", "kuramoto-code-5m")
FRUSTRATED = "kuramoto:frustrated=True"


def printed(table: object) -> list[str]:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()


@pytest.mark.parametrize(
    ("name", "arm", "bits", "reference"),
    [("kuramoto-1m", "kuramoto", 1.637, 1.616), ("frustrated-1m", FRUSTRATED, 1.5953, 1.611)],
)
def test_a_change_of_bits_is_one_of_nats_and_a_part_of_the_baselines_loss(
    name: str, arm: str, bits: float, reference: float
) -> None:
    found = recipe(name)
    nats, part = (bits - reference) * math.log(2), bits / reference - 1
    assert found.loss_change(arm) == pytest.approx((nats, nats), rel=1e-9)
    assert found.published(arm) == pytest.approx((part, part), rel=1e-9)


@pytest.mark.parametrize(
    ("name", "low", "high"), [("kuramoto-code-1m", 0.013, 0.015), ("kuramoto-code-5m", -0.012, -0.010)]
)
def test_a_change_in_bits_alone_is_one_of_nats_and_of_no_known_part_of_the_loss(
    name: str, low: float, high: float
) -> None:
    found = recipe(name)
    assert found.loss_change("kuramoto") == pytest.approx((low * math.log(2), high * math.log(2)))
    assert found.published("kuramoto") is None
    assert "reported by others" in found.source


@pytest.mark.parametrize(("name", "went"), [*zip(OURS, ("worse", "unclear", "worse", "better", "better"), strict=True)])
def test_which_way_each_table_went(name: str, went: Finding) -> None:
    found = recipe(name)
    assert [found.finding(arm) for arm in list(found.table)[1:]] == [went]


def test_at_5m_the_median_and_the_mean_go_different_ways_and_are_both_told() -> None:
    found = recipe("kuramoto-5m")
    assert found.loss_change("kuramoto") is None
    words = "\n".join(about(found, "enwik8"))
    assert "median 1.448 against 1.452, mean 1.468 against 1.456 bits a character" in words
    assert found.unclear is not None
    assert "better by the median" in found.unclear
    assert "worse by their mean" in found.unclear


@pytest.mark.parametrize("kind", ["better", "worse", "equivalent", "undecided"])
def test_no_verdict_agrees_or_disagrees_with_what_is_unclear(
    kind: Literal["better", "worse", "equivalent", "undecided"],
) -> None:
    told = direction("unclear", Verdict(arm="kuramoto", kind=kind, sentence="", advice=None))
    assert told == ("undecided" if kind == "undecided" else f"here {kind}")


def test_figures_are_told_in_bits_with_the_digits_of_the_paper() -> None:
    assert "  kuramoto: 1.637 +- 0.010 bits a character" in about(recipe("kuramoto-1m"), "enwik8")
    told = about(recipe("frustrated-1m"), "enwik8")
    assert {"  standard: 1.611 bits a character", f"  {FRUSTRATED}: 1.5953 +- 0.0014 bits a character"} <= set(told)
    assert "  kuramoto: -0.012 to -0.010 bits a byte" in about(recipe("kuramoto-code-5m"), "my.py")
    assert BitsChange(0.01).words == "+0.010 bits a byte"


@pytest.mark.parametrize("bits", [0.0, -1.0, 33.0, math.nan, math.inf])
def test_what_is_no_number_of_bits_is_refused(bits: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 32"):
        BitsPerCharacter(bits)


@pytest.mark.parametrize("bounds", [(0.0, None), (-0.1, 0.1), (0.2, 0.1), (math.nan, None), (0.1, math.inf)])
def test_what_is_no_change_in_bits_is_refused(bounds: tuple[float, float | None]) -> None:
    with pytest.raises(ValueError, match="goes one way"):
        BitsChange(*bounds)


@pytest.mark.parametrize("name", OURS)
def test_at_the_papers_scale_bytes_are_read_to_convergence_with_five_seeds(name: str) -> None:
    found = recipe(name)
    source = "my.py" if name in BROUGHT else None
    spec = found.spec("paper", found.corpus("paper", source))
    assert spec.data == CorpusConfig(source=source or "enwik8", tokens="bytes")
    assert (spec.size, spec.seeds, spec.tokens) == (name.rpartition("-")[2], 5, 10**9)
    assert spec.tokens is not None
    assert spec.tokens <= spec.passes * 90_000_000  # of enwik8, nine tenths are there to train on
    assert "1,000M a run" in found.ours
    assert f"learning rate ({spec.learning_rates[0]:g})" in found.ours
    assert f"batch ({spec.batch} windows)" in found.ours
    assert f"context ({spec.context})" in found.ours
    assert ("seeds (5)" in found.ours) == (name not in ("kuramoto-1m", "kuramoto-5m"))


@pytest.mark.parametrize("name", BROUGHT)
def test_code_is_asked_for_since_codeparrot_has_no_name_here(name: str) -> None:
    with pytest.raises(UsageError, match=r"\(CodeParrot\) has no name here"):
        recipe(name).spec("paper")
    assert recipe(name).spec("laptop").data.source == "python-stdlib"  # which is code


@pytest.mark.parametrize("name", OURS)
def test_published_and_measured_stand_side_by_side_on_a_narrow_screen(name: str, synthetic: ModuleType) -> None:
    found = recipe(name)
    lines = printed(beside(found, synthetic.study(tuple(found.table))))
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if line.startswith(list(found.table)[1]))
    published = {"kuramoto-1m": "+1.30%", "kuramoto-5m": "unclear", "frustrated-1m": "-0.97%"}
    assert published.get(name, "nats") in (row if name not in BROUGHT else " ".join(lines))


@pytest.mark.parametrize("size", ["1m", "5m"])
@pytest.mark.parametrize(("arm", "spec"), [("kuramoto", "kuramoto"), ("kuramoto-frustrated", FRUSTRATED)])
def test_named_phases_have_the_parameters_of_standard(size: str, arm: str, spec: str) -> None:
    found, target = models()[f"{size}/{arm}"], parameters(models()[f"{size}/standard"])
    assert (found.mechanism, found.vocabulary) == (spec, 257)
    assert parameters(found) == pytest.approx(target, rel=0.005)


@pytest.mark.parametrize("name", ["kuramoto-1m", "frustrated-1m"])
def test_the_arms_can_be_matched_at_a_laptops_smallest_size(name: str) -> None:
    made = match_arms(recipe(name).spec("laptop"), "100k", 257)
    assert [arm.parameters for arm in made.arms] == pytest.approx([made.parameters] * 2, rel=0.005)
