from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.models import Classifier, ClassifierConfig

FAMILIES = ["standard", "differential", "qdelta", "kuramoto"]
SHAPES: list[dict[str, Any]] = [{}, {"hidden": 12, "norm": True, "layers": 2}]
LENGTHS = [3, 1, 5]


def model(mechanism: str = "standard", **changes: Any) -> Classifier:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"width": 8, "layers": 1, "heads": 2, "vocabulary": 11, "classes": 3}
    return Classifier(ClassifierConfig(mechanism=mechanism, **{**shape, **changes})).double()


def texts(lengths: list[int] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 11, (length,), generator=generator) for length in lengths]


def padded(rows: list[Tensor], t: int, side: str, filler: Tensor) -> tuple[Tensor, Layout]:
    """Return a batch of the rows, padded with the tokens of `filler`."""
    batch = filler.clone()
    for row, text in zip(batch, rows, strict=True):
        row[slice(len(text)) if side == "right" else slice(t - len(text), t)] = text
    return batch, Layout.padded([len(text) for text in rows], t, side=side)  # type: ignore[arg-type]


def gradients(classifier: Classifier, logits: Tensor) -> dict[str, Tensor]:
    classifier.zero_grad()
    F.cross_entropy(logits, torch.tensor([0, 1, 2][: len(logits)])).backward()
    return {name: p.grad.clone() for name, p in classifier.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("shape", SHAPES, ids=["attention alone", "whole blocks"])
@pytest.mark.parametrize("mechanism", FAMILIES)
@given(side=st.sampled_from(["left", "right"]), t=st.integers(5, 8), filling=st.integers(0, 10))
@settings(deadline=None, max_examples=3)
def test_padding_does_not_change_logits_or_gradients(
    mechanism: str, shape: dict[str, Any], side: str, t: int, filling: int
) -> None:
    decoder, rows = model(mechanism, **shape), texts()
    alone = torch.cat([decoder(text[None]) for text in rows])
    batch = decoder(*padded(rows, t, side, torch.full((3, t), filling)))
    assert_close(batch, alone, rtol=1e-9, atol=1e-10)
    expected, actual = gradients(decoder, alone), gradients(decoder, batch)
    assert expected.keys() == actual.keys() == dict(decoder.named_parameters()).keys()
    for name, gradient in expected.items():
        assert_close(actual[name], gradient, rtol=1e-8, atol=1e-10)


def test_logits_are_read_at_the_last_token() -> None:
    decoder, (tokens, layout) = model(), padded(texts(), 6, "right", torch.zeros(3, 6, dtype=torch.long))
    stream, _ = decoder.read(tokens, layout=layout)
    expected = torch.stack([decoder.head(stream[row, length - 1]) for row, length in enumerate(LENGTHS)])
    assert_close(decoder(tokens, layout), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(expected[0], decoder.head(stream[0, -1]))


@pytest.mark.parametrize("mechanism", FAMILIES)
def test_rows_are_independent(mechanism: str) -> None:
    decoder, tokens = model(mechanism), torch.randint(1, 11, (3, 5))
    before = decoder(tokens)
    tokens[1] = torch.randint(1, 11, (5,))
    after = decoder(tokens)
    assert_close(after[[0, 2]], before[[0, 2]], rtol=0, atol=1e-12)
    assert not torch.allclose(after[1], before[1])


@pytest.mark.parametrize("shape", SHAPES, ids=["attention alone", "whole blocks"])
@pytest.mark.parametrize("mechanism", FAMILIES)
def test_every_mechanism_family_trains(mechanism: str, shape: dict[str, Any]) -> None:
    decoder, tokens = model(mechanism, **shape), torch.randint(1, 11, (6, 4))
    labels = tokens[:, -1] % 3
    before = F.cross_entropy(decoder(tokens), labels)
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.02)
    before.backward()
    assert all(p.grad is not None for p in decoder.parameters())
    optimizer.step()
    assert F.cross_entropy(decoder(tokens), labels) < before


@pytest.mark.parametrize("mechanism", FAMILIES)
def test_disabled_parts_have_no_parameters(mechanism: str) -> None:
    bare, whole = ([name for name, _ in model(mechanism, **shape).named_parameters()] for shape in SHAPES)
    assert not [name for name in bare if "feed_forward" in name or "mechanism_norm" in name or name == "norm.weight"]
    assert [name for name in whole if "feed_forward" in name]
    assert ("norm.weight" in whole) == (mechanism != "kuramoto")  # points of a group need no norm
    plain = [name for name, _ in model(mechanism, hidden=12).named_parameters()]
    assert "blocks.0.feed_forward.up.weight" in plain
    assert not [name for name in plain if "mechanism_norm" in name or "feed_forward_norm" in name]


def test_packed_and_empty_rows_raise() -> None:
    tokens = torch.randint(1, 11, (1, 5))
    with pytest.raises(UsageError, match="one text of at least one token per row"):
        model()(tokens, Layout.packed([0, 3, 5]))
    with pytest.raises(UsageError, match="at least one token"):
        model()(tokens.expand(2, 5), Layout.padded([3, 0], 5))
    assert torch.equal(model()(tokens, Layout.packed([0, 5])), model()(tokens))


def test_invalid_classifier_configs_raise() -> None:
    for changes, message in (({"classes": 1}, "classes must be at least 2, got 1"), ({"hidden": -1}, "hidden must be")):
        with pytest.raises(UsageError, match=message):
            model(**changes)


@pytest.mark.parametrize("mechanism", FAMILIES)
def test_qk_start_scales_only_the_qk_matrices(mechanism: str) -> None:
    usual, quiet = model(mechanism), model(mechanism, qk_start=0.125)
    quick = {f"blocks.0.mechanism.{name}" for name in usual.mechanisms[0].circuits().qk}
    smaller = set()
    for (name, before), after in zip(usual.named_parameters(), quiet.parameters(), strict=True):
        if not torch.equal(before, after):
            smaller.add(name)
            assert torch.equal(before * 0.125, after)
    assert smaller
    assert smaller == {name for name in quick if dict(usual.named_parameters())[name].ndim == 2}
