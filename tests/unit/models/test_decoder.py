from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.mechanisms import StandardAttention
from qkflow.models import Block, Decoder, DecoderConfig, SwiGLU
from qkflow.training.tensors import load_model_tensors, load_tensors, model_tensors, save_tensors

HYBRID = ("standard", "differential:window=3", "standard:key_heads=1,window=4,qk_norm=True", "differential:key_heads=1")
MECHANISMS: list[Any] = ["standard", "differential", HYBRID]
STREAMS = ["kuramoto", "kuramoto:frustrated=True,harmonics=2", "group", "group:group=so3,frustrated=True"]
every_mechanism = pytest.mark.parametrize("mechanism", [*MECHANISMS, *STREAMS], ids=str)
MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


def config(mechanism: Any = "standard", **changes: Any) -> DecoderConfig:
    width, layers = (18 if "so3" in mechanism else 16, 2) if mechanism in STREAMS else (16, 4)
    base = DecoderConfig(width=width, layers=layers, heads=4, hidden=24, vocabulary=13, mechanism=mechanism)
    return replace(base, **changes)


def model(mechanism: Any = "standard", **changes: Any) -> Decoder:
    decoder = Decoder(config(mechanism, **changes)).double()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return decoder


def tokens(b: int, t: int) -> Tensor:
    return torch.randint(0, 13, (b, t))


def close(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, rtol=0, atol=1e-11)


def same_gradients(decoder: Decoder, actual: Tensor, expected: Tensor) -> None:
    close(actual, expected)
    weight, leaves = torch.randn_like(expected), [*decoder.parameters()]
    for a, b in zip(*(torch.autograd.grad(y, leaves, weight) for y in (actual, expected)), strict=True):
        close(a, b)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_split_sequence_equals_the_full_sequence(mechanism: Any, mode: Callable[[], Any]) -> None:
    decoder, x = model(mechanism), tokens(2, 9)
    with mode():
        whole, _ = decoder(x)
        for cut in (1, 4, 8):
            head, state = decoder(x[:, :cut])
            tail, state = decoder(x[:, cut:], state)
            close(torch.cat([head, tail], 1), whole)
            assert state.length.tolist() == [9, 9]


@pytest.mark.parametrize("mode", MODES)
@every_mechanism
def test_token_by_token_decoding_equals_the_full_sequence(mechanism: Any, mode: Callable[[], Any]) -> None:
    decoder, x = model(mechanism), tokens(2, 10)
    with mode():
        state, steps = None, []
        for token in x.split(1, 1):
            logits, state = decoder(token, state)
            steps.append(logits)
        close(torch.cat(steps, 1), decoder(x)[0])


@every_mechanism
def test_gradients_pass_through_the_state(mechanism: Any) -> None:
    decoder, x = model(mechanism), tokens(2, 6)
    head, state = decoder(x[:, :3])
    same_gradients(decoder, torch.cat([head, decoder(x[:, 3:], state)[0]], 1), decoder(x)[0])


@pytest.mark.parametrize("side", ["left", "right"])
@every_mechanism
def test_padding_does_not_change_logits_or_gradients(mechanism: Any, side: Any) -> None:
    decoder, lengths = model(mechanism), [4, 1, 6]
    layout = Layout.padded(lengths, 7, side=side)
    x = tokens(3, 7)
    logits, state = decoder(x, layout=layout)
    other, _ = decoder(x.where(layout.valid, (x + 1) % 13), layout=layout)
    close(other[layout.valid], logits[layout.valid])
    more = tokens(3, 2)
    after, _ = decoder(more, state)
    alone = [decoder(x[i, layout.valid[i]][None]) for i in range(3)]
    later = [decoder(more[i : i + 1], alone[i][1])[0] for i in range(3)]
    close(after, torch.cat(later))
    same_gradients(decoder, logits[layout.valid], torch.cat([y[0] for y, _ in alone]))


@every_mechanism
def test_packed_documents_are_independent(mechanism: Any) -> None:
    decoder, x = model(mechanism), tokens(1, 12)
    packed, state = decoder(x, layout=Layout.packed([0, 5, 6, 12]))
    same_gradients(decoder, packed, torch.cat([decoder(chunk)[0] for chunk in x.split([5, 1, 6], 1)], 1))
    assert state.length.tolist() == [5, 1, 6]
    starts = torch.zeros(2, 6, dtype=torch.bool)
    starts[0, 5] = starts[1, 0] = True
    segmented, _ = decoder(x.view(2, 6), layout=Layout.segmented(starts))
    close(segmented.view(1, 12, -1), packed)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_declared_cost_matches_torch(mechanism: Any, tied: bool) -> None:
    decoder = model(mechanism, tied=tied)
    for t in (1, 10):
        cost = decoder.cost(t)
        assert cost.parameters == sum(p.numel() for p in decoder.parameters())
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            decoder(tokens(1, t))
        assert cost.linear_flops + cost.pair_flops * t * t == counter.get_total_flops()
        assert decoder(tokens(1, t))[1].nbytes == cost.state_bytes
        mixers: list[Any] = [block.mechanism.cost(t) for block in decoder.blocks]  # type: ignore[union-attr]
        dense = 2 * t * (4 * 3 * 16 * 24 + 13 * 16)
        assert cost.flops == pytest.approx(sum(mixer.flops for mixer in mixers) + dense, abs=1)


