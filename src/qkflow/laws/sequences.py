"""Laws of sequences: outputs do not depend on how tokens are split, padded, packed or batched."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from qkflow.laws.comparison import (
    LawContext,
    LawNotApplicable,
    LawViolation,
    is_causal,
    require_causal,
    require_equal,
    require_equal_with_gradients,
    run,
)
from qkflow.layout import Layout

LENGTHS = ([2], [1, 3], [5, 1, 7])
"""Sequence lengths of the batches for padding and packing, small to large."""


def causality(context: LawContext) -> None:
    """No output, and no gradient of an output, depends on later tokens."""
    mechanism = context.make()
    require_causal(mechanism)
    for t in (2, 3, 9):
        x = context.input(1, t).requires_grad_()
        y = run(mechanism, x)[0]
        for cut in range(1, t):
            head = run(mechanism, x[:, :cut])[0]
            require_equal_with_gradients(f"t={t}, first {cut} tokens", mechanism, [(y[:, :cut], head)], x)


def permutation(context: LawContext) -> None:
    """Without causality and positions, permuted tokens have permuted outputs, also in padded batches."""
    mechanism = context.make()
    if is_causal(mechanism) or getattr(mechanism, "has_positions", True):
        raise LawNotApplicable("the order of the tokens matters")
    generator = torch.Generator().manual_seed(3)
    for t, layout in ((1, None), (2, None), (9, None), (9, Layout.padded([7, 9], 9))):
        x, order = context.input(2, t).requires_grad_(), torch.randperm(t, generator=generator)
        if layout is not None:  # the padding of the first row stays where it is
            order = torch.cat([torch.randperm(7, generator=generator), torch.arange(7, t)])
        pairs = [(run(mechanism, x[:, order], layout=layout)[0], run(mechanism, x, layout=layout)[0][:, order])]
        require_equal_with_gradients(f"t={t}, order {order.tolist()}", mechanism, pairs, x)


def splitting(context: LawContext) -> None:
    """A sequence split anywhere, with the state passed on, gives the outputs of the whole sequence."""
    mechanism = context.make()
    require_causal(mechanism)
    for t in (2, 9):
        x = context.input(2, t).requires_grad_()
        y = run(mechanism, x)[0]
        for cut in range(1, t):
            head, state = run(mechanism, x[:, :cut])
            tail, _ = run(mechanism, x[:, cut:], state)
            pairs = [(torch.cat([head, tail], 1), y)]
            require_equal_with_gradients(f"t={t}, cut after {cut}", mechanism, pairs, x)


def decoding(context: LawContext) -> None:
    """Token by token gives the outputs of the whole sequence, with and without gradients, also when a buffer grows."""
    mechanism = context.make()
    require_causal(mechanism)
    for t in (1, 2, 7):
        x = context.input(2, t).requires_grad_()
        pairs = [(_decode(mechanism, x), run(mechanism, x)[0])]
        require_equal_with_gradients(f"t={t}, training", mechanism, pairs, x)
    for name, mode in (("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
        for t in (1, 2, 3, 40):
            x = context.input(2, t)
            y = run(mechanism, x)[0].detach()  # computed in training mode, so both modes must agree
            with mode():
                require_equal(f"t={t}, whole, {name}", "output", run(mechanism, x)[0], y)
                require_equal(f"t={t}, {name}", "output", _decode(mechanism, x), y)


def _decode(mechanism: torch.nn.Module, x: Tensor) -> Tensor:
    state, outputs = None, []
    for token in x.split(1, 1):
        y, state = run(mechanism, token, state)
        outputs.append(y)
    return torch.cat(outputs, 1)


def padding(context: LawContext) -> None:
    """Padding on the left or right, whatever its content, changes no valid output or gradient; its own output is 0."""
    mechanism = context.make()
    for lengths in LENGTHS:
        for side in ("right", "left"):
            t = max(lengths) + 2
            layout = Layout.padded(lengths, t, side=side)
            x = context.input(len(lengths), t).masked_fill_(~layout.valid[..., None], 0).requires_grad_()
            noise = 100 * context.input(len(lengths), t, seed=5) * ~layout.valid[..., None]
            y, state = run(mechanism, x + noise, layout=layout)
            case = f"lengths {lengths}, padded {side} to {t}"
            require_equal(case, "output at padding", y[~layout.valid], torch.zeros_like(y[~layout.valid]))
            _require_independent_sequences(case, context, mechanism, x, layout, y, state)
            if lengths != LENGTHS[1]:
                continue
            y, state = run(mechanism, x + noise, layout=layout)
            next_y = _next(context, mechanism, len(lengths), state)
            for content in _bad_content(x.dtype):
                bad = torch.zeros_like(x).masked_fill_(~layout.valid[..., None], content)
                actual, state = run(mechanism, x + bad, layout=layout)
                pairs = [(actual, y), (_next(context, mechanism, len(lengths), state), next_y)]
                require_equal_with_gradients(f"{case} with {content:g}", mechanism, pairs, x)


def _bad_content(dtype: torch.dtype) -> tuple[float, ...]:
    """Content of padding that spreads through every sum, even where it is multiplied by zero."""
    return float("nan"), float("inf"), min(1e200, torch.finfo(dtype).max)


def _next(context: LawContext, mechanism: torch.nn.Module, rows: int, state: object) -> Tensor:
    """The output of one more token per row."""
    more = context.input(rows, 1, seed=9)
    return run(mechanism, more, state if is_causal(mechanism) else None)[0]


def packing(context: LawContext) -> None:
    """Sequences packed in one row give the outputs of each alone, and one state each."""
    mechanism = context.make()
    for lengths in LENGTHS:
        layout = Layout.packed([0, *accumulate(lengths)])
        x = context.input(1, sum(lengths)).requires_grad_()
        y, state = run(mechanism, x, layout=layout)
        _require_independent_sequences(f"packed lengths {lengths}", context, mechanism, x, layout, y, state)


def _require_independent_sequences(
    case: str, context: LawContext, mechanism: torch.nn.Module, x: Tensor, layout: Layout, y: Tensor, state: object
) -> None:
    """Each sequence of the layout, run alone, gives its part of y and continues like its row of the state."""
    n = len(layout.lengths)
    if not is_causal(mechanism):
        own = [layout.sequences == i for i in range(n)]
        pairs = [(y[is_own], run(mechanism, x[is_own][None])[0][0]) for is_own in own]
        require_equal_with_gradients(case, mechanism, pairs, x)
        return
    counts = [1 + i % 3 for i in range(n)]
    more = context.input(n, 3, seed=9).requires_grad_()
    next_y, next_state = run(mechanism, more, state, Layout.padded(counts, 3))
    last = context.input(n, 1, seed=11)
    last_y, _ = run(mechanism, last, next_state)
    pairs = []
    for i, count in enumerate(counts):
        is_own = layout.sequences == i
        alone, own_state = run(mechanism, x[is_own][None])
        alone_next, own_state = run(mechanism, more[i : i + 1, :count], own_state)
        alone_last, own_state = run(mechanism, last[i : i + 1], own_state)
        pairs += [(y[is_own], alone[0]), (next_y[i, :count], alone_next[0]), (last_y[i], alone_last[0])]
    require_equal_with_gradients(case, mechanism, pairs, x, more)


def batching(context: LawContext) -> None:
    """The rows of a batch are independent."""
    mechanism = context.make()
    for b, t in ((2, 1), (3, 4)):
        x = context.input(b, t).requires_grad_()
        y = run(mechanism, x)[0]
        pairs = [(y[i], run(mechanism, x[i : i + 1])[0][0]) for i in range(b)]
        require_equal_with_gradients(f"b={b}, t={t}", mechanism, pairs, x)


def states(context: LawContext) -> None:
    """A state is a value: continuing it does not change it; it has a length and can be selected, detached and moved."""
    mechanism = context.make()
    require_causal(mechanism)
    x, more = context.input(2, 5), context.input(2, 2, seed=3)
    for name, mode in (("training", torch.enable_grad), ("inference", torch.no_grad)):
        with mode():
            _, state = run(mechanism, x[:, 4:], run(mechanism, x[:, :4])[1])  # in inference, its buffer now has room
            if state.length.tolist() != [5, 5]:
                raise LawViolation(f"t=5, {name}: the state's length is {state.length.tolist()}, expected [5, 5]")
            first, after = run(mechanism, more, state)
            once_more = run(mechanism, more, after)[0]
            run(mechanism, 2 * more, state)
            sibling = run(mechanism, more, after)[0]
            require_equal(f"{name}, sibling", "output after the same state was continued twice", sibling, once_more)
            require_equal(f"{name}, continued twice", "second output", run(mechanism, more, state)[0], first)
            if after.length.tolist() != [7, 7] or state.length.tolist() != [5, 5]:
                raise LawViolation(
                    f"{name}: lengths after 5 + 2 tokens are {state.length.tolist()}, {after.length.tolist()}"
                )
            swapped, _ = run(mechanism, more[[1, 0, 0]], state.select(torch.tensor([1, 0, 0])))
            require_equal(f"{name}, rows [1, 0, 0] selected", "output", swapped, first[[1, 0, 0]])
            if run(mechanism, more, state.detach().to("cpu"))[0].isnan().any() or state.nbytes <= 0:
                raise LawViolation(f"{name}: a detached state must be usable and have a positive nbytes")
    x.requires_grad_()
    _, state = run(mechanism, x)
    y, _ = run(mechanism, more, state.detach())
    if y.requires_grad and torch.autograd.grad(y.sum(), x, allow_unused=True)[0] is not None:
        raise LawViolation("a detached state still passes gradients")
