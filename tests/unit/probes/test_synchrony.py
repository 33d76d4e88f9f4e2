"""Synchronization of tokens: order, locking, energy, and the tables of `qkflow probe`."""

import json
import math
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch.testing import assert_close

from qkflow.cli import main
from qkflow.cli.probe_tables import phase_section
from qkflow.data import ByteTokenizer, CorpusConfig
from qkflow.errors import UsageError
from qkflow.mechanisms import mechanism
from qkflow.mechanisms.kuramoto import SynchronyMechanism
from qkflow.models import Decoder, DecoderConfig
from qkflow.ops import kuramoto
from qkflow.ops.groups import SO3, SU2, TORUS, Group
from qkflow.probes import LayerPhases, PhaseStats, attention_maps, diagnostics, layer_phases
from qkflow.probes.attention import mechanism_inputs
from qkflow.probes.synchrony import attention_step, locking, order, row_energy
from qkflow.report.export import render_table
from qkflow.training import TrainConfig
from qkflow.training.run_dir import begin, finish
from qkflow.training.tensors import model_tensors

GROUPS = (TORUS, SU2, SO3)
SPECS = (
    "kuramoto",
    "kuramoto:gate=static,temperature=fixed",
    "kuramoto:frustrated=True",
    "kuramoto:frustrated=True,harmonics=3",
    "kuramoto:values=projected",
    "group:group=su2,frustrated=True",
    "group:group=so3",
)


def layer(spec: str, *, step: float = 0.3) -> SynchronyMechanism:
    decoder = mechanism(spec)(72, 4, 0, 1).double()  # uses half of the heads
    assert isinstance(decoder, SynchronyMechanism)
    for name, parameter in decoder.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        if name == "step":
            parameter.data.fill_(step)
    return decoder