def test_hybrid_stack_builds_one_mechanism_per_layer() -> None:
    decoder = model(HYBRID)
    mixers: list[Any] = [block.mechanism for block in decoder.blocks]  # type: ignore[union-attr]
    assert [type(mixer).__name__ for mixer in mixers] == [
        "StandardAttention",
        "DifferentialAttention",
        "StandardAttention",
        "DifferentialAttention",
    ]
    assert [mixer.config.window for mixer in mixers] == [None, 3, 4, None]
    assert mixers[1].lambda_init < mixers[3].lambda_init


def test_tied_head_uses_the_embedding() -> None:
    tied, untied = model(tied=True), model(tied=False)
    assert tied.head is None
    assert not any(name.startswith("head") for name in tied.state_dict())
    assert untied.head is not None
    x = torch.randn(2, 16, dtype=torch.float64)
    close(tied.logits(x), x @ tied.embedding.weight.T)
    close(untied.logits(x), x @ untied.head.weight.T)


@pytest.mark.parametrize("tied", [True, False])
def test_initial_logits_are_near_uniform(tied: bool) -> None:
    decoder, x = Decoder(config(tied=tied, width=64, vocabulary=257)), torch.randint(0, 257, (4, 32))
    logits, _ = decoder(x[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
    assert float(loss.detach()) == pytest.approx(torch.tensor(257.0).log().item(), abs=0.1)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_every_parameter_has_a_gradient(mechanism: Any) -> None:
    decoder = model(mechanism, tied=False)
    decoder(tokens(2, 6))[0].square().sum().backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_state_operations_apply_to_all_layers() -> None:
    decoder, x = model(HYBRID), tokens(2, 5)
    _, state = decoder(x)
    assert state.length.tolist() == [5, 5]
    assert state.nbytes == sum(layer.nbytes for layer in state.layers) > 0
    token = tokens(2, 1)
    expected = decoder(token, state)[0]
    rows = torch.tensor([1, 0, 1])
    close(decoder(token[rows], state.select(rows))[0], expected[rows])
    cut = state.detach().to("cpu")
    close(decoder(token, cut)[0], expected)
    caches: Any = cut.layers
    assert not any(x.requires_grad for cache in caches for x in cache.tensors)


def test_dropout_applies_in_training_only() -> None:
    decoder, x = model(dropout=0.5), tokens(1, 6)
    assert not torch.equal(decoder(x)[0], decoder(x)[0])
    decoder.eval()
    assert torch.equal(decoder(x)[0], decoder(x)[0])
    without = model()
    without.load_state_dict(decoder.state_dict())
    close(decoder(x)[0], without(x)[0])


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_autocast_is_close_to_full_precision(mechanism: Any) -> None:
    decoder, x = model(mechanism).float(), tokens(2, 8)
    exact = decoder(x)[0].detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, state = decoder(x)
        with torch.no_grad():
            head, state = decoder(x[:, :5])
            rest = [head]
            for token in x[:, 5:].split(1, 1):
                step, state = decoder(token, state)
                rest.append(step)
    logits.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in decoder.parameters())
    for actual in (logits.detach(), torch.cat(rest, 1)):
        assert float((actual - exact).norm() / exact.norm()) < 0.05


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # torch.compile emits warnings
def test_model_compiles_into_one_graph() -> None:
    decoder, x = model(HYBRID), tokens(2, 6)
    torch.compiler.reset()
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    actual, expected = compiled(x)[0], decoder(x)[0]
    close(actual, expected)
    weight, leaves = torch.randn_like(expected), [*decoder.parameters()]
    for a, b in zip(*(torch.autograd.grad(y, leaves, weight) for y in (actual, expected)), strict=True):
        close(a, b)


def test_swiglu_matches_its_formula() -> None:
    layer, x = SwiGLU(4, 6).double(), torch.randn(2, 3, 4, dtype=torch.float64)
    gate, up, down = layer.gate.weight, layer.up.weight, layer.output.weight
    raw = x @ gate.T
    close(layer(x), (raw * torch.sigmoid(raw) * (x @ up.T)) @ down.T)


def test_block_is_pre_norm_residual() -> None:
    block = Block(StandardAttention(16, 4), 16, 24, eps=0.01).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    y = x + block.mechanism(F.rms_norm(x, (16,), block.mechanism_norm.weight, 0.01))[0]
    y = y + block.feed_forward(F.rms_norm(y, (16,), block.feed_forward_norm.weight, 0.01))
    close(block(x)[0], y)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "heads must divide the width, got 3 heads for a width of 16"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"vocabulary": -1}, "vocabulary must be at least 1, got -1"),
        ({"dropout": 1.0}, r"dropout must be at least 0 and below 1, got 1\.0"),
        ({"mechanism": ("standard",)}, "one per layer, got 1 for 4 layers"),
        ({"mechanism": "diferential"}, "did you mean 'differential'"),
        ({"mechanism": "differential", "heads": 1}, "even number of heads"),
    ],
)
def test_invalid_model_configs_raise(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Decoder(config(**changes))


# ---- coupling networks that all layers share

TIED = [
    "standard+hamiltonian:sharing=layers",
    "standard+euler:sharing=layers,force=potential",
    "differential+affine:sharing=layers,alternations=2",
    "standard+uncoupled:sharing=layers",
    "standard+residual-query:sharing=layers",
]


def couplings(decoder: Decoder) -> list[Any]:
    return [block.mechanism.coupling for block in decoder.blocks]  # type: ignore[union-attr]


def networks(coupling: Any) -> dict[str, Tensor]:
    return {name: weight for name, weight in coupling.named_parameters() if name != "dt"}


@pytest.mark.parametrize("mechanism", TIED)
def test_layers_share_one_network_but_not_the_step_size(mechanism: str) -> None:
    decoder, other = model(mechanism), model(mechanism.replace("sharing=layers", "sharing=heads"))
    first, *rest = couplings(decoder)
    for coupling in rest:
        assert networks(coupling).keys() == networks(first).keys()
        assert all(weight is networks(first)[name] for name, weight in networks(coupling).items())
        assert not hasattr(first, "dt") or coupling.dt is not first.dt
    shared = sum(weight.numel() for weight in networks(first).values())
    count, more = (sum(p.numel() for p in each.parameters()) for each in (decoder, other))
    assert count == more - 3 * shared
    assert decoder.cost(5).parameters == count
    difference = couplings(other)
    assert not any(a is b for a in networks(difference[0]).values() for b in networks(difference[1]).values())


@pytest.mark.parametrize("mechanism", TIED)
def test_shared_network_accumulates_gradients_of_all_layers(mechanism: str) -> None:
    decoder, x = model(mechanism), tokens(2, 6)
    difference = model(mechanism.replace("sharing=layers", "sharing=heads"))
    difference.load_state_dict(decoder.state_dict())
    for each in (decoder, difference):
        each(x)[0].square().sum().backward()
    for name, weight in networks(couplings(decoder)[0]).items():
        close(weight.grad, sum(networks(coupling)[name].grad for coupling in couplings(difference)))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.1)
    assert len({id(p) for group in optimizer.param_groups for p in group["params"]}) == len([*decoder.parameters()])
    first, *_, last = couplings(decoder)
    expected = {name: weight.detach() - 0.1 * weight.grad for name, weight in networks(last).items()}
    optimizer.step()
    for name, weight in networks(last).items():
        close(weight, expected[name])
    if hasattr(first, "dt"):
        assert first.dt.item() != last.dt.item()


