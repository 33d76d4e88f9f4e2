"""`qkflow.lm_eval` gives the scores and texts of the model itself, in any batch."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import random
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from qkflow.data import ByteTokenizer, CorpusConfig, Split
from qkflow.errors import UsageError
from qkflow.hub import export_run
from qkflow.models import Decoder, DecoderConfig, generate
from qkflow.models.generation import Sampling
from qkflow.training import TrainConfig, load_run
from qkflow.training.evaluate import evaluate as evaluate_split
from qkflow.training.run_dir import begin, finish
from qkflow.training.tensors import model_tensors

pytest.importorskip("lm_eval")
qkflow_lm_eval = importlib.import_module("qkflow.lm_eval")

CONTEXT = 24


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with random weights."""
    folder = tmp_path_factory.mktemp("lm_eval") / "run"
    folder.mkdir()
    shape = DecoderConfig(width=16, layers=1, heads=2, hidden=16, mechanism="standard+affine")
    config = TrainConfig(data=CorpusConfig(source="nowhere"), model=shape, steps=1, context=CONTEXT, batch=1)
    torch.manual_seed(0)
    model = Decoder(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    begin(folder, config, {}, ByteTokenizer())
    finish(folder, model_tensors(model))
    return folder


@pytest.fixture(scope="module")
def lm(run: Path) -> Any:
    return qkflow_lm_eval.QKFlowLM(run, batch_size=3, device="cpu")


def request(*args: Any) -> Any:
    """A request of lm-eval."""
    return SimpleNamespace(args=args)


def log_likelihood(run: Path, context: list[int], continuation: list[int]) -> float:
    """The log-likelihood of a continuation in float64, without batching."""
    model = copy.deepcopy(load_run(run).model).double()
    tokens = torch.tensor([*context, *continuation][-CONTEXT - 1 :])
    logs = model(tokens[None, :-1])[0][0].log_softmax(-1)
    scores = logs.gather(1, tokens[1:, None])[-len(continuation) :]
    return float(scores.detach().sum())


def test_a_likelihood_covers_only_the_continuation_in_any_batch(run: Path, lm: Any) -> None:
    pairs = [("ab", "c"), ("", "xyz"), ("é", " ö"), ("a long context that has to be cut", " here"), ("same", "")]
    pairs += [("a b", " c d"), ("a  ", "b")]
    scores = lm.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (score, _) in zip(pairs, scores, strict=True):
        spaces = len(context) - len(context.rstrip())  # lm-eval moves them to the continuation
        moved = context[len(context) - spaces :] + continuation
        before = [256, *context[: len(context) - spaces].encode()]
        expected = log_likelihood(run, before, list(moved.encode())) if moved else 0.0
        assert score == pytest.approx(expected, abs=1e-4)
    assert len({round(score, 3) for score, _ in scores}) == len(pairs)


def test_is_greedy_agrees_with_greedy_decoding(run: Path, lm: Any) -> None:
    prompts = [[256, *b"one"], [256, *b"another"], [256]]
    rows = generate(load_run(run).model, prompts, tokens=6, sampling=Sampling(temperature=0.0))
    likely = list(zip(prompts, rows, strict=True))
    changed = [(prompt, [*row[:3], (row[3] + 1) % 256, *row[4:]]) for prompt, row in likely]
    scores = lm._score([*likely, *changed], disable_tqdm=True)
    assert [greedy for _, greedy in scores] == [True] * 3 + [False] * 3


def test_a_rolling_likelihood_agrees_with_qkflow_eval(run: Path, lm: Any) -> None:
    generator = random.Random(0)
    texts = ["".join(generator.choices("abc ", k=size)) for size in (1, 10, CONTEXT, 3 * CONTEXT)]
    tokens, spans = [256], []
    for text in texts:
        spans.append((len(tokens), len(tokens) + len(text)))
        tokens += [*text.encode(), 256]
    sizes = np.array([len(text) for text in texts])
    split = Split(tokens=np.array(tokens), documents=np.array(spans), sizes=sizes)
    expected = evaluate_split(load_run(run).model, split, context=CONTEXT).documents["nats"]
    results = lm.loglikelihood_rolling([request(text) for text in texts], disable_tqdm=True)
    assert_close([-nats for nats in results], expected.tolist(), rtol=0, atol=1e-4)


def test_the_last_window_of_a_long_text_is_extended_to_the_left(run: Path, lm: Any) -> None:
    text = "a b c d e f g h i j k l m n o p"
    tokens = list(text.encode())
    first = log_likelihood(run, [256], tokens[:CONTEXT])
    rest = log_likelihood(run, tokens[:CONTEXT], tokens[CONTEXT:])
    assert lm.loglikelihood_rolling([request(text)]) == [pytest.approx(first + rest, abs=1e-4)]


def test_generation_stops_at_stop_strings_alone_and_in_batches(run: Path, lm: Any) -> None:
    prompts = ["a", "some words", "x" * 40, "zz"]
    long = {"until": [], "max_gen_toks": 12}
    alone = [lm.generate_until([request(prompt, long)])[0] for prompt in prompts]
    assert lm.generate_until([request(prompt, long) for prompt in prompts]) == alone
    kept = [[256, *b"a"], [256, *b"x" * 40][-CONTEXT // 2 :]]
    short, cut = generate(load_run(run).model, kept, tokens=12, sampling=Sampling(temperature=0.0), stop=[256])
    assert [alone[0], alone[2]] == [bytes(row).decode(errors="replace") for row in (short, cut)]
    position = next(i for i, byte in enumerate(short) if i and byte < 128 and byte not in short[:i])
    stops = {"until": ["nowhere", chr(short[position])], "max_gen_toks": 12, "do_sample": False}
    assert lm.generate_until([request("a", stops)]) == [bytes(short[:position]).decode(errors="replace")]
    ended = [lm.generate_until([request(prompt, stops)])[0] for prompt in prompts]
    together = qkflow_lm_eval.QKFlowLM(run, batch_size=4, device="cpu")
    assert together.generate_until([request(prompt, stops) for prompt in prompts]) == ended
    assert len(set(map(len, ended))) > 1  # one row continues after another has stopped


def test_samples_depend_on_the_seed_and_the_position_and_not_on_the_batch(run: Path, lm: Any) -> None:
    options = {"do_sample": True, "temperature": 1.0, "top_k": 50, "max_gen_toks": 8}
    requests = [request(prompt, options) for prompt in ("a", "a longer one", "a", "a", "b")]
    results = lm.generate_until(requests)
    assert len({results[0], results[2], results[3]}) == 3
    assert qkflow_lm_eval.QKFlowLM(run, batch_size=2, device="cpu").generate_until(requests) == results
    assert lm.generate_until([request("a", {**options, "seed": 3})]) == [results[3]]


def test_an_exported_folder_gives_the_scores_of_its_run(run: Path, lm: Any, tmp_path: Path) -> None:
    folder = export_run(run, tmp_path / "exported")
    exported = qkflow_lm_eval.QKFlowLM(folder, device="cpu", max_length=CONTEXT)
    requests = [request("ab", "cd"), request("", "q")]
    expected = lm.loglikelihood(requests, disable_tqdm=True)
    assert exported.loglikelihood(requests, disable_tqdm=True) == [
        (pytest.approx(nats, abs=1e-5), greedy) for nats, greedy in expected
    ]


def test_lm_eval_tasks_run(run: Path, lm: Any, tmp_path: Path) -> None:
    documents = [{"text": f"{word} is", "choices": ["a", "bb", "c"], "gold": n % 3} for n, word in enumerate("uvwxyz")]
    (tmp_path / "data.json").write_text("\n".join(json.dumps(document) for document in documents))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(tmp_path / "data.json"), "cache_dir": str(tmp_path / "cache")},
        "test_split": "train",
        "doc_to_text": "{{text}}",
    }
    choices = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}"}
    writing = {
        "output_type": "generate_until",
        "doc_to_target": "{{gold}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False},
    }
    rolling = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    tasks = [
        {"task": name, **shared, **more}
        for name, more in (("choosing", choices), ("writing", writing), ("rolling", rolling))
    ]
    results = qkflow_lm_eval.evaluate(run, tasks, limit=4, batch=2, device="cpu")["results"]
    first = documents[:4]
    scores = [
        [lm.loglikelihood([request(d["text"], f" {c}")], disable_tqdm=True)[0][0] for c in d["choices"]] for d in first
    ]
    right = [float(np.argmax(row) == d["gold"]) for row, d in zip(scores, first, strict=True)]
    assert results["choosing"]["acc,none"] == np.mean(right)
    nats = sum(lm.loglikelihood_rolling([request(d["text"])])[0] for d in first)
    size = sum(len(d["text"].encode()) for d in first)
    assert results["rolling"]["bits_per_byte,none"] == pytest.approx(-nats / size / np.log(2), rel=1e-5)
    assert results["writing"]["exact_match,none"] == 0.0


