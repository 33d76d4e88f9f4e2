"""Standard and differential attention: shapes, states, maps and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qkflow.errors import UsageError
from qkflow.layout import Layout
from qkflow.mechanisms import DifferentialAttention, StandardAttention, StandardConfig, mechanism
from qkflow.models.decoder import DecoderState

WIDTH, HEADS = 32, 4
SPECS = [
    *("standard", "standard:key_heads=2,qk_norm=True", "standard:window=3", "standard:conv=3,key_shift=True"),
    *("differential", "differential:window=4"),
]
MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


def make(spec: str, *, dtype: torch.dtype = torch.float64) -> Any:
    return mechanism(spec)(WIDTH, HEADS, layer=1, layers=2).to(dtype)


def stream(b: int, t: int, *, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(b, t, WIDTH, dtype=dtype)


def close(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("past", "t"), [(3, 1), (2, 4), (9, 2), (1, 12)])
def test_map_with_a_state_equals_rows_of_the_full_map(spec: str, mode: Callable[[], Any], past: int, t: int) -> None:
    layer, x = make(spec), stream(2, past + t)
    with mode():
        whole = layer.weights(x)
        _, state = layer(x[:, :past])
        weights = layer.weights(x[:, past:], state)
        slots = state.positions.tolist()
    assert weights.shape[-1] == len(slots) + t
    close(weights[..., len(slots) :], whole[:, :, past:, past:])
    close(weights[..., : len(slots)], whole[:, :, past:, slots])
    forgotten = [s for s in range(past) if s not in slots]
    assert not whole[:, :, past:, forgotten].any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [3, 20])
def test_map_has_a_column_per_slot_of_the_state(mode: Callable[[], Any], window: int) -> None:
    """Also in the call in which the buffer grows."""
    layer, x = make(f"standard:window={window}"), stream(1, 45)
    with mode():
        whole, state, states = layer.weights(x), None, []
        for token in x.split(1, 1):
            _, state = layer(token, state)
            states.append(state)
        for position, state in enumerate(states[:-1], start=1):
            weights = layer.weights(x[:, position : position + 1], state)
            slots = [*state.positions.tolist(), position]
            assert weights.shape[-1] == len(slots), f"at position {position}"
            close(weights[0, :, 0], whole[0, :, position][:, slots])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("packed", [False, True])
def test_map_with_layout_and_state_shows_each_sequence_its_own_past(
    spec: str, mode: Callable[[], Any], packed: bool
) -> None:
    layer = make(spec)
    before, counts = [4, 1, 2], [2, 3, 1]
    pieces = [stream(1, a + b) for a, b in zip(before, counts, strict=True)]
    with mode():
        first = Layout.packed([0, 4, 5, 7])
        _, state = layer(torch.cat([x[:, :a] for x, a in zip(pieces, before, strict=True)], 1), layout=first)
        positions = state.positions.tolist()
        if packed:
            after = Layout.packed([0, 2, 5, 6])
            x = torch.cat([x[:, a:] for x, a in zip(pieces, before, strict=True)], 1)
        else:
            after = Layout.padded(counts, 3, side="left")
            x = torch.cat(
                [torch.cat([stream(1, 3 - c), x[:, a:]], 1) for x, a, c in zip(pieces, before, counts, strict=True)]
            )
        weights = layer.weights(x, state, after)
        wholes = [layer.weights(piece)[0] for piece in pieces]
    slots = len(positions[0])
    assert weights.shape == (*x.shape[:1], wholes[0].shape[0], x.shape[1], slots + x.shape[1])
    for b, t in after.valid.nonzero().tolist():
        i, p = int(after.sequences[b, t]), before[int(after.sequences[b, t])] + int(after.positions[b, t])
        expected = torch.zeros_like(weights[b, :, t])
        for slot, position in enumerate(positions[i]):
            if position >= 0:
                expected[:, slot] = wholes[i][:, p, position]
        for s in range(x.shape[1]):
            if int(after.sequences[b, s]) == i:
                expected[:, slots + s] = wholes[i][:, p, before[i] + int(after.positions[b, s])]
        close(weights[b, :, t], expected)
    assert not weights.transpose(1, 2)[~after.valid].any()


@pytest.mark.parametrize("spec", SPECS)
def test_rows_of_the_map_sum_to_one(spec: str) -> None:
    layer = make(spec)
    rows = layer.weights(stream(2, 6)).sum(-1)
    close(rows, torch.ones_like(rows) - (layer.lam if isinstance(layer, DifferentialAttention) else 0))


@pytest.mark.parametrize("spec", SPECS)
def test_packed_sequences_continue_from_their_own_state(spec: str) -> None:
    layer, lengths = make(spec), [3, 1, 5]
    pieces = [stream(1, n + 2) for n in lengths]
    head = torch.cat([x[:, :-2] for x in pieces], 1)
    y, state = layer(head, layout=Layout.packed([0, 3, 4, 9]))
    assert state.length.tolist() == lengths
    more, state = layer(torch.cat([x[:, -2:] for x in pieces], 1), state, Layout.packed([0, 2, 4, 6]))
    assert state.length.tolist() == [n + 2 for n in lengths]
    for i, piece in enumerate(pieces):
        expected = layer(piece)[0]
        close(torch.cat([y.split(lengths, 1)[i], more[:, 2 * i : 2 * i + 2]], 1), expected)


@pytest.mark.parametrize("spec", SPECS)
def test_empty_sequences_are_supported(spec: str) -> None:
    layer, x = make(spec), stream(1, 3)
    y, state = layer(x, layout=Layout.packed([0, 2, 2, 3]))
    assert state.length.tolist() == [2, 0, 1]
    more, _ = layer(stream(3, 1), state)
    assert more.isfinite().all()
    token = stream(3, 1)
    close(layer(token, state)[0][1], layer(token[1:2])[0][0])
    close(y[:, :2], layer(x[:, :2])[0])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_padding_values_have_no_effect(spec: str, bad: float) -> None:
    layer, x = make(spec), stream(2, 4)
    layout = Layout.padded([2, 3], 4, side="left")
    poisoned = x.masked_fill(~layout.valid[..., None], bad).requires_grad_()
    y, _ = layer(poisoned, layout=layout)
    close(y, layer(x, layout=layout)[0])
    gradients = torch.autograd.grad(y.sum(), [poisoned, *layer.parameters()], materialize_grads=True)
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("spec", SPECS)
def test_non_contiguous_batches_are_supported(spec: str) -> None:
    layer = make(spec)
    for x in (stream(5, 2).transpose(0, 1), stream(2, 10)[:, ::2], stream(1, 5).expand(2, -1, -1)):
        assert torch.equal(layer(x)[0], layer(x.contiguous())[0])


@pytest.mark.parametrize("window", [1, 2, 5, 6, 9])
@pytest.mark.parametrize("name", ["standard", "differential"])
def test_window_limits_the_visible_keys(name: str, window: int) -> None:
    layer, t = make(f"{name}:window={window}"), 6
    meets = layer.weights(stream(1, t))[0, 0] != 0
    assert torch.equal(meets, torch.ones(t, t, dtype=torch.bool).tril().triu(1 - window))


@pytest.mark.parametrize("name", ["standard", "differential"])
def test_window_as_long_as_the_sequence_has_no_effect(name: str) -> None:
    wide, narrow = make(name), make(f"{name}:window=6")
    narrow.load_state_dict(wide.state_dict())
    x = stream(2, 6)
    close(narrow(x)[0], wide(x)[0])


@pytest.mark.parametrize("spec", ["standard:window=5", "standard:window=5,key_heads=1", "differential:window=5"])
@pytest.mark.parametrize("ragged", [False, True])
def test_windowed_state_is_bounded_and_correct(spec: str, ragged: bool) -> None:
    layer, x = make(spec), stream(2, 100)
    lengths = [60, 57] if ragged else [60, 60]
    with torch.no_grad():
        whole = layer(x)[0]
        layout = Layout.padded(lengths, 60) if ragged else None
        _, state = layer(x[:, :60], layout=layout)
        at, largest = torch.tensor(lengths), 0
        for _ in range(40):
            y, state = layer(x[torch.arange(2), at][:, None], state)
            close(y[:, 0], whole[torch.arange(2), at])
            at, largest = at + 1, max(largest, state.slots_used)
        assert largest <= 2 * 5
        assert state.length.tolist() == at.tolist()


class Allocations(TorchDispatchMode):
    """Record the bytes of every allocation of an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        layer = [x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.sizes += [storage.nbytes() for storage in layer if storage.data_ptr() not in known]
        return out


def allocated(layer: Any, past: int, layout: Layout | None) -> tuple[list[int], Any]:
    with torch.no_grad():
        _, state = layer(stream(2, past, dtype=torch.float32), layout=layout)
        _, state = layer(stream(2, 1, dtype=torch.float32), state)
        token = stream(2, 1, dtype=torch.float32)
        with Allocations() as recorded:
            _, state = layer(token, state)
    return recorded.sizes, state


@pytest.mark.parametrize(
    "spec",
    ["standard", "standard:key_heads=2,qk_norm=True", "standard:window=64", "differential", "differential:key_heads=1"],
)
def test_decoding_allocates_constant_memory(spec: str) -> None:
    layer = make(spec, dtype=torch.float32)
    totals = {sum(allocated(layer, past, None)[0]) for past in (100, 500, 2046)}
    assert len(totals) == 1


@pytest.mark.parametrize("spec", ["standard", "standard:key_heads=2", "differential"])
def test_decoding_rows_of_different_lengths_does_not_copy_the_cache(spec: str) -> None:
    layer = make(spec, dtype=torch.float32)
    sizes, state = allocated(layer, 1000, Layout.padded([1000, 990], 1000))
    assert max(sizes) < min(x.nbytes for x in state.tensors) / 2


@pytest.mark.parametrize("spec", SPECS)
def test_declared_state_bytes_match_the_state(spec: str) -> None:
    layer = make(spec)
    _, state = layer(stream(1, 9))
    assert state.nbytes == layer.cost(9).state_bytes


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: StandardAttention(30, 4), "heads must divide the width, got 4 heads for a width of 30"),
        (lambda: StandardAttention(32, 0), "heads must divide the width, got 0"),
        (lambda: make("standard:key_heads=3"), "key_heads must divide the heads, got 3 for 4"),
        (lambda: make("standard:key_heads=0"), "key_heads must divide the heads, got 0"),
        (lambda: StandardAttention(12, 4), "even head width, got 3"),
        (lambda: make("standard:window=0"), "window must be at least 1, got 0"),
        (lambda: DifferentialAttention(32, 1), "even number of heads that divides 32, got 1"),
        (lambda: DifferentialAttention(30, 3), "even number of heads that divides 30, got 3"),
        (lambda: DifferentialAttention(30, 4), "even number of heads that divides 30, got 4"),
        (lambda: make("differential:key_heads=4"), "key_heads must divide the 2 differential heads, got 4"),
        (lambda: make("differential:window=-1"), "window must be at least 1, got -1"),
        (lambda: make("standard:conv=0"), "conv must be from 1 .* to 64, got 0"),
        (lambda: make("differential:conv=65"), "conv must be from 1 .* to 64, got 65"),
        (lambda: make("standard:qk_norm=before"), "before the coupling, but there is none: use qk_norm=True"),
        (lambda: make("standard:qk_norm=between"), "got 'between': expected bool \\| 'before' \\| 'after'"),
        (lambda: make("standard:key_shift=True,rotary_base=None"), "rotary_base is None: set rotary_base"),
        (lambda: mechanism("standard:key_shift=True")(24, 4, 0, 1), "the 3 rotary pairs .* multiple of 4, got 6"),
    ],
)
def test_invalid_shapes_raise(build: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build()


def test_odd_head_width_is_allowed_without_rotary_positions() -> None:
    layer = StandardAttention(12, 4, config=StandardConfig(rotary_base=None))
    assert layer(torch.randn(1, 3, 12))[0].shape == (1, 3, 12)


def test_without_rotary_positions_only_causality_depends_on_order() -> None:
    layer, x = make("standard:rotary_base=None"), stream(1, 5)
    shuffled = torch.cat([x[:, [2, 0, 3, 1]], x[:, 4:]], 1)
    close(layer(shuffled)[0][:, -1], layer(x)[0][:, -1])
    with_positions = make("standard")
    assert (with_positions(shuffled)[0][:, -1] - with_positions(x)[0][:, -1]).abs().max() > 1e-3


def test_states_of_another_type_or_size_raise() -> None:
    layer, x = make("standard"), stream(2, 3)
    _, state = layer(x)
    with pytest.raises(UsageError, match="StandardAttention got a DecoderState, expected a KVCache"):
        layer(x, DecoderState((state,)))
    with pytest.raises(UsageError, match="holds 2 rows, the input 3"):
        layer(stream(3, 1), state)
    with pytest.raises(UsageError, match=r"expected a convolution state of shapes \[\(2, 32\).*, got \[\]"):
        make("standard:conv=3")(x, state)
    _, shifted = make("standard:key_shift=True")(x)
    with pytest.raises(UsageError, match=r"shapes \[\], got \[\(1, 16\)\]"):
        layer(x, shifted)
    with pytest.raises(UsageError, match="holds 2 rows, the input 3"):
        make("standard:key_shift=True")(stream(3, 1), shifted)
    with pytest.raises(UsageError, match=r"a batch of \[2, 4\], got \[2, 3\]"):
        layer(x, layout=Layout.padded([1, 2], 4))


def naive(layer: Any, x: Tensor) -> Tensor:
    """One sequence [t, d] through standard attention, token by token, from the equations."""
    config, (t, _), head = layer.config, x.shape, WIDTH // HEADS
    streams = []
    for projection, weight in (
        (layer.query, layer.query_conv),
        (layer.key, layer.key_conv),
        (layer.value, layer.value_conv),
    ):
        rows = [projection.weight @ token for token in x]
        if weight is not None:
            taps = weight.shape[1]
            sums = [sum(weight[:, taps - 1 - j] * rows[p - j] for j in range(min(taps, p + 1))) for p in range(t)]
            rows = [u * torch.sigmoid(u) for u in sums]
        streams.append([row.view(-1, head) for row in rows])
    queries, keys, values = streams
    if config.qk_norm:
        queries, keys = (
            [y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight for y in rows]
            for rows, weight in ((queries, layer.query_norm), (keys, layer.key_norm))
        )
    if config.key_shift:
        shifted = [keys[0]]
        for p in range(1, t):
            pairs = keys[p].unflatten(-1, (-1, 2)).unbind(1)
            before = keys[p - 1].unflatten(-1, (-1, 2)).unbind(1)
            is_slow = [config.rotary_base ** (-2 * i / head) < config.rotary_base**-0.499 for i in range(head // 2)]
            assert sum(is_slow) == head // 4
            mixed = [b if slow else own for own, b, slow in zip(pairs, before, is_slow, strict=True)]
            shifted.append(torch.stack(mixed, 1).flatten(1))
        keys = shifted

    def rotated(y: Tensor, position: int) -> Tensor:
        angle = position * config.rotary_base ** (-torch.arange(0, head, 2, dtype=x.dtype) / head)
        even, odd = y[:, ::2], y[:, 1::2]
        return torch.stack(
            [even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1
        ).flatten(1)

    outputs = []
    for p in range(t):
        q, heads = rotated(queries[p], p), []
        for h in range(HEADS):
            g = h // (HEADS // len(keys[0]))
            scores = torch.stack([q[h] @ rotated(keys[s], s)[g] / head**0.5 for s in range(p + 1)])
            heads.append(scores.softmax(0) @ torch.stack([values[s][g] for s in range(p + 1)]))
        outputs.append(layer.output.weight @ torch.cat(heads))
    return torch.stack(outputs)


@pytest.mark.parametrize("options", ["conv=3", "key_shift=True", "conv=2,key_shift=True,qk_norm=True,key_heads=2"])
@pytest.mark.parametrize("layout", [Layout.packed([0, 5, 6, 9]), Layout.padded([3, 7], 7, side="left")])
def test_convolution_and_shift_follow_their_definition(options: str, layout: Layout) -> None:
    layer = make(f"standard:{options}")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x = stream(*layout.valid.shape).requires_grad_()
    y, _ = layer(x, layout=layout)
    n_sequences = len(layout.lengths)
    actual = torch.cat([y[layout.sequences == i] for i in range(n_sequences)])
    expected = torch.cat([naive(layer, x[layout.sequences == i]) for i in range(n_sequences)])
    close(actual, expected)
    leaves, cotangent = [x, *layer.parameters()], torch.randn_like(actual)
    for pair in zip(*(torch.autograd.grad(z, leaves, cotangent) for z in (actual, expected)), strict=True):
        assert_close(*pair, rtol=0, atol=1e-10)


def test_a_shifted_head_attends_by_the_token_before() -> None:
    """With queries and keys in the lower frequencies only, the map is that of the previous keys."""
    layer, x = make("standard:key_shift=True,rotary_base=1e30"), stream(1, 6)
    with torch.no_grad():
        for projection in (layer.query, layer.key):
            projection.weight.view(HEADS, -1, WIDTH)[:, :4] = 0
    plain = make("standard:rotary_base=1e30")
    plain.load_state_dict(layer.state_dict())
    shifted, own = layer.weights(x).log(), plain.weights(x).log()
    differences = (scores[..., 5, 2:5] - scores[..., 5, 1:4] for scores in (shifted, own))
    assert_close(next(differences)[..., 1:], next(differences)[..., :-1])
