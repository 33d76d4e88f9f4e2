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
from qkflow.probes import attention_maps
from qkflow.report import gallery
from qkflow.report.gallery import gather, pack, unpack
from qkflow.training import load_run

ARMS = ("standard", "differential")


@given(st.integers(1, 20), st.booleans(), st.integers(0, 99), st.floats(1e-6, 100))
@settings(deadline=None, max_examples=25)
def test_packed_maps_keep_each_weight_to_a_hundredth_of_the_largest(
    t: int, negative: bool, seed: int, top: float
) -> None:
    weights = np.tril(np.random.default_rng(seed).normal(size=(t, t)) * top)
    weights = weights if negative else abs(weights)
    head = pack(weights)
    back, largest = unpack(head, t), abs(weights).max()
    assert len(base64.b64decode(head["data"])) == t * (t + 1) // 2
    assert abs(back - weights).max() <= largest / 120
    faint = (weights != 0) & (abs(weights) < largest / 100)
    assert (abs(back - weights)[faint] <= largest / 1200).all()  # the root spends the byte where weights are many
    assert (np.sign(back) * np.sign(weights) >= 0).all()


@pytest.mark.parametrize("weights", [np.zeros((3, 3)), np.full((2, 2), np.nan)])
def test_maps_of_nothing_are_nothing(weights: np.ndarray) -> None:
    assert unpack(pack(weights), len(weights)).tolist() == np.zeros_like(weights).tolist()


def test_the_gallery_holds_the_maps_of_the_runs(synthetic: ModuleType, tmp_path: Path) -> None:
    runs = synthetic.folder(tmp_path, ARMS, layers=2, excerpts=2, width=32)
    shown = gather(ARMS, tmp_path, runs)
    assert shown.missing == []
    assert [arm["name"] for arm in shown.arms] == list(ARMS)
    assert [len(arm["maps"][0][0]) for arm in shown.arms] == [4, 2]  # heads
    tokens = json.loads((tmp_path / "corpus.json").read_text())["excerpts"][1]["tokens"]
    for arm in shown.arms:
        for layer, truth in zip(arm["maps"][1], attention_maps(load_run(runs[arm["name"]]).model, tokens), strict=True):
            for head, weights in zip(layer, truth, strict=True):
                assert abs(unpack(head, len(tokens)) - weights.numpy()).max() <= float(weights.abs().max()) / 120
    assert [len(layers) for layers in shown.exhibits["differential"]] == [1, 1]
    assert shown.configs["standard"]["model"]["layers"] == 2


def test_tokens_are_labelled_and_lines_marked(synthetic: ModuleType, tmp_path: Path) -> None:
    shown = gather(ARMS, tmp_path, synthetic.folder(tmp_path, ARMS, layers=1, excerpts=1, width=32))
    (excerpt,) = shown.excerpts
    assert excerpt["tokens"][:4] == ["d", "e", "f", "␣"]
    assert excerpt["tokens"][-1] == "⟨end⟩"
    assert excerpt["tokens"][excerpt["breaks"][0]] == "↵"


def test_an_arm_without_a_run_is_named_and_the_others_are_shown(synthetic: ModuleType, tmp_path: Path) -> None:
    runs = synthetic.folder(tmp_path, ARMS, layers=1, width=32)
    del runs["standard"]
    shown = gather(ARMS, tmp_path, runs)
    assert [arm["name"] for arm in shown.arms] == ["differential"]
    assert shown.missing == ["standard: no run is finished, so there are no weights to look at."]


@pytest.mark.parametrize("file", ["weights.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_run_is_said_and_left_out(synthetic: ModuleType, tmp_path: Path, file: str) -> None:
    runs = synthetic.folder(tmp_path, ARMS, layers=1, width=32)
    (runs["differential"] / file).write_bytes(b"torn")
    shown = gather(ARMS, tmp_path, runs)
    assert [arm["name"] for arm in shown.arms] == ["standard"]
    assert len(shown.missing) == 1
    assert shown.missing[0].startswith("differential: its maps cannot be shown (")


def test_a_mechanism_that_fails_to_show_itself_does_not_take_the_page_with_it(
    synthetic: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise ZeroDivisionError("oh")

    runs = synthetic.folder(tmp_path, ARMS, layers=1, width=32)
    monkeypatch.setattr(StandardAttention, "weights", fail)
    shown = gather(ARMS, tmp_path, runs)
    assert shown.missing == ["standard: its maps cannot be shown (ZeroDivisionError: oh)."]
    assert [arm["name"] for arm in shown.arms] == ["differential"]
    assert shown.excerpts


@pytest.mark.parametrize("content", [None, "torn", "[]", '{"excerpts": [{"tokens": "x"}]}'])
def test_without_excerpts_the_page_says_so(synthetic: ModuleType, tmp_path: Path, content: str | None) -> None:
    runs = synthetic.folder(tmp_path, ARMS, layers=1, width=32)
    (tmp_path / "corpus.json").unlink()
    if content is not None:
        (tmp_path / "corpus.json").write_text(content)
    shown = gather(ARMS, tmp_path, runs)
    assert shown.arms == shown.excerpts == []
    assert shown.missing[0].startswith("The excerpts for attention maps cannot be read")


def test_maps_too_many_for_the_page_are_thinned_and_it_is_said(
    synthetic: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = synthetic.folder(tmp_path, ARMS, layers=4, excerpts=3, width=32)
    whole = len(json.dumps(gather(ARMS, tmp_path, runs).arms))
    for room in (whole // 2, whole // 5, whole // 11):
        monkeypatch.setattr(gallery, "ROOM", room)
        shown = gather(ARMS, tmp_path, runs)
        assert len(json.dumps(shown.arms)) <= room + 400
        assert "To keep the page small" in shown.missing[-1]
        assert len(shown.excerpts) == len(shown.arms[0]["maps"]) >= 1
        assert len(shown.arms[0]["layers"]) == len(shown.arms[0]["maps"][0])
    assert shown.arms[0]["layers"] in ([1, 4], [1, 3], [1])
