"""The command line as a user meets it: what it prints, where it leaves things, and with which exit code."""

import gzip
import json
import math
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qkflow.cli import check_kernels, main
from qkflow.cli.probe_coupling import verdict
from qkflow.laws.kernels import Agreement
from qkflow.models import Decoder, DecoderConfig
from qkflow.ops import csrc
from qkflow.ops.delta_rule import choose
from qkflow.probes import energies

TINY = {
    "steps": 6,
    "context": 16,
    "batch": 4,
    "evaluate_every": 3,
    "evaluate_tokens": 512,
    "model": {"width": 16, "layers": 2, "heads": 4, "hidden": 24},
}


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    csrc.prepare()  # from the suite's own cache, where they may be built already
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("QKFLOW_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    write("tiny.json", json.dumps(TINY))
    write("text.txt", "".join(f"line {i}: the quick brown fox number {i * i}\n" for i in range(400)))
    return tmp_path


def write(path: str, content: str | bytes) -> Path:
    file = Path(path)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def qkflow(*args: str) -> int:
    return main(list(args))


def trained(out: str = "run") -> str:
    assert qkflow("train", "text.txt", "--config", "tiny.json", "--out", out) == 0
    return out


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line with which a command refuses what it was given."""
    capsys.readouterr()
    assert qkflow(*args) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("qkflow: ")
    assert "\n" not in error
    return error


def test_training_reports_before_and_after_and_fills_the_run_folder(capsys: pytest.CaptureFixture[str]) -> None:
    trained()
    shown = capsys.readouterr().out
    assert "bits per byte" in shown
    assert "before" in shown.splitlines()[-1]
    names = {path.name for path in Path("run").iterdir()}
    assert {"config.json", "environment.json", "metrics.jsonl", "documents.npy", "weights.safetensors"} <= names
    assert "tokenizer.json" in names


def test_a_finished_run_is_not_trained_again(capsys: pytest.CaptureFixture[str]) -> None:
    trained()
    weights = Path("run/weights.safetensors").read_bytes()
    assert qkflow("train", "--resume", "run") == 0
    assert "nothing left to do" in capsys.readouterr().out
    assert Path("run/weights.safetensors").read_bytes() == weights


def test_a_run_is_resumed_from_any_folder_and_remembers_where_it_began(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained()
    told = capsys.readouterr().out.splitlines()[-1].partition(";")[0]
    Path("run/weights.safetensors").unlink()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert qkflow("train", "--resume", str(workplace / "run")) == 0
    assert (workplace / "run/weights.safetensors").exists()
    assert capsys.readouterr().out.splitlines()[-1].startswith(told)


def test_generation_repeats_with_its_seed_and_streams_what_a_batch_gives(capsys: pytest.CaptureFixture[str]) -> None:
    trained()
    texts = []
    for prompts in (["line "], ["line "], ["line ", "the quick brown "]):
        capsys.readouterr()
        assert qkflow("generate", "run", *prompts, "--tokens", "20", "--seed", "3") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("line ")
    assert texts[2].startswith(texts[0].rstrip("\n"))
    assert qkflow("generate", "run", "--tokens", "5") == 0  # from the start of a document


def test_generation_stops_at_a_stop_text(capsys: pytest.CaptureFixture[str]) -> None:
    trained()
    capsys.readouterr()
    assert qkflow("generate", "run", "line", "--tokens", "30", "--temperature", "0") == 0
    whole = capsys.readouterr().out[len("line") :]
    assert qkflow("generate", "run", "line", "--tokens", "30", "--temperature", "0", "--stop", whole[3]) == 0
    assert capsys.readouterr().out == "line" + whole[: whole.index(whole[3])] + "\n"
    for prompts in (["line"], ["line", "li"]):  # several tokens long, streamed and not
        assert qkflow("generate", "run", *prompts, "--tokens", "30", "--temperature", "0", "--stop", whole[3:6]) == 0
        assert capsys.readouterr().out.startswith("line" + whole[: whole.index(whole[3:6])] + "\n")


@pytest.mark.parametrize("tokens", ["bytes", "bpe"])
def test_evaluation_reads_another_text_with_the_runs_own_tokens(
    tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**TINY, "corpus": {"tokens": tokens, "vocabulary": 300}}
    write("config.json", json.dumps(config))
    write("other.txt", "another text entirely, with other words in it. " * 200)
    assert qkflow("train", "text.txt", "--config", "config.json", "--out", "run") == 0
    capsys.readouterr()
    figures = []
    for args in ([], ["other.txt"], ["other.txt", "--split", "train", "--limit", "100"]):
        assert qkflow("eval", "run", *args, "--json") == 0
        figures.append(json.loads(capsys.readouterr().out))
    assert [figure["corpus"] for figure in figures] == ["text", "other", "other"]
    assert all(0 < figure["bits_per_byte"] < 12 for figure in figures)
    assert qkflow("eval", "run") == 0
    assert f"{figures[0]['bits_per_byte']:.4f} bits per byte" in capsys.readouterr().out


def test_a_probe_shows_what_passes_in_each_layer_and_says_it_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    hybrid = ["standard", "standard+hamiltonian:force=potential,dt=0.2"]
    write("hybrid.json", json.dumps({**TINY, "model": {**TINY["model"], "mechanism": hybrid}}))
    assert qkflow("train", "text.txt", "--config", "hybrid.json", "--out", "run") == 0
    Path("run/weights.safetensors").unlink()  # as while it trains: the latest checkpoint is looked into
    capsys.readouterr()
    assert qkflow("probe", "run") == 0
    *shown, page = capsys.readouterr().out.splitlines()
    assert page == f"the page: {Path('run/probe.html').absolute()}"
    assert max(map(len, shown)) <= 80
    assert shown[0] == "step 6 of 6; 16 tokens of held-out text of text"
    assert shown[1].split() == [
        "layer",
        "H:",
        "last",
        "H:",
        "mean",
        "tokens:",
        "last",
        "tokens:",
        "mean",
        "strongest",
        "link",
    ]
    shown = shown[shown.index("") :]
    assert shown[2].split()[:2] == ["1", "\N{EN DASH}"]
    assert shown[3].split()[:4] == ["2", "hamiltonian", "0.2", "→"]
    assert "1 of 1 coupled layer" in " ".join(shown)
    assert qkflow("probe", "run", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["stability"] is None
    none, layer = figures["coupling"]["layers"]
    assert none is None
    assert f"{layer['strength']['key_on_query']:.4f}" in shown[3]
    assert f"{layer['energy']['drift']:.2g}" in shown[3]
    assert figures["coupling"]["verdict"] == " ".join(line.strip() for line in shown[4:])
    write("other.txt", "é" * 3000)
    assert qkflow("probe", "run", "--file", "other.txt", "--tokens", "9", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 9
    write("empty.txt", "")
    assert "empty.txt is empty" in refused(capsys, "probe", "run", "--file", "empty.txt")
    assert "missing.txt" in refused(capsys, "probe", "run", "--file", "missing.txt")


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        ("coupled", "No sign that the coupling is used"),
        ("coupled:dt=0.001", "Hardly used"),
        ("standard+uncoupled", "A control (uncoupled): nothing passes"),
    ],
)
def test_a_probe_does_not_claim_a_coupling_that_is_not_there(
    arm: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {**TINY["model"], "mechanism": arm}
    write("one.json", json.dumps({**TINY, "steps": 1, "model": shape}))
    assert qkflow("train", "text.txt", "--config", "one.json", "--out", "run") == 0
    capsys.readouterr()
    assert qkflow("probe", "run") == 0
    assert expected in " ".join(capsys.readouterr().out.split())


def test_a_probe_claims_nothing_of_figures_that_are_not_finite() -> None:
    model = Decoder(DecoderConfig(width=16, layers=1, heads=4, hidden=24, mechanism="standard+affine"))
    for name, parameter in model.named_parameters():
        if name.endswith("outer_bias"):
            parameter.data.fill_(math.nan)  # as in a model that has diverged
    assert "not finite" in verdict(energies(model, [1, 2, 3]))


def test_a_probe_shows_how_stable_delta_memories_are_beside_their_coupling(capsys: pytest.CaptureFixture[str]) -> None:
    hybrid = ["standard", "qdelta+hamiltonian:key_width=8"]
    write("hybrid.json", json.dumps({**TINY, "model": {**TINY["model"], "mechanism": hybrid}}))
    assert qkflow("train", "text.txt", "--config", "hybrid.json", "--out", "run") == 0
    capsys.readouterr()
    assert qkflow("probe", "run") == 0
    *shown, _ = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80
    _, first, second = (number for number, line in enumerate(shown) if line.startswith("layer"))
    assert shown[first + 2].split()[:2] == ["2", "hamiltonian"]
    assert shown[second + 1].split() == ["1", *["\N{EN DASH}"] * 7]
    assert qkflow("probe", "run", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["coupling"]["layers"][1]["dynamics"] == "hamiltonian"
    none, layer = figures["stability"]["layers"]
    assert none is None
    assert shown[second + 2].split()[1:4] == [
        f"{x:.4f}" for x in (layer["steps"]["mean"], layer["steps"]["quantiles"][-1], layer["rho"])
    ]
    assert [each["tokens"] for each in layer["growth"]] == [2, 8]
    assert len(layer["error"]) == len(layer["bound"]) == 16
    assert figures["stability"]["verdict"] == " ".join(line.strip() for line in shown[second + 3 :])
    assert "every token's error shrinks in each of 1 delta layer" in figures["stability"]["verdict"]


def test_a_probe_of_a_delta_memory_needs_no_coupling(capsys: pytest.CaptureFixture[str]) -> None:
    shape = {**TINY["model"], "mechanism": "gated-deltanet"}
    write("one.json", json.dumps({**TINY, "steps": 1, "model": shape}))
    assert qkflow("train", "text.txt", "--config", "one.json", "--out", "run") == 0
    capsys.readouterr()
    assert qkflow("probe", "run") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "no product of transitions grows" in shown
    assert "dynamics" not in shown


def test_a_probe_of_any_run_says_how_sharp_attention_is_and_where_it_lies(capsys: pytest.CaptureFixture[str]) -> None:
    trained()
    capsys.readouterr()
    text = "fox <b>x</b> \x1b[31m and more than it reads"
    assert qkflow("probe", "run", text, "--rationale", "fox", "--out", "page.html") == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert f"note: {1 + len(text) - 16} tokens more are not read." in shown
    page = Path("page.html").read_text()
    assert "<b>x</b>" not in page
    assert "&lt;" in page
    assert not Path("run/probe.html").exists()
    assert qkflow("probe", "run", "the", "fox", "--rationale", "fox", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["text"], figures["tokens"]) == ("the text given", 8)
    assert figures["rationale"]["places"] == [5, 6, 7]
    shares = figures["maps"]["pooled"]["average"]
    assert sum(shares) == pytest.approx(1)
    assert sum(shares[5:]) == pytest.approx(figures["rationale"]["mass"]["average"])
    assert len(figures["maps"]["layers"]) == 2
    assert f"On the words named lies {sum(shares[5:]):.2f} of it" in figures["maps"]["verdict"]
    assert not Path("run/probe.html").exists()  # a page beside JSON only if it is asked for
    assert "TEXT is empty" in refused(capsys, "probe", "run", "")
    assert "give one of them" in refused(capsys, "probe", "run", "a", "--file", "text.txt")
    assert "'cat'" in refused(capsys, "probe", "run", "the fox", "--rationale", "cat")


def test_flags_come_before_the_config_file() -> None:
    assert qkflow("train", "text.txt", "--config", "tiny.json", "--steps", "2", "--seed", "5", "--out", "run") == 0
    config = json.loads(Path("run/config.json").read_text())
    assert (config["steps"], config["seed"], config["context"]) == (2, 5, 16)


def test_a_size_on_the_command_line_replaces_the_files_shape() -> None:
    write("shape.json", json.dumps({**TINY, "steps": 1}))
    args = ["--config", "shape.json", "--size", "1m", "--out", "run"]
    assert qkflow("train", "text.txt", *args) == 0
    model = json.loads(Path("run/config.json").read_text())["model"]
    assert (model["width"], model["layers"]) == (128, 5)


def test_a_toml_file_serves_as_well_and_a_run_without_a_name_gets_one() -> None:
    write("tiny.toml", "steps = 1\ncontext = 16\nbatch = 4\n[model]\nwidth = 16\nlayers = 1\nheads = 2\nhidden = 8\n")
    for _ in range(2):
        assert qkflow("train", "text.txt", "--config", "tiny.toml", "--mechanism", "standard:window=4") == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == [
        "standard_window=4-seed0",
        "standard_window=4-seed0-2",
    ]


def test_a_budget_becomes_steps_on_record(capsys: pytest.CaptureFixture[str]) -> None:
    write("open.json", json.dumps({key: value for key, value in TINY.items() if key != "steps"}))
    assert qkflow("train", "text.txt", "--config", "open.json", "--budget", "1s", "--out", "run") == 0
    steps = json.loads(Path("run/config.json").read_text())["steps"]
    assert steps >= 1
    assert f"budget  1s: {steps:,} steps" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_with_the_command_that_resumes(number: signal.Signals, code: int) -> None:
    write("long.json", json.dumps({**TINY, "steps": 2000, "evaluate_every": 1000}))
    command = [sys.executable, "-m", "qkflow", "train"]
    with subprocess.Popen(
        [*command, "text.txt", "--config", "long.json", "--out", "a run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        while "step" not in child.stdout.readline():  # the first evaluation: training goes on from here
            pass
        child.send_signal(number)
        _, error = child.communicate()
    assert child.returncode == code
    assert "qkflow train --resume 'a run'" in error
    assert len(error.strip().splitlines()) == 1
    assert list(Path("a run/checkpoints").glob("step-*"))


BAD_CORPORA = {
    "a missing path": ("missing.txt", [], "missing.txt"),
    "an empty file": ("empty.txt", [], "empty"),
    "a folder without text": ("hollow", [], "hollow"),
    "a truncated .gz": ("torn.txt.gz", [], "torn.txt.gz"),
    "an unknown name": ("enwik9", [], "'enwik8'"),
    "not UTF-8 under BPE": ("latin.txt", ["--tokens", "bpe"], "--tokens bytes"),
    "shorter than a context": ("text.txt", ["--context", "100000"], "--context"),
    "a batch larger than the corpus": ("text.txt", ["--batch", "100000"], "batch"),
    "a field that is not there": ("rows.jsonl", ["--field", "body"], "body"),
    "no such device": ("text.txt", ["--device", "cuda"], "cuda"),
}


@pytest.mark.parametrize("what", BAD_CORPORA)
def test_a_bad_corpus_is_refused_with_one_line(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    write("empty.txt", "")
    Path("hollow").mkdir()
    write("torn.txt.gz", gzip.compress(Path("text.txt").read_bytes())[:-200])
    write("latin.txt", b"caf\xe9 " * 5000)
    write("rows.jsonl", '{"text": "a row"}\n' * 50)
    source, flags, expected = BAD_CORPORA[what]
    assert expected in refused(capsys, "train", source, "--config", "tiny.json", *flags, "--out", "run")
    assert not Path("run/config.json").exists()


BAD_SETTINGS = {
    "an unknown key": ({"stpes": 3}, "'steps'"),
    "an unknown model key": ({"model": {"widht": 3}}, "'width'"),
    "a wrong type": ({"steps": "many"}, "'steps'"),
    "heads that do not divide the width": ({"model": {"width": 16, "heads": 3, "layers": 1, "hidden": 8}}, "divide"),
    "an unknown mechanism": ({"model": {"mechanism": "standart"}}, "'standard'"),
    "an unknown option of a mechanism": ({"model": {"mechanism": "standard:windw=3"}}, "'window'"),
    "an unknown size": ({"model": {"size": "2m"}}, "1m"),
    "a learning rate below zero": ({"lr": -1.0}, "lr"),
    "a table that is none": ({"model": 3}, "'model'"),
    "a size that is no name": ({"model": {"size": 5}}, "unknown size"),
    "a vocabulary that is no number": ({"model": {"vocabulary": "x"}}, "'vocabulary'"),
    "a source that is no text": ({"corpus": {"source": 5}}, "'source'"),
}


@pytest.mark.parametrize("what", BAD_SETTINGS)
def test_a_bad_setting_is_refused_with_one_line(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    changed, expected = BAD_SETTINGS[what]
    write("bad.json", json.dumps({"steps": 2, "context": 16, "batch": 4, **changed}))
    source = [] if "corpus" in changed else ["text.txt"]
    assert expected in refused(capsys, "train", *source, "--config", "bad.json", "--out", "run")


BAD_CALLS = {
    "a config file that is not there": (["train", "--config", "none.toml"], "none.toml"),
    "a config file that is no config": (["train", "--config", "text.txt"], ".toml"),
    "a config file that cannot be parsed": (["train", "--config", "broken.json"], "broken.json"),
    "steps and budget": (["train", "--steps", "3", "--budget", "2m"], "not both"),
    "a budget without a unit": (["train", "text.txt", "--config", "open.json", "--budget", "20"], "2m"),
    "resume and more": (["train", "--resume", "run", "--lr", "0.1"], "--lr"),
    "resume and a zero": (["train", "--resume", "run", "--seed", "0"], "--seed"),
    "resuming what is not there": (["train", "--resume", "nowhere"], "nowhere"),
    "generating from what is not there": (["generate", "nowhere", "hello"], "nowhere"),
    "generating from a folder that is no run": (["generate", "."], "config.json"),
    "evaluating a pickle": (["eval", "hostile.pt"], "pickle"),
    "probing what is not there": (["probe", "nowhere"], "nowhere"),
    "probing a folder that is no run": (["probe", "."], "config.json"),
    "probing a pickle": (["probe", "hostile.pt"], "pickle"),
    "probing no tokens": (["probe", "run", "--tokens", "0"], "at least 1"),
    "nothing to check": (["check"], "give FACTORY"),
    "a law of nothing": (["check", "--kernels", "--law", "causality"], "give FACTORY"),
    "an unknown law": (["check", "standard", "--law", "causalty"], "'causality'"),
    "an unknown mechanism": (["check", "diferential"], "'differential'"),
    "a module that is not there": (["check", "no_such_package:Thing"], "no_such_package"),
    "a name that is not there": (["check", "qkflow:Thing"], "'Thing'"),
    "a module that cannot be imported": (["check", "torn_module:Thing"], "torn_module"),
    "heads that do not divide the width": (["check", "standard", "--heads", "5"], "divide"),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_a_bad_call_is_refused_with_one_line(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    write("broken.json", "{")
    write("open.json", json.dumps({key: value for key, value in TINY.items() if key != "steps"}))
    write("hostile.pt", pickle.dumps({"weights": [1, 2, 3]}))
    write("torn_module.py", "def (")
    args, expected = BAD_CALLS[what]
    assert expected in refused(capsys, *args)


def test_a_folder_that_holds_a_run_is_not_written_over(capsys: pytest.CaptureFixture[str]) -> None:
    trained()
    assert "--resume run" in refused(capsys, "train", "text.txt", "--config", "tiny.json", "--out", "run")


def test_a_mistyped_flag_leaves_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        qkflow("train", "--contxt", "3")
    assert left.value.code == 2
    assert "--context" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "eval", "generate", "probe", "check"])
def test_help_shows_examples_within_80_columns(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        qkflow(command, "--help")
    shown = capsys.readouterr().out
    assert left.value.code == 0
    assert f"  qkflow {command} " in shown
    examples = [line for line in shown.splitlines() if line.startswith("  qkflow")]
    assert max(map(len, examples)) <= 80


def test_check_shows_each_law_and_fails_for_a_broken_one(capsys: pytest.CaptureFixture[str]) -> None:
    write(
        "mine.py",
        "import torch\nfrom qkflow import StandardAttention\n\n\nclass Peeking(StandardAttention):\n"
        "    def forward(self, x, state=None, layout=None):\n"
        "        y, state = super().forward(x, state, layout)\n"
        "        return y + torch.roll(x, -1, 1), state\n",
    )
    assert qkflow("check", "mine:Peeking", "--law", "causality", "--law", "saving") == 1
    shown = capsys.readouterr().out
    assert "broken" in shown
    assert "t=2, first 1 tokens" in shown
    assert qkflow("check", "standard:window=3", "--law", "causality") == 0
    assert "kept" in capsys.readouterr().out


def test_check_tells_of_the_kernels_and_fails_for_one_that_is_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert qkflow("check", "--kernels") == 0
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80
    assert shown[0].split()[:3] == ["delta", "rule", f"{choose(torch.device('cpu'))},"]
    assert csrc.fault() is not None or any(line.startswith("compiler ") for line in shown)
    assert {line.split()[-1] for line in shown if " float" in line} == {"ok"}
    off = Agreement(kernel="mine", precision="float64", values=1e-16, gradients=3e-9)
    monkeypatch.setattr(check_kernels, "agreements", lambda: [off])
    monkeypatch.setattr(csrc, "build", lambda: None)
    monkeypatch.setattr(csrc, "fault", lambda: "QKFLOW_NATIVE is 0")
    assert qkflow("check", "standard", "--kernels", "--law", "causality") == 1
    shown = capsys.readouterr().out
    assert "none: QKFLOW_NATIVE is 0" in shown
    assert ["mine", "float64", "1e-16", "3e-09", "1e-10", "off"] in [line.split() for line in shown.splitlines()]
    assert "kept" in shown
