"""`qkflow train`, `eval`, `generate` and `check`: what they print, which files they write, and their exit codes."""

import gzip
import io
import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qkflow.cli import check, main, progress, train
from qkflow.cli.console import Console
from qkflow.data import CorpusConfig
from qkflow.laws.kernels import KernelCheck
from qkflow.models import DecoderConfig
from qkflow.ops.csrc import build
from qkflow.ops.delta_rule import choose_backend
from qkflow.training import TrainConfig, read_metrics
from qkflow.training import train as qkflow_train

Command = Callable[..., str]
pytestmark = pytest.mark.usefixtures("workspace")


def write(path: str, content: str | bytes) -> None:
    Path(path).write_bytes(content.encode() if isinstance(content, str) else content)


def tiny(**changes: object) -> str:
    """`tiny.json` with some settings changed; None removes one."""
    settings = {**json.loads(Path("tiny.json").read_text()), **changes}
    return json.dumps({key: value for key, value in settings.items() if value is not None})


def test_train_prints_the_loss_before_and_after_and_fills_the_run_folder(trained_run: Path) -> None:
    output = (trained_run.parent / "output.txt").read_text()
    assert "bits per byte" in output
    assert "before" in output.splitlines()[-1]
    files = {path.name for path in trained_run.iterdir()}
    expected = {"config.json", "environment.json", "metrics.jsonl", "documents.npy", "weights.safetensors"}
    assert expected | {"tokenizer.json"} <= files


def test_a_finished_run_is_not_trained_again(qkflow: Command, run_copy: str) -> None:
    weights = Path(run_copy, "weights.safetensors").read_bytes()
    assert "nothing to do" in qkflow("train", "--resume", run_copy)
    assert Path(run_copy, "weights.safetensors").read_bytes() == weights


