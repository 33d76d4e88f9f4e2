"""The one-layer model of the theory, in its four forms."""

from itertools import product
from typing import cast, get_args

import pytest
import torch
from jaxtyping import TypeCheckError
from torch.testing import assert_close

from qkflow.circuits import circuit_groups
from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.models.one_layer import Form, OneLayer, OneLayerConfig

FORMS = cast(tuple[Form, ...], get_args(Form))
V = 7


def made(form: Form, *, seed: int = 0, rank: int | None = None) -> OneLayer:
    """Return a model with random matrices, optionally of a given rank."""
    g = torch.Generator().manual_seed(seed)
    model = OneLayer(OneLayerConfig(vocabulary=V, form=form)).double()
    for parameter in model.parameters():
        left, right = (torch.randn(V, rank or V, generator=g, dtype=torch.float64) for _ in range(2))
        parameter.data = left @ right.T
    return model


def texts(b: int = 5, t: int = 6) -> torch.Tensor:
    return torch.randint(V, (b, t), generator=torch.Generator().manual_seed(1))


def reference_logits(model: OneLayer, tokens: torch.Tensor) -> torch.Tensor:
    """The two equations of the docstring, one text and one token at a time."""
    qk, ov = model.matrices()
    eye, rows = torch.eye(V, dtype=qk.dtype), []
    for text in tokens:
        a = torch.stack([eye[text[-1]] @ qk @ eye[i] / V**0.5 for i in text[:-1]]).softmax(0)
        rows.append(ov @ sum(weight * eye[i] for weight, i in zip(a, text[:-1], strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("form", FORMS)
def test_logits_match_the_equations(form: Form) -> None:
    model = made(form)
    assert_close(model(texts()), reference_logits(model, texts()), rtol=0, atol=1e-10)
    a = model.weights(texts())
    assert_close(a.sum(1), torch.ones(5, dtype=a.dtype))
    assert not a[:, -1].any()
    gathered = (a[..., None] * model.embed(texts())).sum(1)
    assert_close(gathered @ model.matrices()[1].T, model(texts()), rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_matrices_start_as_scaled_identities(form: Form) -> None:
    model = OneLayer(OneLayerConfig(form=form))
    for parameter in model.parameters():
        assert torch.equal(parameter, 1e-6 * torch.eye(50))
    qk, ov = model.matrices()
    assert qk[0, 0].item() == pytest.approx(1e-12 if form.startswith("FA") else 1e-6)
    assert ov[0, 0].item() == pytest.approx(1e-12 if form.endswith("FO") else 1e-6)


@pytest.mark.parametrize(("old", "new"), [*product(FORMS, FORMS)])
def test_conversion_and_its_inverse_preserve_the_function(old: Form, new: Form) -> None:
    model = made(old)
    moved = model.convert(new)
    back = moved.convert(old)
    assert moved.config.form == new
    for other in (moved, back):
        assert_close(other(texts()), model(texts()), rtol=0, atol=1e-10)
        assert_close(other.weights(texts()), model.weights(texts()), rtol=0, atol=1e-10)


@pytest.mark.parametrize("rank", [0, 1, 3, V])
def test_factors_are_balanced_and_keep_the_rank(rank: int) -> None:
    model = made("CACO", rank=rank or 1)
    if not rank:
        for parameter in model.parameters():
            parameter.data.zero_()
    names = ("query", "key", "value", "output")
    query, key, value, output = (model.convert("FAFO").get_parameter(name).detach() for name in names)
    assert_close(query @ query.T, key @ key.T, rtol=0, atol=1e-10)
    assert_close(output.T @ output, value @ value.T, rtol=0, atol=1e-10)
    for factor in (query, key, value, output):
        assert int((torch.linalg.svdvals(factor) > 0.01).sum()) == rank
        assert int(torch.linalg.matrix_rank(factor)) == rank


def test_unconverted_circuits_keep_their_matrices() -> None:
    model = made("FAFO")
    other = model.convert("FACO")
    assert torch.equal(other.get_parameter("query"), model.get_parameter("query"))
    other.get_parameter("query").data.zero_()
    assert model.get_parameter("query").any()


@pytest.mark.parametrize("form", FORMS)
def test_circuits_name_every_matrix(form: Form) -> None:
    model, circuits = made(form), made(form).circuits()
    assert {*circuits.qk, *circuits.ov} == {name for name, _ in model.named_parameters()}
    model.weights(texts()).square().sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()} == {*circuits.qk}
    groups = {group["circuit"]: group for group in circuit_groups(model, 0.1, r=20.0)}
    assert {id(p) for p in groups["qk"]["params"]} == {id(model.get_parameter(name)) for name in circuits.qk}
    assert groups["qk"]["lr"] == pytest.approx(2.0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_the_logits(side: str) -> None:
    model, tokens, lengths = made("FAFO"), texts(), [6, 1, 4, 2, 5]
    layout = Layout.padded(lengths, 6, side=side)
    logits, a = model(tokens, layout), model.weights(tokens, layout)
    for row, length in enumerate(lengths):
        valid = slice(0, length) if side == "right" else slice(6 - length, 6)
        assert_close(logits[row : row + 1], model(tokens[row : row + 1, valid]))
        assert_close(a[row, valid], model.weights(tokens[row : row + 1, valid])[0])
    assert not a[~layout.valid].any()


def test_padding_tokens_are_not_read() -> None:
    model, layout = made("CACO"), Layout.padded([2, 3], 4)
    x = model.embed(texts(2, 4))
    x[~layout.valid] = torch.nan
    x.requires_grad_()
    logits = model.read(x, layout)
    logits.sum().backward()
    assert x.grad is not None
    assert torch.isfinite(logits).all()
    assert torch.isfinite(x.grad).all()


def test_rows_without_visible_tokens_have_zero_attention_and_finite_gradients() -> None:
    model, layout = made("FAFO"), Layout.padded([0, 1, 3], 4)
    logits = model(texts(3, 4), layout)
    assert not logits[:2].any()
    assert model.weights(texts(3, 4), layout).sum(1).tolist() == pytest.approx([0, 0, 1])
    logits.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_packed_layouts_raise() -> None:
    with pytest.raises(UsageError, match="3 packed sequences in 1 rows"):
        made("FAFO")(texts(1, 6), Layout.packed([0, 2, 4, 6]))


def test_invalid_configs_raise() -> None:
    with pytest.raises((UsageError, TypeCheckError), match="FAFA"):
        OneLayerConfig(form=cast(Form, "FAFA"))
    with pytest.raises(UsageError, match="vocabulary must be at least 1, got 0"):
        OneLayerConfig(vocabulary=0)
    with pytest.raises(UsageError, match="start must be a finite number, got nan"):
        OneLayerConfig(start=float("nan"))