@pytest.mark.parametrize("mechanism", TIED)
def test_checkpoint_stores_a_shared_network_once(mechanism: str, tmp_path: Path) -> None:
    decoder, other, x = model(mechanism), model(mechanism), tokens(2, 6)
    tensors = model_tensors(decoder)
    assert sum(w.numel() for w in tensors.values()) == sum(p.numel() for p in decoder.parameters())
    assert tensors.keys() == {name for name, _ in decoder.named_parameters()}
    save_tensors(tmp_path / "weights.safetensors", tensors)
    assert not torch.equal(other(x)[0], decoder(x)[0])
    load_model_tensors(other, load_tensors(tmp_path / "weights.safetensors"))
    assert torch.equal(other(x)[0], decoder(x)[0])
    first, *rest = couplings(other)
    assert all(weight is networks(first)[name] for each in rest for name, weight in networks(each).items())


def test_hybrid_stacks_share_between_equal_mechanisms_only() -> None:
    shared = "standard+hamiltonian:sharing=layers"
    decoder = model((shared, "differential+hamiltonian:sharing=layers", shared, "standard+hamiltonian"))
    one, two, three, four = (coupling.force.inner for coupling in couplings(decoder))
    assert one is three
    assert len({id(weight) for weight in (one, two, four)}) == 3


def test_sharing_does_not_depend_on_the_spelling_of_the_spec() -> None:
    one, two = "standard+hamiltonian:sharing=layers,steps=2", "standard+hamiltonian: steps=2, sharing=layers"
    assert len({id(coupling.force.inner) for coupling in couplings(model((one, two, two, one)))}) == 1


@pytest.mark.parametrize("mechanism", TIED)
def test_token_by_token_decoding_with_a_shared_network_equals_the_full_sequence(mechanism: str) -> None:
    decoder, x = model(mechanism), tokens(2, 7)
    with torch.no_grad():
        state, steps = None, []
        for token in x.split(1, 1):
            logits, state = decoder(token, state)
            steps.append(logits)
        close(torch.cat(steps, 1), decoder(x)[0])
