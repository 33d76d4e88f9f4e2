"""Each planted bug violates the laws listed for it, and no others."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qkflow.laws import LAWS, LawReport, check
from qkflow.layout import Layout
from qkflow.mechanisms import Circuits, Cost, StandardAttention, StandardConfig
from qkflow.mechanisms.masking import AttentionInputs
from qkflow.ops.attention import attention
from qkflow.state import KVCache

Answer = tuple[Tensor, Any]


# Causality and positions.


class PeeksAhead(StandardAttention):
    """The mask is one diagonal too wide."""

    def attend(self, rows: AttentionInputs) -> Tensor:
        if not rows.causal:
            return super().attend(rows)
        wide = torch.ones(rows.q.shape[1], rows.k.shape[1], dtype=torch.bool).tril(1)
        return attention(rows.q, rows.k, rows.v, mask=wide)


class PeeksAheadInGradients(StandardAttention):
    """A straight-through term whose value is zero and whose gradient is that of the next token."""

    def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Answer:
        next_tokens = F.pad(x[:, 1:], (0, 0, 0, 1))
        return super().forward(x + 0.1 * (next_tokens - next_tokens.detach()), state, layout)


class ForgetsTheRotaryOffset(StandardAttention):
    """Queries are rotated as if every call started at position 0."""

    def attend(self, rows: AttentionInputs) -> Tensor:
        t, k = rows.q.shape[1], rows.q.shape[-1]
        back = (t - rows.cache.tokens_seen) * 10000.0 ** -(torch.arange(0, k, 2, dtype=rows.q.dtype) / k)
        even, odd = rows.q[..., 0::2], rows.q[..., 1::2]
        turned = [even * back.cos() - odd * back.sin(), even * back.sin() + odd * back.cos()]
        return super().attend(rows._replace(q=torch.stack(turned, -1).flatten(-2)))


class SeesOnlyThePast(StandardAttention):
    """Said to be bidirectional and without positions, but the mask is causal."""

    def __init__(self, width: int, heads: int, layer: int = 0, layers: int = 1) -> None:
        super().__init__(width, heads, layer, layers, config=StandardConfig(causal=False, rotary_base=None))

    def attend(self, rows: AttentionInputs) -> Tensor:
        return super().attend(rows._replace(causal=True, mask=None))

    def map(self, rows: AttentionInputs) -> Tensor:
        return super().map(rows._replace(causal=True, mask=None))


# State.


def become(kind: type[KVCache], cache: KVCache) -> KVCache:
    return kind(**{field.name: getattr(cache, field.name) for field in fields(cache)})


class ForgetsItsLength(StandardAttention):
    """The returned state has length 0."""

    def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Answer:
        y, after = super().forward(x, state, layout)
        return y, replace(
            after, tokens_seen=0, lengths=None if after.lengths is None else torch.zeros_like(after.lengths)
        )


class CountsPadding(StandardAttention):
    """Every row of the state has the length of the batch."""

    def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Answer:
        y, after = super().forward(x, state, layout)
        return y, after if after.lengths is None else replace(after, lengths=after.lengths.max().expand(len(x)))


class ChangesTheStateItWasGiven(StandardAttention):
    """Continuing a state modifies the input state."""

    def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Answer:
        y, after = super().forward(x, state, layout)
        if state is not None and not torch.compiler.is_compiling():
            for field in fields(state):
                object.__setattr__(state, field.name, getattr(after, field.name))
        return y, after


class WritesWhereOthersLook(StandardAttention):
    """Two continuations of one state share its buffer."""

    class Overwriting(KVCache):
        def _has_room(self, t: int) -> bool:
            return self.slots_used + t <= self.buffers[0].shape[1]

    def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Answer:
        y, after = super().forward(x, state, layout)
        return y, become(self.Overwriting, after)


class LosesATokenWhenTheBufferGrows(StandardAttention):
    """The last token is not copied when the buffer grows."""

    class Careless(KVCache):
        def _grown(self, t: int) -> KVCache:
            grown = super()._grown(t)
            if self.slots_used >= 16:
                grown.buffers[1][:, self.slots_used - 1] = 0
            return grown

    def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Answer:
        y, after = super().forward(x, state, layout)
        return y, become(self.Careless, after)


class SelectsRowsInOrder(StandardAttention):
    """`select` returns rows in sorted order instead of the requested order."""

    class Sorted(KVCache):
        def select(self, rows: Tensor) -> KVCache:
            return super().select(rows.sort().values)

    def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Answer:
        y, after = super().forward(x, state, layout)
        return y, become(self.Sorted, after)


class DetachesNothing(StandardAttention):
    """detach() returns the state unchanged."""

    class Attached(KVCache):
        def detach(self) -> KVCache:
            return self

    def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Answer:
        y, after = super().forward(x, state, layout)
        return y, become(self.Attached, after)


class CutsGradientsAtTheState(StandardAttention):
    """The returned state is detached: outputs are correct, but gradients stop at the split."""

    def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Answer:
        y, after = super().forward(x, state, layout)
        return y, after.detach()


# Padding, packing and rows.


class TakesPaddingForTokens(StandardAttention):
    """A padded batch is treated as a full one."""

    def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Answer:
        padded = layout is not None and len(layout.lengths) == len(x) > 1
        return super().forward(x, state, None if padded else layout)


class LeavesOutputAtPadding(StandardAttention):
    """Outputs at padding are not zero."""

    def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Answer:
        y, after = super().forward(x, state, layout)
        return y if layout is None else torch.where(layout.valid[..., None], y, 1.0), after


class MultipliesPaddingByZero(StandardAttention):
    """Padding is multiplied by zero, which leaves NaN and infinity as they are."""

    def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Answer:
        if layout is None:
            return super().forward(x, state)
        trusting = TrustsItsPadding(**{field.name: getattr(layout, field.name) for field in fields(layout)})
        return super().forward(x * layout.valid[..., None], state, trusting)


class TrustsItsPadding(Layout):
    """A layout whose batches are said to have zeros at padding already."""

    def zero_padding(self, x: Tensor) -> Tensor:
        return x * self.valid.view(*self.valid.shape, *[1] * (x.ndim - 2))


class SkipsTheGradientOfPaddedKeys(StandardAttention):
    """With a layout, keys are detached: only gradients are wrong."""

    def attend(self, rows: AttentionInputs) -> Tensor:
        return super().attend(rows if rows.cache.slot_positions is None else rows._replace(k=rows.k.detach()))


class JoinsTheFirstTwoSegments(StandardAttention):
    """The boundary between the first two sequences of a packed row is one token late."""

    def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Answer:
        if layout is not None and len(x) == 1 and len(layout.lengths) > 1:
            bounds = F.pad(layout.lengths.cumsum(0), (1, 0))
            bounds[1] += 1
            layout = Layout.packed(bounds)
        return super().forward(x, state, layout)


class MixesRows(StandardAttention):
    """The mean over the whole batch is subtracted."""

    def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Answer:
        return super().forward(x - 0.01 * x.mean(0, keepdim=True), state, layout)


# Modules: declared costs, saving, compilation and probes.


class DeclaresHalfItsProducts(StandardAttention):
    def cost(self, t: int) -> Cost:
        cost = super().cost(t)
        return replace(cost, pair_flops=cost.pair_flops // 2)


class DeclaresEveryPair(StandardAttention):
    def cost(self, t: int) -> Cost:
        return replace(super().cost(t), pairs=t * t)


class DeclaresAParameterTooMany(StandardAttention):
    def cost(self, t: int) -> Cost:
        return replace(super().cost(t), parameters=super().cost(t).parameters + 1)


class DeclaresHalfItsState(StandardAttention):
    def cost(self, t: int) -> Cost:
        return replace(super().cost(t), state_bytes=super().cost(t).state_bytes // 2)


class MultipliesWithoutSayingSo(StandardAttention):
    """A matrix product that the declared cost does not include."""

    def read(self, z: Tensor, x: Tensor) -> Tensor:
        return super().read(z, x) @ torch.eye(self.width, dtype=z.dtype)


class KeepsAParameterOutOfItsState(StandardAttention):
    """A random scale that is neither a parameter nor a buffer, so it is not saved."""

    def __init__(self, width: int, heads: int, layer: int = 0, layers: int = 1) -> None:
        super().__init__(width, heads, layer, layers)
        self.scale = torch.rand(width) + 0.5

    def read(self, z: Tensor, x: Tensor) -> Tensor:
        return super().read(z, x) * self.scale.to(z.dtype)


class AddsAFloat32Constant(StandardAttention):
    """Correct in float64, but the output type changes in bfloat16."""

    def read(self, z: Tensor, x: Tensor) -> Tensor:
        return super().read(z, x) + torch.zeros(self.width)


class RoundsToBfloat16TooOften(StandardAttention):
    """Adds many small numbers to a large one in the precision of the input."""

    def read(self, z: Tensor, x: Tensor) -> Tensor:
        return (super().read(z, x) + 256.0) - 256.0


class DropsAtRandom(StandardAttention):
    """Dropout on the heads in training mode."""

    def read(self, z: Tensor, x: Tensor) -> Tensor:
        return super().read(F.dropout(z, 0.1, self.training), x)


class AccumulatesOverCalls(StandardAttention):
    """A call counter leaks into the output: below the tolerance in float64, but two equal calls differ."""

    calls = 0

    def read(self, z: Tensor, x: Tensor) -> Tensor:
        self.calls += 1
        return super().read(z, x) * (1 + (1e-3 if z.dtype == torch.float32 else 0.0) * self.calls)


class LooksAtTheData(StandardAttention):
    """A branch on values: correct, but a graph break."""

    def read(self, z: Tensor, x: Tensor) -> Tensor:
        return super().read(z, x) if float(z.detach().abs().max()) < 1e6 else z.flatten(2)


class IsAnotherFunctionInInference(StandardAttention):
    """A fast path without gradients has slightly different results."""

    def read(self, z: Tensor, x: Tensor) -> Tensor:
        return super().read(z, x) * (1.0 if torch.is_grad_enabled() else 1.001)


class IsAnotherFunctionCompiled(StandardAttention):
    """A branch that is taken only under torch.compile."""

    def read(self, z: Tensor, x: Tensor) -> Tensor:
        return super().read(z, x) * (1.001 if torch.compiler.is_compiling() else 1.0)


class ShowsAnotherMap(StandardAttention):
    """The map for probes differs from the one in the forward pass."""

    def map(self, rows: AttentionInputs) -> Tensor:
        return super().map(rows._replace(q=1.1 * rows.q))


class ShowsTheMapWithoutTheLayout(StandardAttention):
    """The map ignores the boundaries between sequences."""

    def weights(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Tensor:
        return super().weights(x, state)


class HidesAStepBehindTheMap(StandardAttention):
    """The output has a term that map, values and read do not include."""

    def forward(self, x: Tensor, state: Any = None, layout: Layout | None = None) -> Answer:
        y, after = super().forward(x, state, layout)
        return y + y.tanh(), after


class SwapsItsCircuits(StandardAttention):
    def circuits(self) -> Circuits:
        return Circuits(qk=super().circuits().ov, ov=super().circuits().qk)


class PutsTheOutputInQK(StandardAttention):
    """The output projection is declared as part of the QK circuit."""

    def circuits(self) -> Circuits:
        return Circuits(qk=("query.weight", "key.weight", "output.weight"), ov=("value.weight",))


class NamesAParameterThatIsNone(StandardAttention):
    def circuits(self) -> Circuits:
        return Circuits(qk=("query.weight", "keys.weight"), ov=("value.weight", "output.weight"))


class NamesAParameterTwice(StandardAttention):
    def circuits(self) -> Circuits:
        return Circuits(qk=("query.weight", "key.weight", "key.weight"), ov=("value.weight", "output.weight"))


BUGS: dict[type[StandardAttention], set[str]] = {
    PeeksAhead: {"causality", "splitting", "decoding", "padding", "packing", "precision", "attention_map"},
    PeeksAheadInGradients: {"causality", "splitting", "decoding", "padding", "packing", "attention_map"},
    ForgetsTheRotaryOffset: {"splitting", "decoding", "padding", "packing", "precision"},
    SeesOnlyThePast: {"permutation", "cost"},
    ForgetsItsLength: {"splitting", "decoding", "padding", "packing", "states", "precision"},
    CountsPadding: {"padding", "packing"},
    ChangesTheStateItWasGiven: {"states"},
    WritesWhereOthersLook: {"states"},
    LosesATokenWhenTheBufferGrows: {"decoding"},
    SelectsRowsInOrder: {"states"},
    DetachesNothing: {"states"},
    CutsGradientsAtTheState: {"splitting", "decoding"},
    TakesPaddingForTokens: {"padding", "packing"},
    LeavesOutputAtPadding: {"padding"},
    MultipliesPaddingByZero: {"padding"},
    SkipsTheGradientOfPaddedKeys: {"padding", "packing"},
    JoinsTheFirstTwoSegments: {"packing"},
    MixesRows: {"padding", "packing", "batching", "states", "attention_map"},
    DeclaresHalfItsProducts: {"cost"},
    DeclaresEveryPair: {"cost"},
    DeclaresAParameterTooMany: {"cost"},
    DeclaresHalfItsState: {"cost"},
    MultipliesWithoutSayingSo: {"cost"},
    KeepsAParameterOutOfItsState: {"state_dict"},
    AddsAFloat32Constant: {"precision"},
    RoundsToBfloat16TooOften: {"precision"},
    DropsAtRandom: set(LAWS) - {"permutation", "cost", "circuits"},
    AccumulatesOverCalls: {"determinism"},
    LooksAtTheData: {"compilation"},
    IsAnotherFunctionInInference: {"decoding"},
    IsAnotherFunctionCompiled: {"compilation"},
    ShowsAnotherMap: {"attention_map"},
    ShowsTheMapWithoutTheLayout: {"attention_map"},
    HidesAStepBehindTheMap: {"attention_map"},
    SwapsItsCircuits: {"circuits"},
    PutsTheOutputInQK: {"circuits"},
    NamesAParameterThatIsNone: {"circuits"},
    NamesAParameterTwice: {"circuits"},
}
"""Each bug with every law it violates."""

COMPILED = (
    *(bug for bug, laws in BUGS.items() if "compilation" in laws),
    IsAnotherFunctionInInference,
    TakesPaddingForTokens,
)
"""The bugs that violate `compilation`, and two whose graphs differ but compile correctly."""


def failed_laws(reports: list[LawReport]) -> set[str]:
    assert all(report.detail and "\n" not in report.detail for report in reports if report.outcome != "passed")
    return {report.law for report in reports if report.outcome == "failed"}


def test_every_law_detects_a_bug_and_every_bug_is_in_the_table() -> None:
    assert set.union(*BUGS.values()) == set(LAWS)
    assert all(BUGS.values())
    planted = {kind for kind in globals().values() if isinstance(kind, type) and kind.__module__ == __name__}
    assert {kind for kind in planted if issubclass(kind, StandardAttention)} == set(BUGS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_violates_exactly(bug: type[StandardAttention]) -> None:
    assert failed_laws(check(bug, only=[law for law in LAWS if law != "compilation"])) == BUGS[bug] - {"compilation"}


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # torch.compile emits warnings
@pytest.mark.parametrize("bug", COMPILED, ids=lambda bug: bug.__name__)
def test_a_planted_bug_violates_compilation_only_if_listed(bug: type[StandardAttention]) -> None:
    assert failed_laws(check(bug, only=["compilation"], backend="aot_eager")) == BUGS[bug] & {"compilation"}


def test_the_smallest_failing_case_is_reported() -> None:
    (report,) = check(PeeksAhead, only=["causality"])
    assert report.detail.startswith("t=2, first 1 tokens: output differs by ")
