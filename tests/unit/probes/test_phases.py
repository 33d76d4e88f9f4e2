"""Looking at phases along a model's depth."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.testing import assert_close

from qkflow.cli import main
from qkflow.cli.probe_phases import Words
from qkflow.data import ByteTokenizer, CorpusConfig
from qkflow.errors import UsageError
from qkflow.models import Decoder, DecoderConfig
from qkflow.probes import PhaseLook, PhaseSummary, maps, phases
from qkflow.probes.phases import read_inputs
from qkflow.report.tables import rendered
from qkflow.training import TrainConfig
from qkflow.training.run_dir import begin, finish
from qkflow.training.tensors import model_tensors

TOKENS = [72, 101, 108, 108, 111, 256, 10, 72, 101, 91]


class Marked(ByteTokenizer):
    """Whose tokens look like markup."""

    def decode(self, tokens: Sequence[int]) -> bytes:
        return b"[b]"


def model(mechanism: str = "kuramoto", *, layers: int = 2, dropout: float = 0.0) -> Decoder:
    torch.manual_seed(0)
    shape = DecoderConfig(width=36, layers=layers, heads=4, hidden=24, mechanism=mechanism, dropout=dropout)
    made = Decoder(shape).double()
    for block in made.blocks:  # feed-forward networks begin at zero: let every layer matter
        torch.nn.init.normal_(block.feed_forward.output.weight, std=0.3)  # pyright: ignore
    return made


def looks(made: Decoder, tokens: list[int] = TOKENS) -> list[PhaseLook]:
    found = phases(made, tokens)
    assert all(layer is not None for layer in found)
    return [layer for layer in found if layer is not None]


def summaries(made: Decoder) -> list[PhaseSummary]:
    return [layer.summary() for layer in looks(made)]


@pytest.mark.parametrize("mechanism", ["kuramoto", "group:group=so3", "kuramoto:frustrated=True"])
def test_a_layer_leaves_the_tokens_where_the_next_one_finds_them(mechanism: str) -> None:
    made = model(mechanism, layers=3)
    found = looks(made)
    for one, next_ in pairwise(found):
        assert_close(one.after, next_.before, rtol=0, atol=1e-12)
        assert not torch.allclose(one.before, one.drawn)
        assert not torch.allclose(one.drawn, one.after)
    assert_close(found[0].drawn.shape, found[0].before.shape)
    logits = made.logits(found[-1].after.flatten(1))
    assert_close(logits, made(torch.tensor([TOKENS]))[0][0].detach(), rtol=0, atol=1e-10)


def test_the_first_layer_finds_the_embeddings() -> None:
    made = model()
    theta = made.embedding.weight[TOKENS].detach().view(len(TOKENS), 2, 18)
    first = looks(made)[0]
    assert_close(first.order(), torch.exp(1j * theta).mean(0).abs(), rtol=0, atol=1e-12)
    apart = (theta[:, None] - theta).cos().mean(-1)
    assert_close(first.locking(), apart.movedim(2, 0), rtol=0, atol=1e-12)
    assert float(first.locking()[:, 0, 7].min()) > 1 - 1e-12  # the same token twice


def test_energy_is_read_off_the_layers_own_map() -> None:
    made = model()
    first, map = looks(made)[0], maps(made, TOKENS)[0].double()
    attended = (map * first.locking()).sum(-1)
    assert_close(first.energy.before, tuple((-attended.mean(1)).tolist()), rtol=0, atol=1e-6)


def test_strongest_pairs_are_of_different_tokens_in_falling_order() -> None:
    layer = looks(model())[1]
    together, change = layer.locking("after").mean(0), (layer.locking("after") - layer.locking("before")).mean(0)
    every = [(t, u) for t in range(len(TOKENS)) for u in range(t) if TOKENS[t] != TOKENS[u]]
    for by, measure in (("locking", together), ("change", change)):
        pairs = layer.pairs(4, by=by)  # pyright: ignore[reportArgumentType]
        found = [float(measure[pair.second, pair.first]) for pair in pairs]
        assert found == sorted((float(measure[t, u]) for t, u in every), reverse=True)[:4]
        assert all(pair.tokens == (TOKENS[pair.first], TOKENS[pair.second]) for pair in pairs)
        assert all(pair.after == pytest.approx(float(together[pair.first, pair.second])) for pair in pairs)
    assert len(layer.pairs(10**6)) == len(every)


def test_looking_changes_nothing_and_dropout_does_not_matter() -> None:
    made = model(dropout=0.5).train()
    state = {name: part.clone() for name, part in made.state_dict().items()}
    one, other = looks(made), looks(made)
    assert_close(one[-1].after, other[-1].after, rtol=0, atol=0)
    assert made.training
    assert_close(made.state_dict(), state, rtol=0, atol=0)
    assert not any(block._forward_hooks for block in made.blocks)


def test_hooks_are_gone_after_a_text_that_is_refused() -> None:
    made = model()
    with pytest.raises(UsageError, match="at least one token"):
        phases(made, [])
    assert not any(block._forward_hooks for block in made.blocks)
    assert len(read_inputs(made, [1])) == 2


def test_an_ordinary_stream_has_no_phases() -> None:
    shape = DecoderConfig(width=16, layers=2, heads=4, hidden=8, mechanism=("standard", "qdelta"))
    assert phases(Decoder(shape), TOKENS) == [None, None]


@pytest.mark.parametrize("tokens", [[5], [5, 5, 5]])
def test_a_text_without_two_tokens_has_no_pair(tokens: list[int]) -> None:
    shown = [layer.summary() for layer in looks(model(), tokens)]
    assert shown[0].strongest == shown[0].drawn_together == ()
    assert math.isnan(shown[0].locking_before) == (len(tokens) == 1)
    assert shown[0].order[0][0] == pytest.approx(1)
    words = Words(ByteTokenizer())
    assert "Most drawn together" not in words.verdict(shown)
    assert len(words.table(shown).rows) == 2


def test_a_summary_is_plain_data_of_the_same_numbers() -> None:
    layer = looks(model())[0]
    plain = layer.summary(3)
    assert json.loads(json.dumps(asdict(plain)))["order_drawn"] == layer.order("drawn").tolist()
    assert plain.locking_after == pytest.approx(
        float(layer.locking("after")[:, *torch.tril_indices(10, 10, -1)].mean())
    )
    assert (plain.group, len(plain.strongest), len(plain.energy.after)) == ("torus", 3, 2)


def test_the_table_names_tokens_and_fits_a_terminal() -> None:
    shown = summaries(model())
    pair = replace(shown[0].strongest[0], first=3000, second=4000, tokens=(91, 256), after=-0.5)
    shown[0] = replace(shown[0], strongest=(pair,), locking_before=-0.1)
    console = Console(width=80, force_terminal=False)
    with console.capture() as held:
        console.print(rendered(Words(Marked()).table([*shown, None])))
    lines = held.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert "[b] 3001 ~ ⟨end⟩ 4001: -0.50" in lines[1]
    assert f"{sum(map(sum, shown[1].order)) / 36:.2f}" in lines[2]
    assert lines[3].split() == ["3", *["\N{EN DASH}"] * 5]


def test_words_say_what_the_figures_say() -> None:
    words, (first, last) = Words(ByteTokenizer()), summaries(model())
    low, high = ((0.25,) * 18,) * 2, ((0.75,) * 18,) * 2
    rises = words.verdict([replace(first, order=low), replace(last, order_after=high)])
    assert "order parameter rises from the first layer's input (0.25) to the last one's output (0.75)" in rises
    assert "falls" in words.verdict([replace(first, order=high), replace(last, order_after=low)])
    flat = replace(first, energy=replace(first.energy, before=(0.0, 0.0), after=(0.1, 0.1)))
    assert "in 0 of 1 layer." in words.verdict([flat])
    pair = replace(first.drawn_together[0], first=0, second=4, tokens=(72, 32), before=0.25, after=0.75)
    drawn = words.verdict([None, replace(first, drawn_together=(pair,))])
    assert "H (token 1) and ␣ (5), from +0.25 to +0.75 in layer 2" in drawn
    broken = replace(first, energy=replace(first.energy, after=(math.nan, 0.0)))
    assert "not finite" in words.verdict([broken])


def test_the_command_shows_the_phases_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    made = model("kuramoto:frustrated=True").float()
    run, text = tmp_path / "run", tmp_path / "text"
    text.write_bytes(b"Hello [b]\n")
    run.mkdir()
    begin(run, TrainConfig(data=CorpusConfig(), model=made.config, steps=1), {}, ByteTokenizer())
    finish(run, model_tensors(made))
    assert main(["probe", str(run), "--file", str(text)]) == 0
    source, *shown, page = capsys.readouterr().out.splitlines()
    assert str(text) in source
    assert str(run / "probe.html") in page
    assert max(map(len, shown)) <= 80
    phased = shown[shown.index("") + 1 :]  # behind what is said of every model's attention
    assert main(["probe", str(run), "--file", str(text), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["coupling"], record["stability"]) == (None, None)
    first, _ = record["phases"]["layers"]
    assert phased[1].split()[1] == f"{sum(map(sum, first['order'])) / 36:.2f}"
    assert len(first["strongest"]) == 5
    assert record["phases"]["verdict"] == " ".join(line.strip() for line in phased[3:])