def test_the_documented_command_runs_without_cuda(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "huggingface.md").read_text()
    command = re.search(r"python -m (qkflow\.lm_eval) (run .*?run=)runs/mine (--tasks )blimp", page)
    assert command is not None
    documents = [{"text": f"{word} is", "choices": ["a", "bb"], "gold": 0} for word in "uv"]
    (tmp_path / "data.json").write_text("\n".join(json.dumps(document) for document in documents))
    task = {
        "task": "choosing",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(tmp_path / "data.json"), "cache_dir": str(tmp_path / "cache")},
        "test_split": "train",
        "doc_to_text": "{{text}}",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
    }
    (tmp_path / "choosing.yaml").write_text(json.dumps(task))
    tasks = importlib.import_module("lm_eval.tasks")
    only_mine = functools.partial(tasks.TaskManager, include_defaults=False)  # indexing lm-eval's own takes long
    monkeypatch.setattr(tasks, "TaskManager", only_mine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = f"{command[2]}{run} {command[3]}choosing --include_path {tmp_path}".split()
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words])
    runpy.run_module(command[1], run_name="__main__", alter_sys=False)
    assert re.search(r"\|choosing\|.*\|acc", capsys.readouterr().out)


def test_a_device_that_was_asked_for_is_not_replaced(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    create = qkflow_lm_eval.QKFlowLM.create_from_arg_string
    assert create(f"run={run}", {"device": "cuda:0"}).device.type != "cuda"
    assert create(f"run={run}", {"device": "cpu"}).device.type == "cpu"
    with pytest.raises(UsageError, match="'cuda' is not available"):
        create(f"run={run}", {"device": "cuda"})
    with pytest.raises(UsageError, match="'cuda' is not available"):
        qkflow_lm_eval.QKFlowLM(run, device="cuda:0")


def test_invalid_requests_are_refused(run: Path, lm: Any) -> None:
    with pytest.raises(UsageError, match="a continuation of 30 tokens exceeds max_length 24"):
        lm.loglikelihood([request("a", "b" * 30)], disable_tqdm=True)
    with pytest.raises(UsageError, match="unknown generation option 'temprature': did you mean 'temperature'"):
        lm.generate_until([request("a", {"temprature": 1.0})])
    with pytest.raises(UsageError, match="num_beams is 4"):
        lm.generate_until([request("a", {"num_beams": 4})])
    with pytest.raises(UsageError, match="do_sample is 'false'"):
        lm.generate_until([request("a", {"do_sample": "false"})])
    with pytest.raises(UsageError, match="max_gen_toks must be at least 1, got 0"):
        lm.generate_until([request("a", {"max_gen_toks": 0})])
    with pytest.raises(UsageError, match="unknown device 'gpu'"):
        qkflow_lm_eval.QKFlowLM(run, device="gpu")
    with pytest.raises(UsageError, match="batch_size must be at least 1, got 0"):
        qkflow_lm_eval.QKFlowLM(run, batch_size=0, device="cpu")
    with pytest.raises(UsageError, match="no tasks"):
        qkflow_lm_eval.evaluate(run, [])


def test_the_model_type_is_registered() -> None:
    registry = importlib.import_module("lm_eval.api.registry")
    assert registry.get_model("qkflow") is qkflow_lm_eval.QKFlowLM
    assert registry.get_model("hf") is not None


def test_a_missing_lm_eval_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.models", None)
    for name in [name for name in sys.modules if name.startswith("qkflow.lm_eval")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"pip install 'qkflow\[lm-eval\]'"):
        importlib.import_module("qkflow.lm_eval")
