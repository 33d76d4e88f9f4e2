"""`qkflow train`."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from qkflow.cli.options import command_line, findable, flag, flags_given, given, new_folder, seconds
from qkflow.cli.progress import Watch
from qkflow.cli.recall_table import percent
from qkflow.configs import from_dict, to_dict
from qkflow.data import CorpusConfig, open_corpus
from qkflow.errors import UsageError, unknown
from qkflow.models import SIZES, DecoderConfig, size
from qkflow.study.arm import parse_arm
from qkflow.training import Result, TrainConfig, read_metrics, read_recall, steps_for_budget, train

_DEFAULT_BUDGET = "2m"
_OPEN = 10**9
"""Stands for the number of steps until the budget has decided it."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a language model on a text or a task, and resume where it stopped.

    For example:
      qkflow train                               two minutes on Python's own library
      qkflow train my.txt --size 5m --budget 1h  as many steps as an hour allows
      qkflow train enwik8 --mechanism differential --steps 2000 --out runs/diff
      qkflow train my.txt --qk-ratio 20          queries and keys learn faster
      qkflow train mqar --mechanism qdelta       recall of many pairs, in accuracy
      qkflow train --resume runs/diff            after Ctrl-C, a crash, a power cut
    """

    corpus: Annotated[str | None, tyro.conf.Positional, flag("CORPUS", "python-stdlib")] = None
    """A file or folder of text, or a name: python-stdlib, enwik8, text8, wikitext-103, hf:NAME; or a task: mqar,
    s-niah-1, s-niah-2, s-niah-3, as in mqar:pairs=4+8."""
    mechanism: Annotated[str | None, flag("NAME", "standard")] = None
    """The mechanism, as in standard:window=128."""
    size: Annotated[str | None, flag("NAME", "1m")] = None
    """100k, 500k, 1m, 5m, 60m, 150m or 350m."""
    steps: Annotated[int | None, flag("N")] = None
    """Optimiser steps. Without them, --budget."""
    budget: Annotated[str | None, flag("TIME", "2m")] = None
    """Time to train for, such as 90s, 2m or 1h: measured first, then frozen as steps."""
    context: Annotated[int | None, flag("N", "256, or the task's")] = None
    """Tokens a window."""
    batch: Annotated[int | None, flag("N", "32")] = None
    """Windows a step."""
    lr: Annotated[float | None, flag("RATE", "0.003")] = None
    """Highest learning rate."""
    qk_ratio: Annotated[float | None, flag("R", "1")] = None
    """How many times as fast queries and keys learn; --mechanism standard:r=20 says the same."""
    qk_growth: Annotated[float | None, flag("R")] = None
    """What that ratio grows to by the end, on a straight line."""
    seed: Annotated[int | None, flag("N", "0")] = None
    """Initialisation."""
    data_seed: Annotated[int | None, flag("N", "0")] = None
    """Order of the batches."""
    tokens: Annotated[Literal["bytes", "bpe", "gpt2"] | None, flag("{bytes,bpe,gpt2}", "bytes")] = None
    """Bytes, BPE trained on the corpus, or GPT-2's from local files."""
    vocabulary_files: Annotated[str | None, flag("DIR")] = None
    """Where GPT-2's two vocabulary files lie, for --tokens gpt2."""
    field: Annotated[str | None, flag("NAME", "text")] = None
    """The field of .jsonl lines that holds the text."""
    data_dir: Annotated[str | None, flag("DIR")] = None
    """Where named corpora lie."""
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"] | None, flag("{auto,cpu,cuda,mps}", "auto")] = None
    """Where to compute."""
    compile: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Compile the model first."""
    config: Annotated[Path | None, flag("FILE")] = None
    """A TOML or JSON file with any of a run's settings; flags come before it."""
    out: Annotated[Path | None, flag("RUN", "a new one in runs/")] = None
    """The run's folder."""
    resume: Annotated[Path | None, flag("RUN")] = None
    """Go on with the run in this folder; nothing else is needed."""

    def run(self) -> int:
        """Train, showing how it goes."""
        console = Console()
        watch = Watch(console)
        try:
            if self.resume is not None:
                self._refuse_others()
                result = train(None, self.resume, callbacks=[watch], resume=True, command=command_line())
            else:
                config = self._config(console)
                result = train(config, self._folder(config), callbacks=[watch], command=command_line())
        finally:
            watch.close()
        watch.say(f"held-out {_gain(result)}; saved in {result.folder}")
        return 0

    def _refuse_others(self) -> None:
        if flags := flags_given(self, but=("resume",)):
            raise UsageError(f"--resume goes on with the run as it was begun: leave out {flags}")

    def _config(self, console: Console) -> TrainConfig:
        """Flags over file over defaults; then the vocabulary from the corpus, and the steps from the budget."""
        if self.steps is not None and self.budget is not None:
            raise UsageError("give --steps or --budget, not both")
        settings = {} if self.config is None else read_settings(self.config)
        corpus = _table(settings, "corpus") | given(
            source=self.corpus,
            tokens=self.tokens,
            vocabulary_files=self.vocabulary_files,
            field=self.field,
            data_dir=self.data_dir,
        )
        model = _table(settings, "model")
        spec, ratio = (None, {}) if self.mechanism is None else self._arm(self.mechanism)
        shape = given(size=self.size, mechanism=spec)
        named = model.pop("size", "1m")
        if "size" in shape:  # a size that is asked for by name is whole: the file's shape makes way for it
            named = shape.pop("size")
            model = {name: value for name, value in model.items() if name not in ("width", "layers", "heads", "hidden")}
        if not isinstance(named, str):
            raise unknown("size", named, SIZES)
        corpus_config = findable(from_dict(CorpusConfig, corpus, where=" in 'corpus'"))
        opened = open_corpus(corpus_config)
        model.setdefault("vocabulary", opened.vocabulary)
        if opened.context is not None:
            settings.setdefault("context", opened.context)
        model = {**to_dict(size(named)), **model, **shape}
        flags = given(
            steps=self.steps,
            context=self.context,
            batch=self.batch,
            lr=self.lr,
            qk_ratio=self.qk_ratio,
            qk_growth=self.qk_growth,
            seed=self.seed,
            data_seed=self.data_seed,
            device=self.device,
            compile=self.compile or None,
        )
        flags |= ratio
        timed = self.steps is None and (self.budget is not None or "steps" not in settings)
        config = from_dict(
            TrainConfig,
            {"steps": _OPEN, **settings, **flags, "corpus": corpus_config, "model": from_dict(DecoderConfig, model)},
        )
        if not timed:
            return config
        budget = self.budget or _DEFAULT_BUDGET
        with console.status(f"measuring how many steps fit into {budget}"):
            steps = steps_for_budget(config, seconds(budget))
        console.print(f"budget  {budget}: {steps:,} steps on this machine", highlight=False)
        return replace(config, steps=steps, warmup=None if config.warmup is None else min(config.warmup, steps))

    def _arm(self, name: str) -> tuple[str, dict[str, float | None]]:
        """The mechanism, and the ratio that may be written with it: the flags have to leave it alone then."""
        spec, ratio = parse_arm(name)
        if ratio.plain:
            return spec, {}
        if self.qk_ratio is not None or self.qk_growth is not None:
            raise UsageError(f"--mechanism {name} has a ratio already: leave out --qk-ratio and --qk-growth")
        return spec, {"qk_ratio": ratio.start, "qk_growth": ratio.end}

    def _folder(self, config: TrainConfig) -> Path:
        if self.out is not None:
            return self.out
        stem = "-".join(dict.fromkeys(config.model.mechanisms))
        if not config.ratio.plain:
            stem += f"-r={config.qk_ratio:g}" + ("" if config.qk_growth is None else f"-growth={config.qk_growth:g}")
        return new_folder(re.sub(r"[^\w.=-]+", "_", stem) + f"-seed{config.seed}")


