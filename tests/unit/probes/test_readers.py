import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.models import Classifier, ClassifierConfig, Decoder, DecoderConfig
from qkflow.models.one_layer import OneLayer, OneLayerConfig
from qkflow.probes.readers import Reader, reader

TOKENS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 1, 0, 0], [2, 0, 0, 0, 0]])
LENGTHS = torch.tensor([5, 3, 1])


def classifier(mechanism: str = "standard", *, dropout: float = 0.0) -> Classifier:
    torch.manual_seed(0)
    shape = ClassifierConfig(
        width=16, layers=2, heads=2, hidden=8, vocabulary=12, classes=3, mechanism=mechanism, dropout=dropout
    )
    return Classifier(shape).double()


def decoder() -> Decoder:
    torch.manual_seed(0)
    module = Decoder(DecoderConfig(width=16, layers=2, heads=2, hidden=8, vocabulary=12)).double()
    for parameter in module.parameters():  # blocks are zero at initialization
        nn.init.normal_(parameter, std=0.3)
    return module


def one_layer() -> OneLayer:
    torch.manual_seed(0)
    module = OneLayer(OneLayerConfig(vocabulary=12)).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


MODELS = [classifier, decoder, one_layer]


@pytest.mark.parametrize("make", MODELS)
def test_logits_are_those_of_the_last_token(make: type) -> None:
    model = make()
    actual = reader(model).read(TOKENS, LENGTHS).logits
    if isinstance(model, Decoder):
        assert_close(actual, model(TOKENS, layout=Layout.padded(LENGTHS, 5))[0][range(3), LENGTHS - 1])
    else:
        assert_close(actual, model(TOKENS, Layout.padded(LENGTHS, 5)))


@pytest.mark.parametrize("mechanism", ["standard:window=2", "differential", "gated-deltanet", "qdelta", "kuramoto"])
def test_batched_reading_equals_single_texts(mechanism: str) -> None:
    read = reader(classifier(mechanism))
    together = read.read(TOKENS, LENGTHS, maps=True)
    assert together.maps is not None
    for row, length in enumerate(LENGTHS.tolist()):
        alone = read.read(TOKENS[row, None, :length], LENGTHS[row, None], maps=True)
        assert alone.maps is not None
        assert_close(together.logits[row], alone.logits[0], rtol=1e-10, atol=1e-10)
        for layer, single in zip(together.maps, alone.maps, strict=True):
            assert_close(layer[row, :, :length, :length], single[0], rtol=1e-10, atol=1e-10)
            assert layer[row, :, length:].abs().sum() == layer[row, :, :, length:].abs().sum() == 0


def test_maps_are_the_weights_of_each_block_on_its_own_input() -> None:
    model = classifier()
    actual = reader(model).read(TOKENS, LENGTHS, maps=True).maps
    assert actual is not None
    x, layout = model.embed(TOKENS), Layout.padded(LENGTHS, 5)
    for block, layer in zip(model.blocks, actual, strict=True):
        assert_close(layer, block.mechanism.weights(block.mechanism_norm(x), layout=layout))  # pyright: ignore
        x = block(x, None, layout)[0]


def test_one_layer_maps_are_the_identity_except_for_the_last_token() -> None:
    model = one_layer()
    (actual,) = reader(model).read(TOKENS, LENGTHS, maps=True).maps or ()
    weights = model.weights(TOKENS, Layout.padded(LENGTHS, 5))
    assert_close(actual[range(3), 0, LENGTHS - 1], weights)
    assert_close(actual[0, 0, :4], torch.eye(5, dtype=torch.float64)[:4])
    assert actual[1, 0, 3:].abs().max() == 0


@pytest.mark.parametrize("make", [classifier, decoder])
def test_saliency_matches_finite_differences(make: type) -> None:
    model, step = make(), 1e-5
    read = reader(model)
    actual, best = read.saliency(TOKENS, LENGTHS), read.read(TOKENS, LENGTHS).logits.argmax(-1)
    for row, length in ((0, 5), (1, 3)):
        for position in range(length):
            scores = []
            for factor in (1 - step, 1 + step):
                hook = model.embedding.register_forward_hook(lambda _, __, x, p=position, b=factor: _stretched(x, p, b))
                scores.append(read.read(TOKENS[row, None, :length], LENGTHS[row, None]).logits[0, best[row]])
                hook.remove()
            assert_close(actual[row, position], (scores[1] - scores[0]).abs() / (2 * step), rtol=1e-6, atol=1e-8)
    assert actual[1, 3:].abs().max() == 0


def _stretched(x: Tensor, position: int, factor: float) -> Tensor:
    x = x.clone()
    x[:, position] *= factor
    return x


def test_saliency_of_one_hot_tokens_is_the_gradient_at_their_index() -> None:
    model = one_layer()
    x = model.embed(TOKENS[:1]).requires_grad_()
    logits = model.read(x)
    (gradient,) = torch.autograd.grad(logits[0, logits[0].argmax()], x)
    assert_close(reader(model).saliency(TOKENS, LENGTHS)[0], gradient[0, range(5), TOKENS[0]].abs())


@pytest.mark.parametrize("make", MODELS)
def test_reading_leaves_the_model_unchanged(make: type) -> None:
    model = make().train()
    fractions = list(model.modules())
    fractions[-1].eval()  # a frozen parameter
    modes, before = (
        [fraction.training for fraction in fractions],
        {name: x.clone() for name, x in model.state_dict().items()},
    )
    read = reader(model)
    with torch.no_grad():
        assert read.saliency(TOKENS, LENGTHS).requires_grad is False
    actual = read.read(TOKENS, LENGTHS, maps=True)
    assert not actual.logits.requires_grad
    assert [fraction.training for fraction in fractions] == modes
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert_close(dict(model.state_dict()), before)
    assert not any(fraction._forward_hooks or fraction._forward_pre_hooks for fraction in fractions)


def test_reading_disables_dropout() -> None:
    read = reader(classifier(dropout=0.5).train())
    assert_close(read.read(TOKENS, LENGTHS).logits, read.read(TOKENS, LENGTHS).logits)


def test_readers_implement_the_protocol() -> None:
    for make in MODELS:
        assert isinstance(reader(make()), Reader)


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        ([[3, 12]], [2], "from 0 to 11, got 3 to 12: use the vocabulary"),
        ([[3, -1]], [2], "from 0 to 11, got -1 to 3"),
        ([[3, 4]], [3], r"from 1 to 2 for each of 1 rows, got \[3\]"),
        ([[3, 4]], [0], r"from 1 to 2 for each of 1 rows, got \[0\]"),
    ],
)
@pytest.mark.parametrize("make", MODELS)
def test_invalid_batches_raise(make: type, tokens: list[list[int]], lengths: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        reader(make()).read(torch.tensor(tokens), torch.tensor(lengths))


def test_unsupported_models_raise() -> None:
    with pytest.raises(UsageError, match=r"no reader for Linear"):
        reader(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="Classifier answers at the last token"):
        reader(classifier(), answer_at="first")
