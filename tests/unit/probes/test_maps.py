import pytest
import torch
from torch.testing import assert_close

from qkflow.errors import UsageError
from qkflow.mechanisms.base import Diagnostic
from qkflow.models import Decoder, DecoderConfig
from qkflow.models.blocks import Block
from qkflow.probes import look, maps


def model(mechanism: str | tuple[str, ...] = "standard", *, dropout: float = 0.0) -> Decoder:
    config = DecoderConfig(width=32, layers=3, heads=4, hidden=48, mechanism=mechanism, dropout=dropout)
    made = Decoder(config)
    for parameter in made.parameters():  # blocks begin at zero: let every layer matter
        torch.nn.init.normal_(parameter, std=0.2)
    return made


HYBRID = ("standard", "differential", "standard:window=3")
TOKENS = [72, 101, 108, 108, 111, 256, 10]


@pytest.mark.parametrize("mechanism", ["standard", "differential", HYBRID])
def test_maps_are_the_weights_of_each_block_on_its_own_input(mechanism: str | tuple[str, ...]) -> None:
    made = model(mechanism)
    x = made.embedding(torch.tensor([TOKENS]))
    for block, got in zip(made.blocks, maps(made, TOKENS), strict=True):
        assert isinstance(block, Block)
        normed = block.mechanism_norm(x)
        weights = block.mechanism.weights(normed)
        assert_close(got, weights[0])
        gathered = torch.einsum("bhts,bshv->bthv", got[None], block.mechanism.values(normed))
        assert_close(block.mechanism.read(gathered, normed), block.mechanism(normed)[0], rtol=1e-4, atol=1e-5)
        x = block(x)[0]


def test_no_token_looks_ahead_and_a_window_is_kept() -> None:
    for layer in maps(model(HYBRID), TOKENS):
        assert layer.triu(1).abs().max() == 0
    assert maps(model(HYBRID), TOKENS)[2].tril(-3).abs().max() == 0


def test_the_model_is_left_as_it_was() -> None:
    made = model(dropout=0.5).train()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    first, second = maps(made, TOKENS), maps(made, TOKENS)
    assert_close(first, second)  # no dropout while looking
    assert made.training
    assert all(not block.mechanism._forward_pre_hooks for block in made.blocks)  # pyright: ignore
    assert_close(dict(made.state_dict()), before)
    assert all(not layer.requires_grad for layer in first)


def test_a_failing_model_is_left_as_it_was() -> None:
    made = model().train()

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    made.blocks[1].feed_forward.register_forward_pre_hook(fail)  # pyright: ignore
    with pytest.raises(RuntimeError, match="broken"):
        maps(made, TOKENS)
    assert made.training
    assert all(not block.mechanism._forward_pre_hooks for block in made.blocks)  # pyright: ignore


def test_differential_layers_show_their_lambda_and_standard_ones_nothing() -> None:
    layers = look(model(HYBRID), TOKENS)
    assert [len(layer.exhibits) for layer in layers] == [0, 1, 0]
    (exhibit,) = layers[1].exhibits
    learned, start = exhibit.values[0][0], exhibit.values[1][0]
    assert start == pytest.approx(0.8 - 0.6 * 2.718281828 ** (-0.3))
    assert layers[1].weights.sum(-1) == pytest.approx(1 - learned, abs=1e-5)


@pytest.mark.parametrize(("tokens", "told"), [([], "at least one"), ([257], "0 to 256"), ([-1], "0 to 256")])
def test_tokens_that_are_none_are_refused(tokens: list[int], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        maps(model(), tokens)


@pytest.mark.parametrize("values", [((1.0,),), ((1.0, 2.0), (1.0,)), ((1.0, 2.0), (1.0, 2.0), (1.0, 2.0)), ()])
def test_an_exhibit_whose_numbers_do_not_fit_its_names_is_refused(values: tuple) -> None:
    with pytest.raises(UsageError, match="2 rows"):
        Diagnostic(title="x", kind="lines", x=(0.0, 1.0), series=("a", "b"), values=values)
