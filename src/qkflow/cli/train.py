"""`qkflow train`."""

from __future__ import annotations

import json
import re
import signal
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import tyro
from rich.console import Console

from qkflow.cli.initial import Initial, read_initial
from qkflow.cli.options import (
    command_line,
    flag,
    flags_given,
    new_folder,
    parse_duration,
    with_absolute_paths,
    without_none,
)
from qkflow.cli.progress import Watch
from qkflow.cli.recall_table import percent
from qkflow.config import from_dict, to_dict
from qkflow.data import CorpusConfig, open_corpus
from qkflow.errors import DiskError, DivergenceError, Interrupted, UsageError, unknown
from qkflow.experiment.spec import parse_arm
from qkflow.models import SIZES, DecoderConfig, size
from qkflow.training import Result, TrainConfig, read_metrics, read_recall, steps_for_budget, train
from qkflow.training.distributed import LostProcessError, Parallel, SingleProcess, is_on_all_ranks, is_torchrun, join
from qkflow.training.run_dir import read_config
from qkflow.training.train import is_restart

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
      qkflow train my.txt --init exported        go on from weights that are there
      qkflow train --resume runs/diff            after Ctrl-C, a crash, a power cut
      torchrun --nproc-per-node 2 -m qkflow train my.txt --out runs/two
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
    parallel: Annotated[Parallel | None, flag("{ddp,fsdp}", "ddp")] = None
    """How the processes that torchrun starts share a model: each has all of it, or a part of each parameter."""
    init: Annotated[Path | None, flag("FOLDER")] = None
    """Begin with the weights of an exported folder or of a run: its shape, its tokens."""
    config: Annotated[Path | None, flag("FILE")] = None
    """A TOML or JSON file with any of a run's settings; flags come before it."""
    out: Annotated[Path | None, flag("RUN", "a new one in runs/")] = None
    """The run's folder."""
    resume: Annotated[Path | None, flag("RUN")] = None
    """Go on with the run in this folder; nothing else is needed."""

    def run(self) -> int:
        """Train, showing how it goes; of several processes, the first one does."""
        try:
            with join(self.parallel) as group:
                return self._spoken_for(group)
        except LostProcessError as error:
            Console(stderr=True, soft_wrap=True).print(f"qkflow: {error}", style="red", markup=False)
            return 1

    def _spoken_for(self, group: SingleProcess) -> int:
        """Leave what all processes know for the first one to say."""
        try:
            return self._run(group)
        except (UsageError, DiskError, DivergenceError, Interrupted) as error:
            if group.is_main or not is_on_all_ranks(error):
                raise
            return 128 + error.signal if isinstance(error, Interrupted) else 1
        except KeyboardInterrupt:
            if group.is_main:
                raise
            return 128 + signal.SIGINT

    def _run(self, group: SingleProcess) -> int:
        console = Console(quiet=not group.is_main)
        watch = Watch(console)
        if self.parallel is not None and group.size == 1:
            watch.on_notice(
                f"--parallel {self.parallel} is for the processes that torchrun starts, and this is one alone"
            )
        try:
            if self.resume is not None:
                with group.raise_on_all_ranks():
                    self._refuse_others()
                config, folder, weights = None, self.resume, None
            else:
                with group.raise_on_all_ranks():
                    self._refuse_restless(group)
                    begun = None if self.init is None else read_initial(self.init)
                    config = self._config(begun)
                    folder, weights = self._folder(config), None if begun is None else begun.weights
                    budget = parse_duration(self.budget or _DEFAULT_BUDGET)
                if config.steps == _OPEN and self.steps is None:
                    config = self._timed(config, budget, folder, group, console)
            result = train(
                config,
                folder,
                callbacks=[watch],
                resume=self.resume is not None,
                command=command_line(),
                initial=weights,
                parallel=self.parallel,
            )
        finally:
            watch.close()
        watch.say(f"held-out {_gain(result)}; saved in {result.folder}")
        return 0

    def _refuse_others(self) -> None:
        if flags := flags_given(self, exclude=("resume", "parallel")):
            raise UsageError(f"--resume goes on with the run as it was begun: leave out {flags}")

    def _refuse_restless(self, group: SingleProcess) -> None:
        """A command that torchrun may start again has to find its folder again."""
        if self.out is None and (is_torchrun() or group.size > 1):
            raise UsageError("torchrun may start this command again, and then it goes on with its run: give --out RUN")

    def _config(self, begun: Initial | None) -> TrainConfig:
        """Flags over file over defaults; then the vocabulary from the corpus. Steps that a budget decides stay open."""
        if self.steps is not None and self.budget is not None:
            raise UsageError("give --steps or --budget, not both")
        settings = {} if self.config is None else read_settings(self.config)
        corpus = _table(settings, "data") | without_none(
            source=self.corpus,
            tokens=self.tokens,
            vocabulary_files=self.vocabulary_files,
            field=self.field,
            data_dir=self.data_dir,
        )
        model = _table(settings, "model")
        if begun is not None:
            corpus |= self._tokens(begun, corpus, model)
        spec, ratio = (None, {}) if self.mechanism is None else self._arm(self.mechanism)
        shape = without_none(size=self.size, mechanism=spec)
        named = model.pop("size", "1m")
        if "size" in shape:  # a size that is asked for by name is whole: the file's shape makes way for it
            named = shape.pop("size")
            model = {name: value for name, value in model.items() if name not in ("width", "layers", "heads", "hidden")}
        if not isinstance(named, str):
            raise unknown("size", named, SIZES)
        corpus_config = with_absolute_paths(from_dict(CorpusConfig, corpus, where=" in 'corpus'"))
        validate_input = open_corpus(corpus_config)
        if begun is not None:
            begun.refuse_others(validate_input)
        model.setdefault("vocabulary", validate_input.vocabulary)
        if validate_input.context is not None:
            settings.setdefault("context", validate_input.context)
        whole = from_dict(DecoderConfig, {**to_dict(size(named)), **model, **shape}) if begun is None else begun.model
        flags = without_none(
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
        if self.steps is None and self.budget is not None:
            flags["steps"] = _OPEN
        return from_dict(TrainConfig, {"steps": _OPEN, **settings, **flags, "data": corpus_config, "model": whole})

    def _timed(
        self, config: TrainConfig, budget: float, folder: Path, group: SingleProcess, console: Console
    ) -> TrainConfig:
        """The config with as many steps as the budget allows; started again by torchrun, with those it began with."""
        steps, told = 0, self.budget or _DEFAULT_BUDGET
        if is_restart(folder, group):
            with group.raise_on_all_ranks():
                steps = read_config(folder).steps
        else:
            with console.status(f"measuring how many steps fit into {told}"):
                steps = steps_for_budget(config, budget, parallel=self.parallel)
            console.print(f"budget  {told}: {steps:,} steps on this machine", highlight=False)
        return replace(config, steps=steps, warmup=None if config.warmup is None else min(config.warmup, steps))

    def _tokens(self, begun: Initial, corpus: dict[str, Any], model: dict[str, Any]) -> dict[str, str]:
        """How the corpus becomes tokens that weights which are given know; nothing may say otherwise."""
        if model or self.size is not None or self.mechanism is not None:
            raise UsageError(
                f"--init takes the model of {self.init} as it is: leave out --size, --mechanism and 'model'"
            )
        if begun.tokens and {"tokens", "vocabulary_files"} & corpus.keys():
            raise UsageError(f"--init reads the corpus with the tokens of {self.init}: leave out --tokens")
        return begun.tokens

    def _arm(self, name: str) -> tuple[str, dict[str, float | None]]:
        """The mechanism, and the ratio that may be written with it: the flags have to leave it alone then."""
        spec, ratio, _ = parse_arm(name)
        if ratio.is_identity:
            return spec, {}
        if self.qk_ratio is not None or self.qk_growth is not None:
            raise UsageError(f"--mechanism {name} has a ratio already: leave out --qk-ratio and --qk-growth")
        return spec, {"qk_ratio": ratio.start, "qk_growth": ratio.end}

    def _folder(self, config: TrainConfig) -> Path:
        if self.out is not None:
            return self.out
        stem = "-".join(dict.fromkeys(cast(DecoderConfig, config.model).mechanisms))
        if not config.ratio.is_identity:
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