def _gain(result: Result) -> str:
    """The figure that counts, before the first step and after the last."""
    records = read_metrics(result.folder / "metrics.jsonl")
    before = next(record for record in records if record["kind"] == "eval")
    if (recall := read_recall(result.folder)) is None:
        return f"bits per byte: {before['bits_per_byte']:.3f} before, {result.metrics['bits_per_byte']:.3f} after"
    told = f"accuracy: {percent(before['accuracy'])} before, {percent(result.metrics['accuracy'])} after"
    return f"{told} (chance {percent(recall.task['chance'])})"


def read_settings(path: Path) -> dict[str, Any]:
    """A config file as plain data."""
    if not path.is_file():
        raise UsageError(f"there is no config file {path}: give the path of a .toml or .json file")
    try:
        if path.suffix == ".json":
            value = json.loads(path.read_text())
        elif path.suffix == ".toml":
            value = tomllib.loads(path.read_text())
        else:
            raise UsageError(f"a config file ends in .toml or .json, got {path}")
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} must hold a table of settings, got {type(value).__name__}")
    return value


def _table(settings: dict[str, Any], name: str) -> dict[str, Any]:
    table = settings.pop(name, {})
    if not isinstance(table, dict):
        raise UsageError(f"config key {name!r} must be a table of settings, got {table!r}")
    return dict(table)
