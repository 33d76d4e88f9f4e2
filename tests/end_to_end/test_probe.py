"""`qkflow probe`: its tables, its conclusions, its page, and the errors of its flags."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qkflow.cli.probe_tables import coupling_section
from qkflow.models import Decoder, DecoderConfig
from qkflow.probes import coupling_stats

Command = Callable[..., str]
Train = Callable[..., None]
pytestmark = pytest.mark.usefixtures("workspace")


@pytest.fixture
def train(qkflow: Command) -> Train:
    """Train a tiny run of a mechanism in `run`."""

    def run(mechanism: str | list[str], **settings: Any) -> None:
        tiny = json.loads(Path("tiny.json").read_text())
        tiny = {**tiny, "model": {**tiny["model"], "mechanism": mechanism}, **settings}
        Path("config.json").write_text(json.dumps(tiny))
        qkflow("train", "text.txt", "--config", "config.json", "--out", "run")

    return run


def test_probe_prints_what_each_coupling_transmits(qkflow: Command, usage_error: Command, train: Train) -> None:
    train(["standard", "standard+hamiltonian:force=potential,dt=0.2"])
    Path("run/weights.safetensors").unlink()  # as during training: the latest checkpoint is read
    *lines, page = qkflow("probe", "run").splitlines()
    assert page == f"page: {Path('run/probe.html').absolute()}"
    assert max(map(len, lines)) <= 80
    assert lines[0] == "step 6 of 6; 16 tokens of held-out text of text"
    assert " ".join(lines[1].split()) == "layer H: last H: mean tokens: last tokens: mean strongest link"
    lines = lines[lines.index("") :]
    assert lines[2].split()[:2] == ["1", "\N{EN DASH}"]
    assert lines[3].split()[:4] == ["2", "hamiltonian", "0.2", "\N{RIGHTWARDS ARROW}"]
    assert "1 of 1 coupled layer" in " ".join(lines)
    results = json.loads(qkflow("probe", "run", "--json"))
    assert results["stability"] is None
    uncoupled, coupled = results["coupling"]["layers"]
    assert uncoupled is None
    assert f"{coupled['strength']['key_on_query']:.4f}" in lines[3]
    assert f"{coupled['energy']['drift']:.2g}" in lines[3]
    assert results["coupling"]["verdict"] == " ".join(line.strip() for line in lines[4:])
    Path("other.txt").write_text("\N{LATIN SMALL LETTER E WITH ACUTE}" * 3000)
    assert json.loads(qkflow("probe", "run", "--file", "other.txt", "--tokens", "9", "--json"))["tokens"] == 9
    Path("empty.txt").touch()
    assert "empty.txt is empty" in usage_error("probe", "run", "--file", "empty.txt")
    assert "missing.txt" in usage_error("probe", "run", "--file", "missing.txt")


@pytest.mark.parametrize(
    ("mechanism", "expected"),
    [
        ("coupled", "Apparently unused"),
        ("coupled:dt=0.001", "Hardly used"),
        ("standard+uncoupled", "A control (uncoupled)"),
    ],
)
def test_probe_does_not_claim_a_coupling_that_is_absent(
    qkflow: Command, train: Train, mechanism: str, expected: str
) -> None:
    train(mechanism, steps=1)
    assert expected in " ".join(qkflow("probe", "run").split())


def test_probe_claims_nothing_if_the_figures_are_not_finite() -> None:
    model = Decoder(DecoderConfig(width=16, layers=1, heads=4, hidden=24, mechanism="standard+affine"))
    for name, parameter in model.named_parameters():
        if name.endswith("outer_bias"):
            parameter.data.fill_(math.nan)  # a diverged model
    assert "not finite" in coupling_section(coupling_stats(model, [1, 2, 3])).verdict


def test_probe_prints_the_stability_of_delta_memories_beside_their_coupling(qkflow: Command, train: Train) -> None:
    train(["standard", "qdelta+hamiltonian:key_width=8"])
    *lines, _ = qkflow("probe", "run").splitlines()
    assert max(map(len, lines)) <= 80
    _, coupling, stability = (number for number, line in enumerate(lines) if line.startswith("layer  "))
    assert lines[coupling + 2].split()[:2] == ["2", "hamiltonian"]
    assert lines[stability + 1].split() == ["1", *["\N{EN DASH}"] * 7]
    results = json.loads(qkflow("probe", "run", "--json"))
    assert results["coupling"]["layers"][1]["dynamics"] == "hamiltonian"
    softmax, delta = results["stability"]["layers"]
    assert softmax is None
    assert lines[stability + 2].split()[1:4] == [
        f"{x:.4f}" for x in (delta["steps"]["mean"], delta["steps"]["quantiles"][-1], delta["rho"])
    ]
    assert [row["tokens"] for row in delta["growth"]] == [2, 8]
    assert len(delta["error"]) == len(delta["bound"]) == 16
    assert results["stability"]["verdict"] == " ".join(line.strip() for line in lines[stability + 3 :])
    assert "every token's error shrinks in all of 1 delta layer" in results["stability"]["verdict"]


def test_probe_of_a_delta_memory_needs_no_coupling(qkflow: Command, train: Train) -> None:
    train("gated-deltanet", steps=1)
    output = " ".join(qkflow("probe", "run").split())
    assert "no product of transitions grows" in output
    assert "dynamics" not in output


def test_probe_prints_how_sharp_attention_is_and_how_much_lies_on_the_rationale(
    qkflow: Command, usage_error: Command, run_copy: str
) -> None:
    text = "fox <b>x</b> \x1b[31m and more than it reads"
    output = qkflow("probe", run_copy, text, "--rationale", "fox", "--out", "page.html")
    assert "\x1b" not in output
    assert f"note: {1 + len(text) - 16} more tokens are not read." in output
    page = Path("page.html").read_text()
    assert "<b>x</b>" not in page
    assert "&lt;" in page
    assert not Path(run_copy, "probe.html").exists()
    results = json.loads(qkflow("probe", run_copy, "the", "fox", "--rationale", "fox", "--json"))
    assert (results["text"], results["tokens"]) == ("the given text", 8)
    assert results["rationale"]["positions"] == [5, 6, 7]
    mass = results["maps"]["pooled"]["average"]
    assert sum(mass) == pytest.approx(1)
    assert sum(mass[5:]) == pytest.approx(results["rationale"]["mass"]["average"])
    assert len(results["maps"]["layers"]) == 2
    assert f"{sum(mass[5:]):.2f} of it is on the rationale" in results["maps"]["verdict"]
    assert not Path(run_copy, "probe.html").exists()  # --json writes a page only with --out
    assert "an argument is empty" in usage_error("probe", run_copy, "")
    assert "only one of them" in usage_error("probe", run_copy, "a", "--file", "text.txt")
    assert "'cat'" in usage_error("probe", run_copy, "the fox", "--rationale", "cat")
