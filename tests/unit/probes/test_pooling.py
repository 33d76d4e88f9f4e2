import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from qkflow.errors import UsageError
from qkflow.probes.pooling import Pooling, pooled, shares

POOLINGS: tuple[Pooling, ...] = ("rollout", "average", "max")
LENGTHS = torch.tensor([5, 3])


def causal(layers: int = 3, heads: int = 2, *, seed: int = 0) -> list[Tensor]:
    scores = torch.randn(layers, 2, heads, 5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return list(scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf).softmax(-1))


@pytest.mark.parametrize("how", POOLINGS)
def test_a_pooled_row_sums_to_one_and_has_nothing_at_padding(how: Pooling) -> None:
    row = pooled(causal(), LENGTHS, how)
    assert_close(row.sum(-1), torch.ones(2, dtype=torch.float64))
    assert row[1, 3:].abs().max() == 0
    assert row[0].min() > 0


def test_the_average_is_over_heads_and_layers_of_the_last_row() -> None:
    maps, row = causal(), pooled(causal(), LENGTHS)
    assert_close(row[0], torch.stack([layer[0, :, 4] for layer in maps]).mean((0, 1)))
    assert_close(row[1], torch.stack([layer[1, :, 2] for layer in maps]).mean((0, 1)))


def test_the_largest_over_layers_is_made_shares() -> None:
    one, other = torch.tensor([0.8, 0.2]), torch.tensor([0.4, 0.6])
    maps = [row.expand(1, 1, 2, 2) for row in (one, other)]
    assert_close(pooled(maps, torch.tensor([2]), "max"), torch.tensor([[0.8, 0.6]]) / 1.4)


def test_rollout_is_the_product_of_the_layers_with_the_residual_stream() -> None:
    maps, got = causal(), pooled(causal(), LENGTHS, "rollout")
    product = torch.eye(5, dtype=torch.float64)
    for layer in maps:  # as published: the first layer stands on the right
        product = (layer.mean(1) + torch.eye(5)) / 2 @ product
    assert_close(got[0], product[0, 4])
    assert_close(got[1], product[1, 2])


@pytest.mark.parametrize("how", POOLINGS)
def test_padding_changes_nothing_whatever_stands_there(how: Pooling) -> None:
    maps = causal()
    spoiled = [layer.clone() for layer in maps]
    for layer in spoiled:
        layer[1, :, 3:] = torch.nan
    assert_close(pooled(spoiled, LENGTHS, how), pooled(maps, LENGTHS, how))
    alone = pooled([layer[1:, :, :3, :3] for layer in maps], LENGTHS[1:], how)
    assert_close(pooled(maps, LENGTHS, how)[1:, :3], alone)


def test_an_encoder_can_be_asked_at_its_first_token() -> None:
    maps = [torch.rand(2, 2, 5, 5, dtype=torch.float64) for _ in range(2)]
    row = pooled(maps, LENGTHS, asked=torch.tensor([0, 0]))
    want = torch.stack([layer[1, :, 0, :3] / layer[1, :, 0, :3].sum(-1, keepdim=True) for layer in maps]).mean((0, 1))
    assert_close(row[1, :3], want)
    assert row[1, 3:].abs().max() == 0


def test_signed_weights_count_by_their_size_and_every_head_alike() -> None:
    signed = torch.tensor([[3.0, -1.0], [0.01, 0.01]]).view(1, 2, 1, 2).expand(1, 2, 2, 2)
    assert_close(pooled([signed], torch.tensor([2])), torch.tensor([[0.625, 0.375]]))


@pytest.mark.parametrize("how", ["average", "max"])
def test_a_token_that_attends_to_nothing_has_no_shares(how: Pooling) -> None:
    assert pooled([torch.zeros(1, 2, 3, 3)], torch.tensor([3]), how).tolist() == [[0, 0, 0]]


def test_rolled_out_a_token_that_attends_to_nothing_stays_itself() -> None:
    assert pooled([torch.zeros(1, 2, 3, 3)], torch.tensor([3]), "rollout").tolist() == [[0, 0, 1]]


def test_layers_may_differ_in_their_heads() -> None:
    maps = [*causal(1, 4), *causal(1, 2)]
    assert_close(pooled(maps, LENGTHS)[0], (maps[0][0, :, 4].mean(0) + maps[1][0, :, 4].mean(0)) / 2)


@given(row=st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=8))
@settings(deadline=None, max_examples=25)
def test_shares_sum_to_one_or_are_all_zero_and_stay_what_they_are(row: list[float]) -> None:
    part = shares(torch.tensor(row, dtype=torch.float64))
    assert part.sum().item() == pytest.approx(1 if any(row) else 0)
    assert_close(shares(part), part)


@pytest.mark.parametrize("how", POOLINGS)
def test_half_precision_maps_are_pooled_in_single(how: Pooling) -> None:
    row = pooled([layer.bfloat16() for layer in causal()], LENGTHS, how)
    assert row.dtype == torch.float32
    assert_close(row.sum(-1), torch.ones(2))


def test_what_is_not_a_number_stays_visible() -> None:
    assert shares(torch.tensor([torch.nan, 1.0])).isnan().all()


@pytest.mark.parametrize(
    ("maps", "lengths", "how", "message"),
    [
        ([], [5, 3], "average", "no maps to pool: read with maps=True"),
        (causal(), [5, 0], "average", r"from 1 to 5 for each of 2 rows, got \[5, 0\]"),
        (causal(), [6, 3], "average", r"from 1 to 5 for each of 2 rows, got \[6, 3\]"),
    ],
)
def test_what_cannot_be_pooled_is_refused(maps: list[Tensor], lengths: list[int], how: Pooling, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pooled(maps, torch.tensor(lengths), how)
