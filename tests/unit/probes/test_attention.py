"""Attention maps, pooling, confidence and statistics."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from qkflow.errors import UsageError
from qkflow.models import Decoder, DecoderConfig
from qkflow.models.blocks import Block
from qkflow.probes import attention_maps, probe_layers
from qkflow.probes.attention import (
    Pooling,
    attention_entropy,
    attention_stats,
    confidence,
    confidence_curve,
    effective_tokens,
    l1_normalize,
    pool_maps,
    rationale_confidence,
    rationale_mass,
    token_positions,
)
from qkflow.probes.diagnostics import Diagnostic


def model(mechanism: str | tuple[str, ...] = "standard", *, dropout: float = 0.0) -> Decoder:
    config = DecoderConfig(width=32, layers=3, heads=4, hidden=48, mechanism=mechanism, dropout=dropout)
    decoder = Decoder(config)
    for parameter in decoder.parameters():  # blocks are zero at initialization
        torch.nn.init.normal_(parameter, std=0.2)
    return decoder


HYBRID = ("nonlinear-query", "differential", "standard:window=3,conv=3,key_shift=True")
TOKENS = [72, 101, 108, 108, 111, 256, 10]


@pytest.mark.parametrize("mechanism", ["standard", "differential", HYBRID])
def test_maps_are_the_weights_of_each_block_on_its_own_input(mechanism: str | tuple[str, ...]) -> None:
    decoder = model(mechanism)
    x = decoder.embedding(torch.tensor([TOKENS]))
    for block, actual in zip(decoder.blocks, attention_maps(decoder, TOKENS), strict=True):
        assert isinstance(block, Block)
        normed = block.mechanism_norm(x)
        weights = block.mechanism.weights(normed)
        assert_close(actual, weights[0])
        gathered = torch.einsum("bhts,bshv->bthv", actual[None], block.mechanism.values(normed))
        assert_close(block.mechanism.read(gathered, normed), block.mechanism(normed)[0], rtol=1e-4, atol=1e-5)
        x = block(x)[0]


def test_maps_are_causal_and_respect_the_window() -> None:
    for layer in attention_maps(model(HYBRID), TOKENS):
        assert layer.triu(1).abs().max() == 0
    assert attention_maps(model(HYBRID), TOKENS)[2].tril(-3).abs().max() == 0


def test_probing_leaves_the_model_unchanged() -> None:
    decoder = model(dropout=0.5).train()
    before = {name: value.clone() for name, value in decoder.state_dict().items()}
    first, second = attention_maps(decoder, TOKENS), attention_maps(decoder, TOKENS)
    assert_close(first, second)  # no dropout in probes
    assert decoder.training
    assert all(not block.mechanism._forward_pre_hooks for block in decoder.blocks)  # pyright: ignore
    assert_close(dict(decoder.state_dict()), before)
    assert all(not layer.requires_grad for layer in first)


def test_hooks_are_removed_if_the_model_fails() -> None:
    decoder = model().train()

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    decoder.blocks[1].feed_forward.register_forward_pre_hook(fail)  # pyright: ignore
    with pytest.raises(RuntimeError, match="broken"):
        attention_maps(decoder, TOKENS)
    assert decoder.training
    assert all(not block.mechanism._forward_pre_hooks for block in decoder.blocks)  # pyright: ignore


def test_differential_layers_have_a_lambda_diagnostic() -> None:
    layers = probe_layers(model(HYBRID), TOKENS)
    assert [len(layer.diagnostics) for layer in layers] == [0, 1, 0]
    (exhibit,) = layers[1].diagnostics
    learned, start = exhibit.values[0][0], exhibit.values[1][0]
    assert start == pytest.approx(0.8 - 0.6 * 2.718281828 ** (-0.3))
    assert layers[1].weights.sum(-1) == pytest.approx(1 - learned, abs=1e-5)


@pytest.mark.parametrize(("tokens", "message"), [([], "at least one"), ([257], "0 to 256"), ([-1], "0 to 256")])
def test_invalid_tokens_raise(tokens: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        attention_maps(model(), tokens)


@pytest.mark.parametrize("values", [((1.0,),), ((1.0, 2.0), (1.0,)), ((1.0, 2.0), (1.0, 2.0), (1.0, 2.0)), ()])
def test_diagnostic_with_mismatched_shapes_raises(values: tuple) -> None:
    with pytest.raises(UsageError, match="2 rows"):
        Diagnostic(title="x", kind="lines", x=(0.0, 1.0), series=("a", "b"), values=values)


POOLINGS: tuple[Pooling, ...] = ("rollout", "average", "max")
LENGTHS = torch.tensor([5, 3])


def causal(layers: int = 3, heads: int = 2, *, seed: int = 0) -> list[Tensor]:
    scores = torch.randn(layers, 2, heads, 5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return list(scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf).softmax(-1))


@pytest.mark.parametrize("how", POOLINGS)
def test_pooled_rows_sum_to_one_and_are_zero_at_padding(how: Pooling) -> None:
    row = pool_maps(causal(), LENGTHS, how)
    assert_close(row.sum(-1), torch.ones(2, dtype=torch.float64))
    assert row[1, 3:].abs().max() == 0
    assert row[0].min() > 0


def test_average_pooling_is_the_mean_over_heads_and_layers() -> None:
    attention_maps, row = causal(), pool_maps(causal(), LENGTHS)
    assert_close(row[0], torch.stack([layer[0, :, 4] for layer in attention_maps]).mean((0, 1)))
    assert_close(row[1], torch.stack([layer[1, :, 2] for layer in attention_maps]).mean((0, 1)))


def test_max_pooling_is_normalised() -> None:
    one, other = torch.tensor([0.8, 0.2]), torch.tensor([0.4, 0.6])
    attention_maps = [row.expand(1, 1, 2, 2) for row in (one, other)]
    assert_close(pool_maps(attention_maps, torch.tensor([2]), "max"), torch.tensor([[0.8, 0.6]]) / 1.4)


def test_rollout_matches_the_matrix_product() -> None:
    attention_maps, actual = causal(), pool_maps(causal(), LENGTHS, "rollout")
    product = torch.eye(5, dtype=torch.float64)
    for layer in attention_maps:  # as published: the first layer is on the right
        product = (layer.mean(1) + torch.eye(5)) / 2 @ product
    assert_close(actual[0], product[0, 4])
    assert_close(actual[1], product[1, 2])


@pytest.mark.parametrize("how", POOLINGS)
def test_padding_values_do_not_change_pooling(how: Pooling) -> None:
    attention_maps = causal()
    spoiled = [layer.clone() for layer in attention_maps]
    for layer in spoiled:
        layer[1, :, 3:] = torch.nan
    assert_close(pool_maps(spoiled, LENGTHS, how), pool_maps(attention_maps, LENGTHS, how))
    alone = pool_maps([layer[1:, :, :3, :3] for layer in attention_maps], LENGTHS[1:], how)
    assert_close(pool_maps(attention_maps, LENGTHS, how)[1:, :3], alone)


def test_query_position_can_be_the_first_token() -> None:
    attention_maps = [torch.rand(2, 2, 5, 5, dtype=torch.float64) for _ in range(2)]
    row = pool_maps(attention_maps, LENGTHS, query_positions=torch.tensor([0, 0]))
    expected = torch.stack(
        [layer[1, :, 0, :3] / layer[1, :, 0, :3].sum(-1, keepdim=True) for layer in attention_maps]
    ).mean((0, 1))
    assert_close(row[1, :3], expected)
    assert row[1, 3:].abs().max() == 0


def test_signed_weights_are_pooled_by_absolute_value() -> None:
    signed = torch.tensor([[3.0, -1.0], [0.01, 0.01]]).view(1, 2, 1, 2).expand(1, 2, 2, 2)
    assert_close(pool_maps([signed], torch.tensor([2])), torch.tensor([[0.625, 0.375]]))


@pytest.mark.parametrize("how", ["average", "max"])
def test_rows_of_zeros_pool_to_zero(how: Pooling) -> None:
    assert pool_maps([torch.zeros(1, 2, 3, 3)], torch.tensor([3]), how).tolist() == [[0, 0, 0]]


def test_rollout_of_rows_of_zeros_is_the_identity() -> None:
    assert pool_maps([torch.zeros(1, 2, 3, 3)], torch.tensor([3]), "rollout").tolist() == [[0, 0, 1]]


def test_layers_can_have_different_numbers_of_heads() -> None:
    attention_maps = [*causal(1, 4), *causal(1, 2)]
    assert_close(
        pool_maps(attention_maps, LENGTHS)[0],
        (attention_maps[0][0, :, 4].mean(0) + attention_maps[1][0, :, 4].mean(0)) / 2,
    )


@given(row=st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=8))
@settings(deadline=None, max_examples=25)
def test_l1_normalize_is_idempotent(row: list[float]) -> None:
    part = l1_normalize(torch.tensor(row, dtype=torch.float64))
    assert part.sum().item() == pytest.approx(1 if any(row) else 0)
    assert_close(l1_normalize(part), part)


@pytest.mark.parametrize("how", POOLINGS)
def test_half_precision_maps_are_pooled_in_float32(how: Pooling) -> None:
    row = pool_maps([layer.bfloat16() for layer in causal()], LENGTHS, how)
    assert row.dtype == torch.float32
    assert_close(row.sum(-1), torch.ones(2))


def test_nan_propagates_through_l1_normalize() -> None:
    assert l1_normalize(torch.tensor([torch.nan, 1.0])).isnan().all()


@pytest.mark.parametrize(
    ("attention_maps", "lengths", "how", "message"),
    [
        ([], [5, 3], "average", "maps=True"),
        (causal(), [5, 0], "average", r"from 1 to 5 for each of 2 rows, got \[5, 0\]"),
        (causal(), [6, 3], "average", r"from 1 to 5 for each of 2 rows, got \[6, 3\]"),
    ],
)
def test_invalid_pooling_arguments_raise(
    attention_maps: list[Tensor], lengths: list[int], how: Pooling, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        pool_maps(attention_maps, torch.tensor(lengths), how)


ROWS = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
RATIONALES = torch.tensor([[True, True, False, False], [True, False, False, False], [True, False, False, False]])


def test_mass_is_the_share_on_the_rationale() -> None:
    assert rationale_mass(ROWS, RATIONALES).tolist() == [0.75, 0, 0]


def test_mass_uses_absolute_weights() -> None:
    assert rationale_mass(torch.tensor([[-6.0, 2.0]]), torch.tensor([[True, False]])).item() == 0.75


def test_instances_without_a_rationale_do_not_count() -> None:
    result = rationale_mass(ROWS[:2], torch.tensor([[True] * 4, [False] * 4]))
    assert result[0] == 1
    assert result[1].isnan()
    assert confidence(result) == 100
    assert math.isnan(confidence(result[1:]))


@pytest.mark.parametrize(("tau", "percent"), [(0.0, 100), (0.2, 75), (0.5, 50), (0.51, 25), (1.0, 25)])
def test_confidence_is_the_percentage_with_mass_of_at_least_tau(tau: float, percent: float) -> None:
    assert confidence([0.1, 0.2, 0.5, 1.0], tau) == percent
    assert confidence(np.array([0.1, 0.2, 0.5, 1.0]), tau) == percent
    assert confidence(torch.tensor([0.1, 0.2, 0.5, 1.0]), tau) == percent  # also for 0.2 in single precision


@given(masses=st.lists(st.floats(0, 1), min_size=1, max_size=12))
@settings(deadline=None, max_examples=25)
def test_confidence_curve_decreases_and_its_area_is_the_mean_mass(masses: list[float]) -> None:
    taus = (np.arange(2000) + 0.5) / 2000
    curve = confidence_curve(masses, taus)
    assert (np.diff(curve) <= 0).all()
    assert curve.mean() == pytest.approx(100 * np.mean(masses), abs=0.1)


def test_entropy_is_in_nats_and_ignores_zeros() -> None:
    result = attention_entropy(ROWS)
    assert_close(result[0].item(), 1.5 * math.log(2))
    assert result[1] == 0
    assert math.copysign(1, result[1].item()) == 1
    assert result[2].isnan()


@pytest.mark.parametrize("n", [1, 2, 7])
def test_effective_tokens_of_uniform_attention(n: int) -> None:
    row = torch.zeros(1, 9, dtype=torch.float64)
    row[0, :n] = 0.3  # the map is normalized
    assert_close(effective_tokens(row).item(), float(n))


def test_stats_of_uniform_attention() -> None:
    even = torch.ones(2, 4, 4).tril() / torch.arange(1, 5)[:, None]
    last = torch.eye(4).expand(2, 4, 4)
    result = attention_stats([even, last])
    assert result.layers[0].effective_tokens_last == pytest.approx(4)
    assert result.layers[0].entropy_last == pytest.approx(math.log(4))
    assert result.layers[0].effective_tokens_mean == pytest.approx((1 + 2 + 3 + 4) / 4)
    assert result.layers[1].effective_tokens_last == result.layers[1].effective_tokens_mean == pytest.approx(1)
    assert result.pooled["average"] == pytest.approx([0.125, 0.125, 0.125, 0.625])
    assert all(sum(l1_normalize) == pytest.approx(1) for l1_normalize in result.pooled.values())


def test_stats_are_means_over_heads() -> None:
    heads = torch.stack([torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.eye(2)])
    assert attention_stats([heads]).layers[0].effective_tokens_last == pytest.approx(1.5)


def test_strongest_link_excludes_the_diagonal_and_keeps_its_sign() -> None:
    weights = torch.eye(3).repeat(2, 1, 1)
    weights[1, 2, 0] = -0.7
    weights[0, 1, 0] = 0.3
    link = attention_stats([weights]).layers[0].strongest
    assert link is not None
    assert (link.query, link.key, link.head) == (2, 0, 1)
    assert link.weight == pytest.approx(-0.7)
    assert attention_stats([torch.ones(1, 1, 1)]).layers[0].strongest is None


def test_rows_of_zeros_are_excluded_from_means() -> None:
    weights = torch.eye(3)[None].clone()
    weights[0, 0] = 0  # as in strictly causal maps
    assert attention_stats([weights]).layers[0].effective_tokens_mean == pytest.approx(1)
    assert math.isnan(attention_stats([torch.zeros(1, 2, 2)]).layers[0].effective_tokens_mean)


def test_mass_of_uniform_attention_is_the_fraction_of_tokens() -> None:
    even = torch.ones(1, 4, 4).tril() / torch.arange(1, 5)[:, None]
    on = rationale_confidence(attention_stats([even]), [0, 3])
    assert on.mass["average"] == on.mass["max"] == pytest.approx(on.uniform) == pytest.approx(0.5)
    assert rationale_confidence(attention_stats([even]), range(4)).mass["rollout"] == pytest.approx(1)


@given(st.lists(st.sampled_from(["the", "author", "guards", "naïve", "שלום", "😀", "a.b"]), min_size=1), st.data())
@settings(deadline=None, max_examples=25)
def test_token_positions_do_not_depend_on_the_tokenization(words: list[str], data: st.DataObject) -> None:
    text = " ".join(words).encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)))))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True) if begin < end]
    expected = data.draw(st.sampled_from(words))
    inside = set()
    for position, word in enumerate(words):
        if word == expected:
            begin = len(" ".join([*words[:position], ""]).encode())
            inside |= set(range(begin, begin + len(word.encode())))
    begins = [sum(map(len, pieces[:n])) for n in range(len(pieces))]
    overlap = [n for n, piece in enumerate(pieces) if inside & set(range(begins[n], begins[n] + len(piece)))]
    assert token_positions(expected, pieces) == tuple(overlap)


def test_adjacent_tokens_are_not_part_of_a_word() -> None:
    assert token_positions("author", [b"the ", b"author", b" of"]) == (1,)


@pytest.mark.parametrize("words", ["auth", "authors", "", " "])
def test_words_outside_the_text_raise(words: str) -> None:
    with pytest.raises(UsageError, match=r"words? of the text"):
        token_positions(words, [b"the", b" author"])
