"""Compare the C kernel of attention with the definition in float64, for random valid calls, and try invalid ones.

    python benchmarks/fuzz_attention.py --valid 100000 --invalid 10000

A valid call draws shapes, strides, dtype, window, cache offset, grouping, scale and threads. Errors are relative
to the largest value of a tensor, or for gradients to the terms they are sums of. An invalid call has a wrong shape,
dtype or device, and must raise an exception. The seed is fixed: a failure prints the number of its call, and
`--first NUMBER --valid 1` repeats it.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qkflow.ops.attention import attention, attention_naive
from qkflow.ops.csrc import build

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-10}
SIZES = (1, 1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 33, 63, 64, 65, 90, 127, 130)
WIDTHS = (1, 2, 3, 5, 8, 12, 16, 16, 24, 31, 32, 32, 48, 64, 64, 80, 128)


def strided(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A random tensor: contiguous, a slice of a larger one, permuted, or expanded along its rows."""
    kind = rng.choice(("contiguous", "contiguous", "slice", "heads first", "expanded", "last stride"))
    if kind == "slice":
        room = [size + rng.choice((0, 1, 3)) for size in shape]
        starts = [rng.randint(0, big - size) for big, size in zip(room, shape, strict=True)]
        big = torch.randn(room, dtype=dtype)
        return big[tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))]
    if kind == "heads first":
        return torch.randn(shape[0], shape[2], shape[1], shape[3], dtype=dtype).transpose(1, 2)
    if kind == "expanded":
        return torch.randn(1, *shape[1:], dtype=dtype).expand(shape)
    if kind == "last stride":
        return torch.randn(*shape[:3], 2 * shape[3], dtype=dtype)[..., ::2]
    return torch.randn(shape, dtype=dtype)


def valid_call(rng: random.Random) -> tuple[list[Tensor], dict[str, Any]]:
    """Inputs and options of a random call."""
    dtype = rng.choice((torch.float32, torch.float64))
    groups = rng.choice((1, 1, 2, 3))
    rows, heads = rng.choice((1, 1, 2, 3)), groups * rng.choice((1, 1, 2, 4))
    t, width, values = rng.choice(SIZES), rng.choice(WIDTHS), rng.choice(WIDTHS)
    causal = rng.random() < 0.75
    s = t + rng.choice((0, 0, *SIZES)) if causal else rng.choice(SIZES)
    if rng.random() < 0.02:
        t, s = rng.choice((1, 3)), rng.choice((1025, 2500))
    window = rng.choice((None, None, 1, 2, 16, 50, 64, 500)) if causal else None
    scale = rng.choice((None, None, 0.0, 0.1, 1.0, -0.5))
    shapes = (rows, t, heads, width), (rows, s, groups, width), (rows, s, groups, values)
    inputs = [strided(rng, shape, dtype).requires_grad_() for shape in shapes]
    return inputs, {"causal": causal, "window": window, "scale": scale}


def largest_error(inputs: list[Tensor], options: dict[str, Any], rng: random.Random) -> float:
    """The largest relative error of the output and the gradients; NaN if any is."""
    torch.set_num_threads(rng.choice((1, 1, 2, 3)))
    o = attention(*inputs, **options, backend="cpu")
    with torch.no_grad():
        without_gradients = attention(*inputs, **options, backend="cpu")  # a few queries use another kernel
    go = strided(rng, (*o.shape,), o.dtype)
    gradients = torch.autograd.grad(o, inputs, go)
    torch.set_num_threads(1)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    expected = attention_naive(*doubles, **options)
    expected_gradients = torch.autograd.grad(expected, doubles, go.double())
    q, k, v = (float(x.detach().abs().max()) for x in doubles)
    scale = abs(options["scale"]) if options["scale"] is not None else doubles[0].shape[3] ** -0.5
    dots = (
        float(go.abs().max()) * v * doubles[2].shape[3] ** 0.5 * scale
    )  # gradients of scores are differences of these
    sizes = [v, v, dots * k, dots * q, float(go.abs().max())]
    actual = [o.detach(), without_gradients, *gradients]
    pairs = zip(actual, [expected.detach()] * 2 + [*expected_gradients], sizes, strict=True)
    errors = [(a.double() - b).abs().max() / max(float(b.abs().max()), size, 1e-30) for a, b, size in pairs]
    return float(torch.stack(errors).max())


