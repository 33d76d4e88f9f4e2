import base64
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.mechanisms import StandardAttention
from qkflow.probes import attention_maps as model_maps
from qkflow.report import attention_maps
from qkflow.report.attention_maps import CONTEXT_WORDS, MAX_WORDS, color_lines, load_maps, opacity, pack
from qkflow.training import load_run

ARMS = ("standard", "differential")


@given(st.integers(1, 20), st.booleans(), st.integers(0, 99), st.floats(1e-6, 100))
@settings(deadline=None, max_examples=25)
def test_packing_is_accurate_to_a_hundredth_of_the_largest_weight(
    synthetic: ModuleType, t: int, negative: bool, seed: int, top: float
) -> None:
    weights = np.tril(np.random.default_rng(seed).normal(size=(t, t)) * top)
    weights = weights if negative else abs(weights)
    head = pack(weights)
    back, largest = synthetic.unpack(head, t), abs(weights).max()
    assert len(base64.b64decode(head["data"])) == t * (t + 1) // 2
    assert abs(back - weights).max() <= largest / 120
    faint = (weights != 0) & (abs(weights) < largest / 100)
    assert (abs(back - weights)[faint] <= largest / 1200).all()  # the square root keeps small weights accurate
    assert (np.sign(back) * np.sign(weights) >= 0).all()


@pytest.mark.parametrize("weights", [np.zeros((3, 3)), np.full((2, 2), np.nan)])
def test_zero_and_nan_weights_become_zero(synthetic: ModuleType, weights: np.ndarray) -> None:
    assert synthetic.unpack(pack(weights), len(weights)).tolist() == np.zeros_like(weights).tolist()


def test_maps_are_those_of_the_trained_models(synthetic: ModuleType, tmp_path: Path) -> None:
    runs = synthetic.folder(tmp_path, ARMS, layers=2, excerpts=2, width=32)
    shown = load_maps(ARMS, tmp_path, runs)
    assert shown.missing == []
    assert [arm["name"] for arm in shown.arms] == list(ARMS)
    assert [len(arm["maps"][0][0]) for arm in shown.arms] == [4, 2]  # heads
    tokens = json.loads((tmp_path / "corpus.json").read_text())["excerpts"][1]["tokens"]
    for arm in shown.arms:
        for layer, truth in zip(arm["maps"][1], model_maps(load_run(runs[arm["name"]]).model, tokens), strict=True):
            for head, weights in zip(layer, truth, strict=True):
                assert (
                    abs(synthetic.unpack(head, len(tokens)) - weights.numpy()).max() <= float(weights.abs().max()) / 120
                )
    assert [len(layers) for layers in shown.diagnostics["differential"]] == [1, 1]
    assert shown.configs["standard"]["model"]["layers"] == 2


def test_tokens_are_labelled_and_line_ends_marked(synthetic: ModuleType, tmp_path: Path) -> None:
    shown = load_maps(ARMS, tmp_path, synthetic.folder(tmp_path, ARMS, layers=1, excerpts=1, width=32))
    (excerpt,) = shown.excerpts
    assert excerpt["tokens"][:4] == ["d", "e", "f", "␣"]
    assert excerpt["tokens"][-1] == "⟨end⟩"
    assert excerpt["tokens"][excerpt["breaks"][0]] == "↵"


def test_an_arm_without_a_run_is_reported_and_the_others_are_shown(synthetic: ModuleType, tmp_path: Path) -> None:
    runs = synthetic.folder(tmp_path, ARMS, layers=1, width=32)
    del runs["standard"]
    shown = load_maps(ARMS, tmp_path, runs)
    assert [arm["name"] for arm in shown.arms] == ["differential"]
    assert shown.missing == ["standard: no finished run, so there are no attention maps."]


