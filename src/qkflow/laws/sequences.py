"""Laws of sequences: the same tokens give the same outputs, however they are cut, padded, packed or batched."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from qkflow.laws.cases import Bench, LawViolation, run, same, same_values_and_gradients
from qkflow.layout import Layout

RAGGED = ([2], [1, 3], [4, 1, 2], [5, 3, 7])
"""Lengths of the rows of a batch, small to large; a batch of one is the first."""


def causality(bench: Bench) -> None:
    """No token reads a later one: what follows changes neither its output nor any gradient of it."""
    mechanism = bench.make()
    for t in (2, 3, 9):
        x = bench.input(1, t).requires_grad_()
        whole = run(mechanism, x)[0]
        for cut in range(1, t):
            head = run(mechanism, x[:, :cut])[0]
            same_values_and_gradients(f"t={t}, first {cut} tokens", mechanism, [(whole[:, :cut], head)], x)


def splitting(bench: Bench) -> None:
    """A sequence cut anywhere, with its state carried over, is the whole one."""
    mechanism = bench.make()
    for t in (2, 9):
        x = bench.input(2, t).requires_grad_()
        whole = run(mechanism, x)[0]
        for cut in range(1, t):
            head, state = run(mechanism, x[:, :cut])
            tail, _ = run(mechanism, x[:, cut:], state)
            case = f"t={t}, cut after {cut}"
            same_values_and_gradients(case, mechanism, [(torch.cat([head, tail], 1), whole)], x)


def stepping(bench: Bench) -> None:
    """Token by token is the whole, in training and in inference, also where a buffer grows on the way."""
    mechanism = bench.make()
    for t in (1, 2, 7):
        x = bench.input(2, t).requires_grad_()
        same_values_and_gradients(
            f"t={t}, training", mechanism, [(_steps(bench, x, mechanism), run(mechanism, x)[0])], x
        )
    for name, mode in (("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
        for t in (1, 2, 3, 40):
            x = bench.input(2, t)
            whole = run(mechanism, x)[0].detach()  # in training: the two must not part ways
            with mode():
                same(f"t={t}, whole, {name}", "output", run(mechanism, x)[0], whole)
                same(f"t={t}, {name}", "output", _steps(bench, x, mechanism), whole)


def _steps(bench: Bench, x: Tensor, mechanism: torch.nn.Module) -> Tensor:
    state, outputs = None, []
    for token in x.split(1, 1):
        y, state = run(mechanism, token, state)
        outputs.append(y)
    return torch.cat(outputs, 1)


def padding(bench: Bench) -> None:
    """Padding, left or right and whatever it holds, changes no valid output and no gradient; it comes out as zeros."""
    mechanism = bench.make()
    for lengths in RAGGED:
        for side in ("right", "left"):
            t = max(lengths) + 2
            layout = Layout.padded(lengths, t, side=side)
            x = bench.input(len(lengths), t).masked_fill_(~layout.valid[..., None], 0).requires_grad_()
            noise = 100 * bench.input(len(lengths), t, seed=5) * ~layout.valid[..., None]
            y, state = run(mechanism, x + noise, layout=layout)
            case = f"lengths {lengths}, padded {side} to {t}"
            same(case, "output at padding", y[~layout.valid], torch.zeros_like(y[~layout.valid]))
            _alone_is_together(case, bench, mechanism, x, layout, y, state)


def packing(bench: Bench) -> None:
    """Sequences packed in one row are the same as each alone, and leave one state each."""
    mechanism = bench.make()
    for lengths in RAGGED:
        layout = Layout.packed([0, *accumulate(lengths)])
        x = bench.input(1, sum(lengths)).requires_grad_()
        y, state = run(mechanism, x, layout=layout)
        _alone_is_together(f"packed lengths {lengths}", bench, mechanism, x, layout, y, state)


def _alone_is_together(
    case: str, bench: Bench, mechanism: torch.nn.Module, x: Tensor, layout: Layout, y: Tensor, state: object
) -> None:
    """Every sequence of the layout by itself gives its part of y, and goes on as its row of the state does."""
    more = bench.input(len(layout.lengths), 3, seed=9).requires_grad_()
    counts = [1 + i % 3 for i in range(len(layout.lengths))]
    after = Layout.padded(counts, 3)
    next_y, next_state = run(mechanism, more, state, after)
    last = bench.input(len(layout.lengths), 1, seed=11)
    last_y, _ = run(mechanism, last, next_state)
    pairs = []
    for i, count in enumerate(counts):
        mine = layout.sequences == i
        alone, own = run(mechanism, x[mine][None])
        alone_next, own = run(mechanism, more[i : i + 1, :count], own)
        alone_last, own = run(mechanism, last[i : i + 1], own)
        pairs += [(y[mine], alone[0]), (next_y[i, :count], alone_next[0]), (last_y[i], alone_last[0])]
    same_values_and_gradients(case, mechanism, pairs, x, more)


def batching(bench: Bench) -> None:
    """Rows of a batch do not see each other."""
    mechanism = bench.make()
    for b, t in ((2, 1), (3, 4)):
        x = bench.input(b, t).requires_grad_()
        whole = run(mechanism, x)[0]
        pairs = [(whole[i], run(mechanism, x[i : i + 1])[0][0]) for i in range(b)]
        same_values_and_gradients(f"b={b}, t={t}", mechanism, pairs, x)


def carrying(bench: Bench) -> None:
    """A state is a value: it counts its tokens, survives being continued, can be selected, detached and measured."""
    mechanism = bench.make()
    x, more = bench.input(2, 5), bench.input(2, 2, seed=3)
    for name, mode in (("training", torch.enable_grad), ("inference", torch.no_grad)):
        with mode():
            _, state = run(mechanism, x[:, 4:], run(mechanism, x[:, :4])[1])  # by now a buffer has room to share
            if state.length.tolist() != [5, 5]:
                raise LawViolation(f"t=5, {name}: the state's length is {state.length.tolist()}, expected [5, 5]")
            first, after = run(mechanism, more, state)
            once_more = run(mechanism, more, after)[0]
            run(mechanism, 2 * more, state)
            same(f"{name}, sibling", "output after a sibling wrote", run(mechanism, more, after)[0], once_more)
            again, _ = run(mechanism, more, state)
            same(f"{name}, continued twice", "output of the second time", again, first)
            if after.length.tolist() != [7, 7] or state.length.tolist() != [5, 5]:
                raise LawViolation(
                    f"{name}: lengths after 5 + 2 tokens are {state.length.tolist()}, {after.length.tolist()}"
                )
            swapped, _ = run(mechanism, more[[1, 0, 0]], state.select(torch.tensor([1, 0, 0])))
            same(f"{name}, rows [1, 0, 0] selected", "output", swapped, first[[1, 0, 0]])
            if run(mechanism, more, state.detach().to("cpu"))[0].isnan().any() or state.nbytes <= 0:
                raise LawViolation(f"{name}: a detached state must go on, and have a size")
    x.requires_grad_()
    _, state = run(mechanism, x)
    y, _ = run(mechanism, more, state.detach())
    if y.requires_grad and torch.autograd.grad(y.sum(), x, allow_unused=True)[0] is not None:
        raise LawViolation("a detached state still passes gradients on")