def stream(module: SynchronyMechanism, t: int = 6) -> torch.Tensor:
    return module.group.random(1, t, 72 // module.group.size).double().flatten(2)


def elements(on: Group, t: int, generator: int) -> torch.Tensor:
    return on.points(on.random(t, 2, 3, generator=torch.Generator().manual_seed(generator)).double())


@given(on=st.sampled_from(GROUPS), t=st.integers(1, 8), seed=st.integers(0, 9999))
@settings(deadline=None, max_examples=10)
def test_locking_is_a_normalised_similarity_with_the_mean_squared_order(on: Group, t: int, seed: int) -> None:
    points = elements(on, t, seed)
    result = locking(points)
    alike = on.similarity(*torch.broadcast_tensors(points[:, None], points)) / on.similarity(points, points)
    assert_close(result, alike.mean(-1).movedim(2, 0), rtol=0, atol=1e-12)
    assert (result.abs() <= 1 + 1e-12).all()
    assert_close(result.mean((1, 2)), order(points).square().mean(1), rtol=0, atol=1e-12)


@given(on=st.sampled_from(GROUPS), seed=st.integers(0, 9999))
@settings(deadline=None, max_examples=10)
def test_common_translation_does_not_change_order_or_locking(on: Group, seed: int) -> None:
    points = elements(on, 5, seed)
    shift = on.points(on.random(1, 2, 3).double()).expand_as(points)
    moved = on.multiply(shift, points)
    assert_close(order(moved), order(points), rtol=0, atol=1e-6)  # random elements are float32
    assert_close(locking(moved), locking(points), rtol=0, atol=1e-6)


def test_order_equals_the_operator() -> None:
    theta = 3 * torch.randn(7, 2, 3, dtype=torch.float64)
    assert_close(order(kuramoto.points(theta)), kuramoto.order_parameter(theta.transpose(0, 1)), rtol=0, atol=1e-12)
    assert_close(order(elements(SO3, 1, 0)), torch.ones(2, 3, dtype=torch.float64))


def test_energy_on_the_torus_equals_the_operator() -> None:
    decoder = layer("kuramoto")
    theta = stream(decoder)
    truth = kuramoto.energy(theta.unflatten(-1, (2, 36)), decoder.weights(theta))[0] / 36
    assert_close(attention_step(decoder, theta)[2].before, tuple(truth.mean(0).tolist()))


@pytest.mark.parametrize("spec", SPECS)
def test_update_is_the_negative_energy_gradient(spec: str) -> None:
    decoder = layer(spec, step=1.0)
    on, x = decoder.group, stream(decoder)
    points = decoder.points(x).unflatten(-1, (-1, on.ambient))[0]
    gathered = torch.einsum("hts,shv->thv", decoder.weights(x)[0], decoder.values(x)[0])
    kernel = [None if part is None else part.detach() for part in (decoder.lag, decoder.amplitude)]
    leaf = x.clone().requires_grad_()
    moved = decoder.points(leaf).unflatten(-1, (-1, on.ambient))[0]
    (slope,) = torch.autograd.grad(row_energy(moved, gathered.detach(), on, *kernel).sum(), leaf)
    scale = decoder.elements * float(on.similarity(points[0, 0, 0], points[0, 0, 0]))
    assert_close(decoder(x)[0].detach(), -scale * slope, rtol=0, atol=1e-6)


@pytest.mark.parametrize("spec", ["kuramoto", "group:group=su2", "group:group=so3"])
def test_small_single_token_updates_lower_the_energy(spec: str) -> None:
    decoder = layer(spec)
    energy = attention_step(decoder, stream(decoder))[2]
    assert all(low < high for low, high in zip(energy.single, energy.before, strict=True))


@pytest.mark.parametrize("spec", SPECS)
def test_attention_step_equals_the_layer(spec: str) -> None:
    decoder = layer(spec)
    x = stream(decoder)
    ends = decoder.group.retract(*(each.unflatten(-1, (2, -1, decoder.group.size)) for each in (x, decoder(x)[0])))
    assert_close(attention_step(decoder, x)[1], decoder.group.points(ends)[0].detach(), rtol=0, atol=1e-10)
    assert len(attention_step(decoder, x)[2].after) == 2


def test_diagnostics_use_the_first_sequence_and_change_nothing() -> None:
    decoder = layer("kuramoto")
    x = torch.cat([stream(decoder), stream(decoder)])
    before = {name: part.clone() for name, part in decoder.state_dict().items()}
    assert repr(diagnostics(decoder, x)) == repr(diagnostics(decoder, x[:1]))
    assert_close(decoder.state_dict(), before, rtol=0, atol=0)


def test_diagnostics_are_plain_data_and_phases_need_the_torus() -> None:
    decoder = layer("kuramoto")
    shown = {item.title: item for item in diagnostics(decoder, stream(decoder, t=9))}
    by_order, _, heat, wheels = shown.values()
    assert [item.kind for item in shown.values()] == ["lines", "lines", "heat", "wheel"]
    assert (by_order.x, by_order.series) == (("R",), ("head 1", "head 2"))
    assert all(math.isnan(heat.values[t][u]) == (u >= t) for t in range(9) for u in range(9))
    assert len(wheels.series) == 4  # two heads: the most, then the least
    assert [item.kind for item in diagnostics(layer("group"), stream(layer("group")))] == ["lines", "lines", "heat"]
    assert len(json.dumps([row[:t] for t, row in enumerate(heat.values)])) < 9 * 9 * 8


def test_phase_figure_shows_the_most_and_least_ordered_coordinate() -> None:
    decoder = layer("kuramoto")
    theta = stream(decoder, t=8).unflatten(-1, (2, 36))
    theta[:, :, 1, 5] = 0.7  # equal phases
    theta[0, :, 1, 9] = torch.arange(8) * math.pi / 4  # evenly spaced phases
    wheels = diagnostics(decoder, theta.flatten(2))[-1]
    assert wheels.series[1] == "head 2, coordinate 6"
    assert wheels.values[1] == (0.7,) * 8
    assert wheels.series[3] == "head 2, coordinate 10"


def test_phase_figure_limits_heads() -> None:
    with_many_heads = mechanism("kuramoto")(24, 12, 0, 1)
    assert len(diagnostics(with_many_heads, torch.randn(1, 5, 24))[-1].series) == 8
    single = mechanism("kuramoto")(2, 2, 0, 1)
    assert len(diagnostics(single, torch.randn(1, 1, 2))[-1].series) == 2


TOKENS = [72, 101, 108, 108, 111, 256, 10, 72, 101, 91]


def model(mechanism: str = "kuramoto", *, layers: int = 2, dropout: float = 0.0) -> Decoder:
    torch.manual_seed(0)
    shape = DecoderConfig(width=36, layers=layers, heads=4, hidden=24, mechanism=mechanism, dropout=dropout)
    decoder = Decoder(shape).double()
    for block in decoder.blocks:  # zero at initialization
        torch.nn.init.normal_(block.feed_forward.output.weight, std=0.3)  # pyright: ignore
    return decoder


def phases_of(module: Decoder, tokens: list[int] = TOKENS) -> list[LayerPhases]:
    result = layer_phases(module, tokens)
    assert all(layer is not None for layer in result)
    return [layer for layer in result if layer is not None]


def summaries(module: Decoder) -> list[PhaseStats]:
    return [layer.summary() for layer in phases_of(module)]


@pytest.mark.parametrize("mechanism", ["kuramoto", "group:group=so3", "kuramoto:frustrated=True"])
def test_output_of_a_layer_is_the_input_of_the_next(mechanism: str) -> None:
    decoder = model(mechanism, layers=3)
    result = phases_of(decoder)
    for current, next_ in pairwise(result):
        assert_close(current.after, next_.before, rtol=0, atol=1e-12)
        assert not torch.allclose(current.before, current.attended)
        assert not torch.allclose(current.attended, current.after)
    assert_close(result[0].attended.shape, result[0].before.shape)
    logits = decoder.logits(result[-1].after.flatten(1))
    assert_close(logits, decoder(torch.tensor([TOKENS]))[0][0].detach(), rtol=0, atol=1e-10)


def test_input_of_the_first_layer_is_the_embedding() -> None:
    decoder = model()
    theta = decoder.embedding.weight[TOKENS].detach().view(len(TOKENS), 2, 18)
    first = phases_of(decoder)[0]
    assert_close(first.order(), torch.exp(1j * theta).mean(0).abs(), rtol=0, atol=1e-12)
    difference = (theta[:, None] - theta).cos().mean(-1)
    assert_close(first.locking(), difference.movedim(2, 0), rtol=0, atol=1e-12)
    assert float(first.locking()[:, 0, 7].min()) > 1 - 1e-12  # the same token twice


def test_energy_uses_the_map_of_the_layer() -> None:
    decoder = model()
    first, map = phases_of(decoder)[0], attention_maps(decoder, TOKENS)[0].double()
    attended = (map * first.locking()).sum(-1)
    assert_close(first.energy.before, tuple((-attended.mean(1)).tolist()), rtol=0, atol=1e-6)


def test_pairs_are_different_tokens_in_descending_order() -> None:
    layer = phases_of(model())[1]
    together, change = layer.locking("after").mean(0), (layer.locking("after") - layer.locking("before")).mean(0)
    all_pairs = [(t, u) for t in range(len(TOKENS)) for u in range(t) if TOKENS[t] != TOKENS[u]]
    for shift, measure in (("locking", together), ("change", change)):
        pairs = layer.pairs(4, by=shift)  # pyright: ignore[reportArgumentType]
        result = [float(measure[pair.second, pair.first]) for pair in pairs]
        assert result == sorted((float(measure[t, u]) for t, u in all_pairs), reverse=True)[:4]
        assert all(pair.tokens == (TOKENS[pair.first], TOKENS[pair.second]) for pair in pairs)
        assert all(pair.after == pytest.approx(float(together[pair.first, pair.second])) for pair in pairs)
    assert len(layer.pairs(10**6)) == len(all_pairs)


def test_phases_do_not_depend_on_dropout_and_change_nothing() -> None:
    decoder = model(dropout=0.5).train()
    state = {name: part.clone() for name, part in decoder.state_dict().items()}
    current, repeated = phases_of(decoder), phases_of(decoder)
    assert_close(current[-1].after, repeated[-1].after, rtol=0, atol=0)
    assert decoder.training
    assert_close(decoder.state_dict(), state, rtol=0, atol=0)
    assert not any(block._forward_hooks for block in decoder.blocks)


def test_hooks_are_removed_after_invalid_tokens() -> None:
    decoder = model()
    with pytest.raises(UsageError, match="at least one token"):
        layer_phases(decoder, [])
    assert not any(block._forward_hooks for block in decoder.blocks)
    assert len(mechanism_inputs(decoder, [1])) == 2


def test_ordinary_streams_have_no_phases() -> None:
    shape = DecoderConfig(width=16, layers=2, heads=4, hidden=8, mechanism=("standard", "qdelta"))
    assert layer_phases(Decoder(shape), TOKENS) == [None, None]


LABELS = [f"t{position}" for position in range(len(TOKENS))]


@pytest.mark.parametrize("tokens", [[5], [5, 5, 5]])
def test_a_text_without_two_different_tokens_has_no_pairs(tokens: list[int]) -> None:
    stats = [layer.summary() for layer in phases_of(model(), tokens)]
    assert stats[0].strongest == stats[0].most_increased == ()
    assert math.isnan(stats[0].locking_before) == (len(tokens) == 1)
    assert stats[0].order[0][0] == pytest.approx(1)
    section = phase_section(stats, LABELS)
    assert "Largest increase" not in section.verdict
    assert len(section.table.rows) == 2


def test_summary_is_plain_data_with_the_same_numbers() -> None:
    layer = phases_of(model())[0]
    stats = layer.summary(3)
    assert json.loads(json.dumps(asdict(stats)))["order_attended"] == layer.order("attended").tolist()
    assert stats.locking_after == pytest.approx(
        float(layer.locking("after")[:, *torch.tril_indices(10, 10, -1)].mean())
    )
    assert (stats.group, len(stats.strongest), len(stats.energy.after)) == ("torus", 3, 2)


def test_table_labels_tokens_and_fits_80_columns() -> None:
    stats = summaries(model())
    pair = replace(stats[0].strongest[0], first=3000, second=4000, after=-0.5)
    stats[0] = replace(stats[0], strongest=(pair,), locking_before=-0.1)
    labels = ["[b]"] * 4000 + ["⟨end⟩"]  # markup must not be interpreted
    console = Console(width=80, force_terminal=False)
    with console.capture() as output:
        console.print(*render_table(phase_section([*stats, None], labels).table))
    lines = output.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert "[b] 3001 ~ ⟨end⟩ 4001: -0.50" in lines[1]
    assert f"{sum(map(sum, stats[1].order)) / 36:.2f}" in lines[2]
    assert lines[3].split() == ["3", *["\N{EN DASH}"] * 5]


def test_verdict_agrees_with_the_numbers() -> None:
    def verdict(*layers: PhaseStats | None) -> str:
        return phase_section(layers, LABELS).verdict

    first, last = summaries(model())
    low, high = ((0.25,) * 18,) * 2, ((0.75,) * 18,) * 2
    rises = verdict(replace(first, order=low), replace(last, order_after=high))
    assert "order parameter rises from the first layer's input (0.25) to the last layer's output (0.75)" in rises
    assert "falls" in verdict(replace(first, order=high), replace(last, order_after=low))
    flat = replace(first, energy=replace(first.energy, before=(0.0, 0.0), after=(0.1, 0.1)))
    assert "in 0 of 1 layer." in verdict(flat)
    pair = replace(first.most_increased[0], first=0, second=4, before=0.25, after=0.75)
    increased = verdict(None, replace(first, most_increased=(pair,)))
    assert "t0 (token 1) and t4 (5), from +0.25 to +0.75 in layer 2" in increased
    overflow = replace(first, energy=replace(first.energy, after=(math.nan, 0.0)))
    assert "not finite" in verdict(overflow)


def test_probe_command_prints_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    decoder = model("kuramoto:frustrated=True").float()
    run, text = tmp_path / "run", tmp_path / "text"
    text.write_bytes(b"Hello [b]\n")
    run.mkdir()
    begin(run, TrainConfig(data=CorpusConfig(), model=decoder.config, steps=1), {}, ByteTokenizer())
    finish(run, model_tensors(decoder))
    assert main(["probe", str(run), "--file", str(text)]) == 0
    source, *shown, page = capsys.readouterr().out.splitlines()
    assert str(text) in source
    assert str(run / "probe.html") in page
    assert max(map(len, shown)) <= 80
    phased = shown[shown.index("") + 1 :]  # after the attention table
    assert main(["probe", str(run), "--file", str(text), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["coupling"], record["stability"]) == (None, None)
    first, _ = record["phases"]["layers"]
    assert phased[1].split()[1] == f"{sum(map(sum, first['order'])) / 36:.2f}"
    assert len(first["strongest"]) == 5
    assert record["phases"]["verdict"] == " ".join(line.strip() for line in phased[3:])