@pytest.mark.parametrize("file", ["weights.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_run_is_reported_and_left_out(synthetic: ModuleType, tmp_path: Path, file: str) -> None:
    runs = synthetic.folder(tmp_path, ARMS, layers=1, width=32)
    (runs["differential"] / file).write_bytes(b"torn")
    shown = load_maps(ARMS, tmp_path, runs)
    assert [arm["name"] for arm in shown.arms] == ["standard"]
    assert len(shown.missing) == 1
    assert shown.missing[0].startswith("differential: attention maps failed (")


def test_a_mechanism_that_raises_does_not_break_the_page(
    synthetic: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise ZeroDivisionError("oh")

    runs = synthetic.folder(tmp_path, ARMS, layers=1, width=32)
    monkeypatch.setattr(StandardAttention, "weights", fail)
    shown = load_maps(ARMS, tmp_path, runs)
    assert shown.missing == ["standard: attention maps failed (ZeroDivisionError: oh)."]
    assert [arm["name"] for arm in shown.arms] == ["differential"]
    assert shown.excerpts


@pytest.mark.parametrize("content", [None, "torn", "[]", '{"excerpts": [{"tokens": "x"}]}'])
def test_unreadable_excerpts_are_reported(synthetic: ModuleType, tmp_path: Path, content: str | None) -> None:
    runs = synthetic.folder(tmp_path, ARMS, layers=1, width=32)
    (tmp_path / "corpus.json").unlink()
    if content is not None:
        (tmp_path / "corpus.json").write_text(content)
    shown = load_maps(ARMS, tmp_path, runs)
    assert shown.arms == shown.excerpts == []
    assert shown.missing[0].startswith("cannot read the excerpts for attention maps")


def test_maps_that_are_too_large_are_thinned_and_reported(
    synthetic: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = synthetic.folder(tmp_path, ARMS, layers=4, excerpts=3, width=32)
    whole = len(json.dumps(load_maps(ARMS, tmp_path, runs).arms))
    for limit in (whole // 2, whole // 5, whole // 11):
        monkeypatch.setattr(attention_maps, "MAX_CHARACTERS", limit)
        shown = load_maps(ARMS, tmp_path, runs)
        assert len(json.dumps(shown.arms)) <= limit + 400
        assert "To keep the page small" in shown.missing[-1]
        assert len(shown.excerpts) == len(shown.arms[0]["maps"]) >= 1
        assert len(shown.arms[0]["layers"]) == len(shown.arms[0]["maps"][0])
    assert shown.arms[0]["layers"] in ([1, 4], [1, 3], [1])


@given(st.floats(0, 1), st.floats(0, 1))
@settings(deadline=None, max_examples=25)
def test_opacity_increases_with_the_share(first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert 0 <= opacity(low, 1.0) <= opacity(high, 1.0) < 0.6  # the word stays readable


@given(st.integers(1, 300), st.data())
@settings(deadline=None, max_examples=25)
def test_long_texts_keep_the_words_that_matter(count: int, data: st.DataObject) -> None:
    marked = data.draw(st.sets(st.integers(0, count - 1), max_size=3))
    peak = data.draw(st.integers(0, count - 1))
    shares = [1.0 if place == peak else 0.001 for place in range(count)]
    words = [f"w{place}" for place in range(count)]
    (line,) = color_lines(words, {"r = 1": shares}, {}, marked=marked)
    shown = [word.text for word in line.words if not word.is_gap]
    assert {words[place] for place in (*marked, peak, 0, count - 1)} <= set(shown)
    assert shown == [word for word in words if word in shown]
    gaps = [int(word.text.split()[1]) for word in line.words if word.is_gap]
    assert len(shown) + sum(gaps) == count
    assert len(shown) <= max(MAX_WORDS, 6 * (2 * CONTEXT_WORDS + 1))


def test_a_gap_shows_its_total_share() -> None:
    shares = [1.0, *[0.001] * 198, 1.0]
    (line,) = color_lines(["w"] * 200, {"r = 1": shares}, {})
    (gap,) = (word for word in line.words if word.is_gap)
    assert gap.hover == "190 words: 0.190 in total"


def test_all_models_share_one_scale() -> None:
    first, second = color_lines(["a", "b"], {"x": [0.9, 0.1], "y": [0.1, 0.1]}, {"y": "plural"})
    assert first.words[1].alpha == second.words[0].alpha < first.words[0].alpha
    assert second.end == "plural"
