import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import Tensor

from qkflow.data.tasks.base import Instance
from qkflow.errors import UsageError
from qkflow.models import Classifier, ClassifierConfig
from qkflow.probes.faithfulness import (
    Faithfulness,
    Ranking,
    evaluate_faithfulness,
    rank_tokens,
    split_tokens,
    top_count,
)
from qkflow.probes.readers import ReaderOutput, reader


class Words:
    """A classifier whose log-odds are the sum over its words, with prescribed attention."""

    def __init__(self, odds: Mapping[int, float], attends: Mapping[int, float] | None = None) -> None:
        self.odds, self.attends = odds, attends or {}
        self.rows: list[tuple[int, ...]] = []

    def read(self, tokens: Tensor, lengths: Tensor, *, maps: bool = False) -> ReaderOutput:
        t = tokens.shape[1]
        valid = torch.arange(t) < lengths[:, None]
        assert (tokens[~valid] == 0).all()
        self.rows += [tuple(row[:length].tolist()) for row, length in zip(tokens, lengths.tolist(), strict=True)]
        score = self._of(self.odds, tokens, 0.0).where(valid, 0).sum(1)
        logits = torch.stack([torch.zeros_like(score), score], 1)
        weights = self._of(self.attends, tokens, 1.0).where(valid, 0)
        return ReaderOutput(logits=logits, maps=(weights[:, None, None].expand(-1, 1, t, t),) if maps else None)

    def saliency(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        return self._of(self.odds, tokens, 0.0).abs() * (torch.arange(tokens.shape[1]) < lengths[:, None])

    @staticmethod
    def _of(table: Mapping[int, float], tokens: Tensor, other: float) -> Tensor:
        return torch.tensor([[table.get(token, other) for token in row] for row in tokens.tolist()]).double()


def text(*tokens: int, rationale: Sequence[int] = (), kept: Sequence[int] = (), label: int = 1) -> Instance:
    return Instance(tokens=tokens, label=label, rationale=tuple(rationale), protected=tuple(kept))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def texts(n: int = 12, *, seed: int = 0, longest: int = 9) -> list[Instance]:
    draw = np.random.default_rng(seed)
    decoder = []
    for _ in range(n):
        t = int(draw.integers(1, longest + 1))
        positions = draw.permutation(t)[: max(1, t // 3)].tolist()
        decoder.append(
            text(
                *draw.integers(1, 12, t).tolist(),
                rationale=sorted(positions),
                kept=[t - 1],
                label=int(draw.integers(2)),
            )
        )
    return decoder


def figures(scores: Faithfulness) -> dict[str, np.ndarray]:
    result = {name: x for name, x in vars(scores).items() if isinstance(x, np.ndarray)}
    result |= {f"mass {how}": x for how, x in scores.masses.items()}
    for ranking, faithful in scores.rankings.items():
        result |= {f"{ranking} {name}": x for name, x in vars(faithful).items()}
    return result


def test_deletion_scores_match_the_eraser_definition() -> None:
    words = Words({5: 2.0, 6: -1.0, 7: 0.5}, {5: 3.0, 6: 2.0, 7: 1.0})
    scores = evaluate_faithfulness(words, [text(7, 5, 6, 9, rationale=[1])])
    p = sigmoid(1.5)
    assert scores.predicted.tolist() == [1]
    assert_allclose(scores.probability, [p])
    assert_allclose(scores.comprehensiveness, [p - sigmoid(-0.5)])  # without word 5
    assert_allclose(scores.sufficiency, [p - sigmoid(2.0)])  # word 5 alone
    assert_allclose(scores.mass, [3 / 7])


def test_probability_is_of_the_predicted_class_not_of_the_label() -> None:
    scores = evaluate_faithfulness(Words({5: -3.0, 6: 1.0}, {5: 9.0}), [text(5, 6, label=1)])
    assert (scores.predicted[0], scores.correct[0]) == (0, False)
    assert_allclose(scores.probability, [sigmoid(2)])
    assert_allclose(scores.label_probability, [sigmoid(-2)])
    assert_allclose(scores.loss, [-math.log(sigmoid(-2))])
    assert_allclose(scores.comprehensiveness, [sigmoid(2) - sigmoid(-1)])


def test_aopc_averages_over_all_fractions() -> None:
    odds = {word: 0.1 * word for word in range(1, 21)}
    scores = evaluate_faithfulness(Words(odds, {word: float(word) for word in range(1, 21)}), [text(*range(1, 21))])
    whole = sum(odds.values())
    without = [sum(odds[word] for word in range(1, 21 - count)) for count in (1, 1, 2, 4, 10)]
    alone = [whole - rest for rest in without]
    result = scores.rankings["attention"]
    assert_allclose(result.comprehensiveness_aopc, [np.mean([sigmoid(whole) - sigmoid(x) for x in without])])
    assert_allclose(result.sufficiency_aopc, [np.mean([sigmoid(whole) - sigmoid(x) for x in alone])])
    assert_allclose(result.comprehensiveness, [sigmoid(whole) - sigmoid(without[0])])


def test_random_ranking_scores_below_attention_on_the_decisive_word() -> None:
    draw = np.random.default_rng(0)
    instances = [text(*np.insert(draw.integers(1, 9, 19), draw.integers(20), 9).tolist()) for _ in range(300)]
    words = Words({9: 20.0}, {9: 2.0})
    scores = evaluate_faithfulness(words, instances, rankings=("attention", "gradient", "random"), fractions=(0.05,))
    assert_allclose(scores.comprehensiveness, 0.5, atol=1e-6)  # one of twenty words, the decisive one
    assert_allclose(scores.rankings["gradient"].comprehensiveness, 0.5, atol=1e-6)
    assert 0.02 < scores.rankings["random"].comprehensiveness.mean() / 0.5 < 0.09
    assert_allclose(scores.sufficiency, 0, atol=1e-6)
    assert 0.91 < scores.rankings["random"].sufficiency.mean() / 0.5 < 0.98


def test_random_ranking_depends_on_the_seed() -> None:
    words, instances = Words({1: 1.0, 2: -2.0}), texts(30)
    first, again, other = (
        evaluate_faithfulness(words, instances, rankings=["random"], seed=seed) for seed in (0, 0, 1)
    )
    assert figures(first)["random comprehensiveness"].tolist() == figures(again)["random comprehensiveness"].tolist()
    assert figures(first)["random comprehensiveness"].tolist() != figures(other)["random comprehensiveness"].tolist()


def test_random_ranking_differs_between_texts() -> None:
    words, instances = Words({}), [text(*range(first, first + 10)) for first in (1, 11, 21, 31, 41)]
    evaluate_faithfulness(words, instances, rankings=["random"], fractions=(0.05,))
    alone = {row[0] % 10 for row in words.rows if len(row) == 1}
    assert len(alone) > 1


def test_deletion_keeps_order_and_protected_tokens() -> None:
    words, instance = Words({3: 1.0}), text(1, 2, 3, 4, 5, 6, 7, kept=[2, 6])
    evaluate_faithfulness(words, [instance])
    for row in words.rows:
        assert 3 in row
        assert row[-1] == 7
        assert list(row) == sorted(row)  # in order, without repetitions; inputs of `read` are packed to the left
    assert {len(row) for row in words.rows} == {7, 6, 4, 3, 5}  # all; without 1 and 3 of five; with 1 and 3 of them


def test_answer_is_read_at_the_last_remaining_token() -> None:
    words = Words({}, {8: 5.0})
    evaluate_faithfulness(words, [text(6, 7, 8)], fractions=(0.05,), rankings=["attention"])
    assert sorted(words.rows) == [(6, 7), (6, 7, 8), (8,)]


@pytest.mark.parametrize("instance", [text(5), text(5, 6, kept=[0, 1])])
def test_scores_are_zero_when_no_token_can_be_deleted(instance: Instance) -> None:
    scores = evaluate_faithfulness(Words({5: 1.0}), [instance])
    for result in scores.rankings.values():
        for values in vars(result).values():
            assert values.tolist() == [0]


def test_last_token_is_kept_when_all_would_be_deleted() -> None:
    words = Words({1: 1.0, 2: 3.0})
    scores = evaluate_faithfulness(words, [text(1, 2)], fraction=1.0, rankings=["attention"])
    assert_allclose(scores.comprehensiveness, [sigmoid(4) - sigmoid(3)])
    assert_allclose(scores.sufficiency, [0])


def test_repeated_texts_are_read_once() -> None:
    words = Words({1: 1.0}, {1: 2.0})
    evaluate_faithfulness(words, [text(1, 2, 3), text(1, 2, 3), text(1, 2, 4)], rankings=["attention"])
    deleted = [row for row in words.rows if len(row) < 3]
    assert len(deleted) == len(set(deleted))


def test_ties_are_broken_by_position() -> None:
    assert rank_tokens(np.array([0.2, 0.3, 0.2, 0.3])) == [1, 3, 0, 2]
    assert rank_tokens(np.array([0.3, 0.3 + 1e-8, 0.3 - 1e-8])) == [0, 1, 2]
    assert rank_tokens(np.array([1e-9, 2e-9, 0.0, 0.5])) == [3, 1, 0, 2]
    assert rank_tokens(np.zeros(3), protected=[1]) == [0, 2]
    assert rank_tokens(np.arange(200) % 2.0) == [*range(1, 200, 2), *range(0, 200, 2)]


@example(fraction=0.07, positions=100)
@given(fraction=st.sampled_from([0.01, 0.05, 0.07, 0.1, 0.2, 0.5, 1.0]), positions=st.integers(0, 300))
@settings(deadline=None, max_examples=25)
def test_top_count_rounds_up_to_at_least_one(fraction: float, positions: int) -> None:
    percent = round(100 * fraction)
    assert top_count(fraction, positions) == min(positions, max(1, -(-percent * positions // 100)))


@given(t=st.integers(1, 12), data=st.data())
@settings(deadline=None, max_examples=25)
def test_split_tokens_partitions_the_unprotected_positions(t: int, data: st.DataObject) -> None:
    kept = data.draw(st.sets(st.integers(0, t - 1)))
    order = [position for position in data.draw(st.permutations(range(t))) if position not in kept]
    count = data.draw(st.integers(0, len(order)))
    without, alone = split_tokens(tuple(range(t)), order, count)
    left = {*without} if kept or count < t else set()
    assert {*alone} | left == {*range(t)}
    assert {*alone} & left == kept
    assert without == tuple(sorted(without))
    assert alone == tuple(sorted(alone))


def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier(ClassifierConfig(width=8, layers=2, heads=2, hidden=8, vocabulary=12, classes=2))


ALL: tuple[Ranking, ...] = ("attention", "gradient", "random")


@pytest.mark.parametrize(("double", "digits"), [(True, 1e-10), (False, 1e-5)])
def test_batched_equals_one_by_one(double: bool, digits: float) -> None:
    read, instances = reader(model().double() if double else model()), texts(5, longest=6)
    alone = [
        figures(evaluate_faithfulness(read, [instance], rankings=ALL, batch=1, fractions=(0.2, 0.5)))
        for instance in instances
    ]
    for batch in (3, 256):
        for name, actual in figures(
            evaluate_faithfulness(read, instances, rankings=ALL, batch=batch, fractions=(0.2, 0.5))
        ).items():
            assert_allclose(
                actual, np.concatenate([instance[name] for instance in alone]), rtol=digits, atol=digits, err_msg=name
            )


def test_result_does_not_depend_on_the_number_of_instances_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    words, instances = Words({1: 1.0, 2: -2.0}, {2: 3.0}), texts(30)
    expected = figures(evaluate_faithfulness(words, instances))
    monkeypatch.setattr("qkflow.probes.faithfulness._INSTANCES_AT_ONCE", 4)
    for name, actual in figures(evaluate_faithfulness(words, instances)).items():
        assert_allclose(actual, expected[name], rtol=1e-12, err_msg=name)


def test_result_does_not_depend_on_the_order_of_instances() -> None:
    read, instances = reader(model().double()), texts()
    mixed = np.random.default_rng(1).permutation(len(instances))
    straight, shuffled = (
        evaluate_faithfulness(read, instances, rankings=ALL),
        evaluate_faithfulness(read, [instances[i] for i in mixed], rankings=ALL),
    )
    for name, actual in figures(shuffled).items():
        assert_allclose(actual, figures(straight)[name][mixed], rtol=1e-10, atol=1e-10, err_msg=name)
    for i, row in zip(mixed, shuffled.attention, strict=True):
        assert_allclose(row, straight.attention[i], atol=1e-10)
        assert len(row) == len(instances[i].tokens)


def test_mass_is_that_of_the_chosen_pooling() -> None:
    read, instances = reader(model().double()), texts()
    result = {
        how: evaluate_faithfulness(read, instances, pooling=how, rankings=()) for how in ("average", "max", "rollout")
    }
    for how, scores in result.items():
        assert_allclose(scores.mass, scores.masses[how])
        on_it = [row[list(instance.rationale)].sum() for row, instance in zip(scores.attention, instances, strict=True)]
        assert_allclose(scores.mass, on_it)
        assert_allclose(scores.effective, np.exp(scores.entropy))
    assert len({tuple(scores.mass) for scores in result.values()}) == 3
    with pytest.raises(UsageError, match="attention was not ranked"):
        _ = result["max"].comprehensiveness


def test_batches_are_split_to_bound_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkflow.probes.faithfulness._MAX_MAP_ELEMENTS", 64 * 5 * 5 * 2)
    monkeypatch.setattr("qkflow.probes.faithfulness._MAX_TOKENS", 20)
    sizes: list[tuple[int, int, bool]] = []

    class Counting(Words):
        def read(self, tokens: Tensor, lengths: Tensor, *, maps: bool = False) -> ReaderOutput:
            sizes.append((*tokens.shape, maps))
            return super().read(tokens, lengths, maps=maps)

    evaluate_faithfulness(
        Counting({1: 1.0}), [text(*row) for row in np.random.default_rng(0).integers(1, 9, (200, 5)).tolist()]
    )
    assert sizes[0] == (2, 5, True)  # the number of heads is not known yet
    assert sizes[1] == (128, 5, True)  # one
    assert all(b * t <= 20 for b, t, maps in sizes if not maps)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"instances": []}, "got no instances"),
        ({"fraction": 0.0}, "above 0 and at most 1"),
        ({"fractions": ()}, "at least one of them"),
        ({"fractions": (0.5, 1.1)}, "above 0 and at most 1"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"seed": -1}, "seed at least 0"),
        ({"instances": [text(1, label=2)]}, "labels must be from 0 to 1, the answers of the model, got 2 to 2"),
    ],
)
def test_invalid_arguments_raise(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        evaluate_faithfulness(Words({}), **{"instances": [text(1, 2)], **wrong})