def test_logs_are_written_continued_and_made_from_a_finished_run(
    qkflow: Command, run_copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(run_copy)
    qkflow("train", "--resume", run_copy, "--log", "csv")
    rows = (run / "metrics.csv").read_text().splitlines()
    assert len(rows) == 1 + len((run / "metrics.jsonl").read_text().splitlines())
    (run / "weights.safetensors").unlink()
    (run / "metrics.csv").write_text("torn")
    (run / "tensorboard").mkdir()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    printed = qkflow("train", "--resume", run_copy)
    assert "the log tensorboard of run is not continued" in " ".join(printed.split())
    assert (run / "metrics.csv").read_text().splitlines() == rows


def test_a_run_can_be_resumed_from_another_directory(
    qkflow: Command, workspace: Path, trained_run: Path, run_copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_and_after = (trained_run.parent / "output.txt").read_text().splitlines()[-1].partition(";")[0]
    Path(run_copy, "weights.safetensors").unlink()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    output = qkflow("train", "--resume", str(workspace / run_copy))
    assert (workspace / run_copy / "weights.safetensors").exists()
    assert output.splitlines()[-1].startswith(before_and_after)


def test_an_existing_run_is_not_overwritten(usage_error: Command, run_copy: str) -> None:
    assert "--resume run" in usage_error("train", "text.txt", "--config", "tiny.json", "--out", run_copy)


def test_flags_override_the_config_file(qkflow: Command) -> None:
    qkflow("train", "text.txt", "--config", "tiny.json", "--steps", "2", "--seed", "5", "--out", "run")
    config = json.loads(Path("run/config.json").read_text())
    assert (config["steps"], config["seed"], config["context"]) == (2, 5, 16)


def test_a_size_flag_replaces_the_model_shape_of_the_config_file(qkflow: Command) -> None:
    write("one_step.json", tiny(steps=1, evaluate_tokens=64, final_tokens=64))
    qkflow("train", "text.txt", "--config", "one_step.json", "--size", "1m", "--out", "run")
    model = json.loads(Path("run/config.json").read_text())["model"]
    assert (model["width"], model["layers"]) == (128, 5)


def test_toml_configs_are_read_and_runs_without_a_name_are_numbered(qkflow: Command) -> None:
    write("tiny.toml", "steps = 1\ncontext = 16\nbatch = 4\n[model]\nwidth = 16\nlayers = 1\nheads = 2\nhidden = 8\n")
    for _ in range(2):
        qkflow("train", "text.txt", "--config", "tiny.toml", "--mechanism", "standard:window=4")
    names = sorted(path.name for path in Path("runs").iterdir())
    assert names == ["standard_window=4-seed0", "standard_window=4-seed0-2"]


def test_a_budget_is_converted_to_steps_and_recorded(qkflow: Command) -> None:
    write("no_steps.json", tiny(steps=None))
    output = qkflow("train", "text.txt", "--config", "no_steps.json", "--budget", "1s", "--out", "run")
    steps = json.loads(Path("run/config.json").read_text())["steps"]
    assert steps >= 1
    assert f"budget  1s: {steps:,} steps" in output


def test_train_evaluates_a_stated_sample_at_the_end_unless_asked_for_all(
    qkflow: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "_FINAL_TOKENS", 256)
    write("short.json", tiny(steps=1, final_tokens=None, evaluate_tokens=64))
    sample = "a sample of 256 of 851 held-out tokens (--evaluate-all: all of them)"
    assert sample in qkflow("train", "text.txt", "--config", "short.json")
    assert "a sample of" not in qkflow("train", "text.txt", "--config", "short.json", "--evaluate-all")
    runs = [read_metrics(Path("runs", name, "metrics.jsonl")) for name in ("standard-seed0", "standard-seed0-2")]
    scored = [[record["scored_tokens"] for record in run if record["kind"] == "eval"][-1] for run in runs]
    assert scored == [256, 851]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_shown_during_an_evaluation(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr(progress, "_LINES_EVERY", 0.0)
    output = io.StringIO()
    shown = progress.TrainProgress(Console(file=output, force_terminal=is_terminal, width=120))
    corpus = CorpusConfig(source=str(workspace / "text.txt"))
    model = DecoderConfig(width=16, layers=1, heads=2, hidden=8)
    qkflow_train(TrainConfig(data=corpus, model=model, steps=1, context=16, batch=4), "run", callbacks=[shown])
    assert "evaluating 100% of 851 tokens" in output.getvalue()


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_writes_a_checkpoint_and_prints_the_command_that_resumes(
    number: signal.Signals, exit_code: int
) -> None:
    write("long.json", tiny(steps=2000, evaluate_every=1000))
    with subprocess.Popen(
        [sys.executable, "-m", "qkflow", "train", "text.txt", "--config", "long.json", "--out", "a run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        while "step" not in child.stdout.readline():  # training starts after the first evaluation
            pass
        child.send_signal(number)
        _, error = child.communicate()
    assert child.returncode == exit_code
    assert "qkflow train --resume 'a run'" in error
    assert len(error.strip().splitlines()) == 1
    assert list(Path("a run/checkpoints").glob("step-*"))


@pytest.mark.parametrize("tokens", ["bytes", "bpe"])
def test_eval_reads_another_text_with_the_tokenizer_of_the_run(qkflow: Command, trained_run: Path, tokens: str) -> None:
    run = str(trained_run)
    if tokens == "bpe":
        run = "run"
        write("bpe.json", tiny(steps=1, data={"tokens": "bpe", "vocabulary": 300}))
        qkflow("train", "text.txt", "--config", "bpe.json", "--out", run)
    write("other.txt", "another text entirely, with other words in it. " * 200)
    results = [
        json.loads(qkflow("eval", run, *args, "--json"))
        for args in ([], ["other.txt"], ["other.txt", "--split", "train", "--limit", "100"])
    ]
    assert [result["data"] for result in results] == ["text", "other", "other"]
    assert all(0 < result["bits_per_byte"] < 12 for result in results)
    assert f"{results[0]['bits_per_byte']:.4f} bits per byte" in qkflow("eval", run)


def test_generate_depends_on_the_seed_and_not_on_the_batch(qkflow: Command, trained_run: Path) -> None:
    run = str(trained_run)
    first, again, batch = (
        qkflow("generate", run, *prompts, "--tokens", "20", "--seed", "3")
        for prompts in (["line "], ["line "], ["line ", "the quick brown "])
    )
    assert first == again
    assert first.startswith("line ")
    assert batch.startswith(first.rstrip("\n"))
    qkflow("generate", run, "--tokens", "5")  # without a prompt: from the start of a document


def test_generate_stops_before_a_stop_string(qkflow: Command, trained_run: Path) -> None:
    options = ("--tokens", "30", "--temperature", "0")
    whole = qkflow("generate", str(trained_run), "line", *options)[len("line") :]
    output = qkflow("generate", str(trained_run), "line", *options, "--stop", whole[3])
    assert output == "line" + whole[: whole.index(whole[3])] + "\n"
    for prompts in (["line"], ["line", "li"]):  # a stop string of several tokens: streamed, and in a batch
        output = qkflow("generate", str(trained_run), *prompts, *options, "--stop", whole[3:6])
        assert output.startswith("line" + whole[: whole.index(whole[3:6])] + "\n")


BAD_CORPORA = {
    "missing path": ("missing.txt", [], "missing.txt"),
    "empty file": ("empty.txt", [], "empty"),
    "directory without text": ("hollow", [], "hollow"),
    "truncated .gz": ("truncated.txt.gz", [], "truncated.txt.gz"),
    "unknown name": ("enwik9", [], "'enwik8'"),
    "not UTF-8 with BPE": ("latin.txt", ["--tokens", "bpe"], "--tokens bytes"),
    "shorter than the context": ("text.txt", ["--context", "100000"], "--context"),
    "batch larger than the corpus": ("text.txt", ["--batch", "100000"], "batch"),
    "missing field": ("rows.jsonl", ["--field", "body"], "body"),
    "missing device": ("text.txt", ["--device", "cuda"], "cuda"),
}


@pytest.mark.parametrize("case", BAD_CORPORA)
def test_a_bad_corpus_is_refused_with_one_line(usage_error: Command, case: str) -> None:
    write("empty.txt", "")
    Path("hollow").mkdir()
    write("truncated.txt.gz", gzip.compress(Path("text.txt").read_bytes())[:-200])
    write("latin.txt", b"caf\xe9 " * 5000)
    write("rows.jsonl", '{"text": "a row"}\n' * 50)
    source, flags, expected = BAD_CORPORA[case]
    assert expected in usage_error("train", source, "--config", "tiny.json", *flags, "--out", "run")
    assert not Path("run/config.json").exists()


BAD_SETTINGS = {
    "unknown key": ({"stpes": 3}, "'steps'"),
    "unknown model key": ({"model": {"widht": 3}}, "'width'"),
    "wrong type": ({"steps": "many"}, "'steps'"),
    "heads that do not divide the width": ({"model": {"width": 16, "heads": 3, "layers": 1, "hidden": 8}}, "divide"),
    "unknown mechanism": ({"model": {"mechanism": "standart"}}, "'standard'"),
    "unknown mechanism option": ({"model": {"mechanism": "standard:windw=3"}}, "'window'"),
    "unknown size": ({"model": {"size": "2m"}}, "1m"),
    "negative learning rate": ({"lr": -1.0}, "lr"),
    "model that is not a table": ({"model": 3}, "'model'"),
    "size that is not a name": ({"model": {"size": 5}}, "unknown size"),
    "vocabulary that is not a number": ({"model": {"vocabulary": "x"}}, "'vocabulary'"),
    "source that is not a string": ({"data": {"source": 5}}, "'source'"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_a_bad_setting_is_refused_with_one_line(usage_error: Command, case: str) -> None:
    changes, expected = BAD_SETTINGS[case]
    write("bad.json", json.dumps({"steps": 2, "context": 16, "batch": 4, **changes}))
    source = [] if "data" in changes else ["text.txt"]
    assert expected in usage_error("train", *source, "--config", "bad.json", "--out", "run")


BAD_CALLS = {
    "missing config file": (["train", "--config", "none.toml"], "none.toml"),
    "config file of another kind": (["train", "--config", "text.txt"], ".toml"),
    "config file that cannot be parsed": (["train", "--config", "broken.json"], "broken.json"),
    "steps and budget": (["train", "--steps", "3", "--budget", "2m"], "not both"),
    "budget without a unit": (["train", "text.txt", "--config", "no_steps.json", "--budget", "20"], "2m"),
    "resume with another flag": (["train", "--resume", "run", "--lr", "0.1"], "--lr"),
    "resume with a flag of value zero": (["train", "--resume", "run", "--seed", "0"], "--seed"),
    "unknown log": (["train", "text.txt", "--log", "csv,tensorbord"], "'tensorboard'"),
    "resume of a missing run": (["train", "--resume", "nowhere"], "nowhere"),
    "generate from a missing run": (["generate", "nowhere", "hello"], "nowhere"),
    "generate from a directory that is not a run": (["generate", "."], "config.json"),
    "eval of a pickle": (["eval", "hostile.pt"], "pickle"),
    "probe of a missing run": (["probe", "nowhere"], "nowhere"),
    "probe of a directory that is not a run": (["probe", "."], "config.json"),
    "probe of a pickle": (["probe", "hostile.pt"], "pickle"),
    "probe of zero tokens": (["probe", "run", "--tokens", "0"], "at least 1"),
    "check of nothing": (["check"], "give FACTORY"),
    "check of a law without a mechanism": (["check", "--kernels", "--law", "causality"], "give FACTORY"),
    "unknown law": (["check", "standard", "--law", "causalty"], "'causality'"),
    "unknown mechanism": (["check", "diferential"], "'differential'"),
    "missing module": (["check", "no_such_package:Thing"], "no_such_package"),
    "missing attribute": (["check", "qkflow:Thing"], "'Thing'"),
    "module with a syntax error": (["check", "broken_module:Thing"], "broken_module"),
    "heads that do not divide the width": (["check", "standard", "--heads", "5"], "divide"),
    "no width": (["check", "standard", "--width", "0"], "at least 1"),
    "factory of another signature": (["check", "os:system"], "layer=0, layers=1) raised TypeError"),
    "mistyped command": (["trian"], "'train'"),
    "mistyped flag": (["train", "--contxt", "3"], "did you mean --context?"),
    "flag without a value": (["train", "--lr"], "Missing value for argument '--lr'"),
    "word in place of a number": (["train", "text.txt", "--lr", "fast"], "--lr: expected FLOAT, got 'fast'"),
    "unknown choice": (["train", "--optimizer", "mon"], "invalid choice 'mon' for argument '--optimizer'"),
    "too few arguments": (["judge"], "RESULTS"),
    "too many arguments": (["train", "text.txt", "--lr", "1", "2"], "Unrecognized options: 2"),
    "factory of something else": (["check", "builtins:dict"], "cannot build a layer: dict("),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_call_is_refused_with_one_line(usage_error: Command, case: str) -> None:
    write("broken.json", "{")
    write("no_steps.json", tiny(steps=None))
    write("hostile.pt", pickle.dumps({"weights": [1, 2, 3]}))
    write("broken_module.py", "def (")
    args, expected = BAD_CALLS[case]
    assert expected in usage_error(*args)


@pytest.mark.parametrize("command", ["train", "eval", "generate", "probe", "check", "export"])
def test_help_shows_examples_within_80_columns(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    assert exit_info.value.code == 0
    examples = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  qkflow")]
    assert any(line.startswith(f"  qkflow {command} ") for line in examples)
    assert max(map(len, examples)) <= 80


def test_check_prints_every_law_and_fails_if_one_is_broken(qkflow: Command) -> None:
    write(
        "mine.py",
        "import torch\nfrom qkflow import StandardAttention\n\n\nclass Peeking(StandardAttention):\n"
        "    def forward(self, x, state=None, layout=None):\n"
        "        y, state = super().forward(x, state, layout)\n"
        "        return y + torch.roll(x, -1, 1), state\n",
    )
    output = qkflow("check", "mine:Peeking", "--law", "causality", "--law", "state_dict", exit_code=1)
    assert "failed" in output
    assert "t=2, first 1 tokens" in output
    assert "passed" in qkflow("check", "standard:window=3", "--law", "causality")


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")  # torch.compile emits warnings
def test_check_compiles_with_the_backend_asked_for(qkflow: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    backends: list[str] = []
    compile_layer = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **k: backends.append(k["backend"]) or compile_layer(*a, **k))
    assert "passed" in qkflow("check", "standard", "--law", "compilation", "--backend", "eager")
    assert {*backends} == {"eager"}


def test_check_kernels_prints_what_runs_and_fails_if_an_error_is_too_large(
    qkflow: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = qkflow("check", "--kernels").splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:3] == ["delta", "rule", f"{choose_backend(torch.device('cpu'))},"]
    assert build.load_error() is not None or any(line.startswith("compiler ") for line in lines)
    assert {line.split()[-1] for line in lines if " float" in line} == {"ok"}
    failing = KernelCheck(kernel="mine", precision="float64", values=1e-16, gradients=3e-9)
    monkeypatch.setattr(check, "run_kernel_checks", lambda: [failing])
    monkeypatch.setattr(build, "build_info", lambda: None)
    monkeypatch.setattr(build, "load_error", lambda: "QKFLOW_NATIVE is 0")
    output = qkflow("check", "standard", "--kernels", "--law", "causality", exit_code=1)
    assert "none: QKFLOW_NATIVE is 0" in output
    assert ["mine", "float64", "1e-16", "3e-09", "1e-10", "failed"] in [line.split() for line in output.splitlines()]
    assert "passed" in output