def invalid_call(rng: random.Random) -> Callable[[], object]:
    """A call with something wrong: of the function, of the operator, or of its backward pass."""
    inputs, options = valid_call(rng)
    q, k, v = (x.detach() for x in inputs)
    o, lse = torch.ops.qkflow.attention(q, k, v, 0, 1.0, True)
    window = rng.choice((0, 1 << 40, 5)) if k.shape[1] >= q.shape[1] else 0
    tensors = {"q": q, "k": k, "v": v, "go": torch.zeros_like(o), "o": o, "lse": lse}
    entry = rng.choice(("function", "operator", "backward"))
    name = rng.choice(("q", "k", "v") if entry != "backward" else tuple(tensors))
    x = tensors[name]
    dim = rng.randrange(x.ndim)
    kind = rng.choice(
        ("longer", "shorter", "fewer dimensions", "more dimensions", "dtype", "device", "window", "width")
    )
    if kind in ("longer", "shorter"):
        change = 1 if kind == "longer" or x.shape[dim] == 1 else -1
        if name in ("q", "k") and dim == 2:  # heads: a number that does not fit
            q, change = q.repeat(1, 1, 2, 1), 0
            tensors = tensors | {"q": q, "k": k.repeat(1, 1, q.shape[2] + 1, 1), "v": v.repeat(1, 1, q.shape[2] + 1, 1)}
        elif (name, dim) in (("q", 1), ("v", 3)):  # valid on their own
            tensors["v"], change = torch.cat([v, v], 1), 0
        if change:
            tensors[name] = x.new_zeros([size + change * (i == dim) for i, size in enumerate(x.shape)])
    elif kind == "fewer dimensions":
        tensors[name] = x.select(dim, 0)
    elif kind == "more dimensions":
        tensors[name] = x.unsqueeze(dim)
    elif kind == "dtype":
        tensors[name] = x.to(rng.choice((torch.float16, torch.int32, torch.bool, torch.complex64)))
    elif kind == "device":
        tensors[name] = x.to("meta")
    elif kind == "window":
        window = -rng.choice((1, 7, 1 << 40))
    else:
        tensors |= {"q": q.new_zeros(*q.shape[:3], 257), "k": k.new_zeros(*k.shape[:3], 257)}
    three = (tensors["q"], tensors["k"], tensors["v"])
    if entry == "function":
        options = {"causal": window != 0, "window": window or None, "scale": 1.0, "backend": "cpu"}
        return lambda: attention(*three, **options)
    if entry == "operator":
        return lambda: torch.ops.qkflow.attention(*three, window, 1.0, True)
    saved = tensors["o"], tensors["lse"]
    return lambda: torch.ops.qkflow.attention_backward(tensors["go"], *three, *saved, window, 1.0)


def fuzz_valid(first: int, count: int) -> list[str]:
    """Run valid calls. Returns a line per failure."""
    failures = []
    for number in range(first, first + count):
        rng = random.Random(number)
        torch.manual_seed(number)
        inputs, options = valid_call(rng)
        error = largest_error(inputs, options, rng)
        if not error <= TOLERANCES[inputs[0].dtype]:
            shapes = [(tuple(x.shape), x.stride()) for x in inputs]
            failures.append(f"call {number}: error {error:.1e}, {inputs[0].dtype}, {shapes}, {options}")
    return failures


def fuzz_invalid(first: int, count: int) -> list[str]:
    """Run invalid calls. Returns a line per call that raised nothing."""
    failures = []
    for number in range(first, first + count):
        torch.manual_seed(number)
        call = invalid_call(random.Random(number))
        try:
            call()
        except Exception:  # any exception will do
            continue
        failures.append(f"invalid call {number} raised nothing")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--valid", type=int, default=1000, help="valid calls")
    parser.add_argument("--invalid", type=int, default=1000, help="invalid calls")
    args = parser.parse_args()
    if build.load_error() is not None:
        print(f"no C kernels: {build.load_error()}")
        return 1
    failures = fuzz_valid(args.first, args.valid) + fuzz_invalid(args.first, args.invalid)
    print("\n".join(failures[:50]))
    print(f"{args.valid} valid and {args.invalid} invalid calls, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
