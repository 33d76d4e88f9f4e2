"""`qkflow train`."""

from __future__ import annotations

import json
import signal
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

import tyro

from qkflow.cli.console import Console
from qkflow.cli.options import (
    command_line,
    flag,
    flags_given,
    new_folder,
    parse_duration,
    with_absolute_paths,
    without_none,
)
from qkflow.cli.progress import TrainProgress
from qkflow.config import from_dict, to_dict
from qkflow.data import Corpus, CorpusConfig, open_corpus
from qkflow.errors import DiskError, DivergenceError, Interrupted, UsageError, unknown
from qkflow.experiment.budget import TOKENS_PER_PARAMETER
from qkflow.experiment.spec import parse_arm
from qkflow.formatting import format_accuracy
from qkflow.io import refuse_special_files
from qkflow.models import SIZES, DecoderConfig, parameters, size
from qkflow.training import Result, TrainConfig, load_run, read_metrics, read_recall, steps_for_budget, train
from qkflow.training.distributed import LostProcessError, Parallel, SingleProcess, is_on_all_ranks, is_torchrun, join
from qkflow.training.loggers import Logger, existing_logs, make_loggers
from qkflow.training.regime import OptimizerName, default_batch, default_regime
from qkflow.training.run_dir import read_config, read_json
from qkflow.training.tensors import model_tensors
from qkflow.training.train import is_restart

if TYPE_CHECKING:
    from qkflow.hub import ModelFolder  # imports the tokenizers library, which other commands do not need

_DEFAULT_BUDGET = "2m"
_FINAL_TOKENS = 1 << 20
"""Tokens of the evaluation after the last step, unless all are asked for."""
_UNDECIDED = 10**9
"""A placeholder for the number of steps until the budget has decided it."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a language model on text or on a recall task, or resume a run.

    For example:
      qkflow train                               two minutes on python-stdlib
      qkflow train my.txt --size 5m --budget 1h  as many steps as an hour allows
      qkflow train enwik8 --mechanism differential --steps 2000 --out runs/diff
      qkflow train my.txt --qk-ratio 20          queries and keys learn faster
      qkflow train mqar --mechanism qdelta       accuracy of associative recall
      qkflow train my.txt --init exported        start from existing weights
      qkflow train my.txt --log tensorboard      curves of the loss in TensorBoard
      qkflow train --resume runs/diff            resume after Ctrl-C or a crash
      torchrun --nproc-per-node 2 -m qkflow train my.txt --out runs/two
    """

    corpus: Annotated[str | None, tyro.conf.Positional, flag("CORPUS", "python-stdlib")] = None
    """A text file or folder, a named corpus (python-stdlib, enwik8, text8, wikitext-103, hf:NAME), or a recall task
    (mqar, s-niah-1, s-niah-2, s-niah-3), with options as in mqar:pairs=4+8."""
    mechanism: Annotated[str | None, flag("NAME", "standard")] = None
    """Attention mechanism, with options as in standard:window=128."""
    size: Annotated[str | None, flag("NAME", "1m")] = None
    """Model size: 100k, 500k, 1m, 5m, 60m, 150m or 350m."""
    steps: Annotated[int | None, flag("N")] = None
    """Optimizer steps. Default: as many as --budget allows."""
    budget: Annotated[str | None, flag("TIME", "2m")] = None
    """Training time, such as 90s, 2m or 1h; converted to steps by a measurement."""
    context: Annotated[int | None, flag("N", "256, or the task's")] = None
    """Context length."""
    batch: Annotated[int | None, flag("N", "4 to 64, by size")] = None
    """Batch size (sequences)."""
    optimizer: Annotated[OptimizerName | None, flag("{muon,adamw}", "muon")] = None
    """Muon for the matrices in blocks and AdamW for the rest, or AdamW for all (the default of tasks and fsdp)."""
    lr: Annotated[float | None, flag("RATE", "by mechanism, size and batch")] = None
    """Peak learning rate."""
    qk_ratio: Annotated[float | None, flag("R", "1")] = None
    """Learning-rate multiplier of queries and keys; same as --mechanism standard:r=20."""
    qk_growth: Annotated[float | None, flag("R")] = None
    """Value that --qk-ratio grows to linearly by the last step."""
    seed: Annotated[int | None, flag("N", "0")] = None
    """Seed of initialization and dropout."""
    data_seed: Annotated[int | None, flag("N", "0")] = None
    """Seed of the batch order."""
    tokens: Annotated[Literal["bytes", "bpe", "gpt2"] | None, flag("{bytes,bpe,gpt2}", "bytes")] = None
    """Tokenizer: bytes, BPE trained on the corpus, or GPT-2's from local files."""
    vocabulary_files: Annotated[str | None, flag("DIR")] = None
    """Folder with GPT-2's two vocabulary files, for --tokens gpt2."""
    field: Annotated[str | None, flag("NAME", "text")] = None
    """Field of .jsonl lines that contains the text."""
    data_dir: Annotated[str | None, flag("DIR")] = None
    """Folder with the files of named corpora."""
    binary: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Accept bytes that are not text, such as UTF-16 or programs."""
    evaluate_all: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """After the last step, evaluate all held-out text, and not a sample of a million tokens."""
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"] | None, flag("{auto,cpu,cuda,mps}", "auto")] = None
    """Device."""
    compile: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Compile the model with torch.compile."""
    parallel: Annotated[Parallel | None, flag("{ddp,fsdp}", "ddp")] = None
    """Under torchrun: whole models (ddp) or sharded parameters (fsdp)."""
    init: Annotated[Path | None, flag("FOLDER")] = None
    """Start from the model and tokenizer of an exported folder or a run."""
    config: Annotated[Path | None, flag("FILE")] = None
    """TOML or JSON file with settings of the run; flags override it."""
    out: Annotated[Path | None, flag("RUN", "a new one in runs/")] = None
    """Run folder."""
    log: Annotated[str | None, flag("{csv,tensorboard}")] = None
    """Also write the metrics as metrics.csv, or for TensorBoard, in the run folder; both: csv,tensorboard."""
    resume: Annotated[Path | None, flag("RUN")] = None
    """Resume the run in this folder, with its logs; no other flags are needed."""

    def run(self) -> int:
        """Train and show progress; with several processes, on rank 0 only."""
        try:
            with join(self.parallel) as group:
                return self._run_quietly(group)
        except LostProcessError as error:
            Console(stderr=True, soft_wrap=True).print(f"qkflow: {error}", style="red", markup=False)
            return 1

    def _run_quietly(self, group: SingleProcess) -> int:
        """Errors that all ranks raise are printed by rank 0 only."""
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
        progress = TrainProgress(console)
        with group.raise_on_all_ranks():
            loggers = self._loggers(progress.on_notice)
        if self.parallel is not None and group.size == 1:
            progress.on_notice(f"--parallel {self.parallel} has no effect: it is for processes started by torchrun")
        try:
            if self.resume is not None:
                with group.raise_on_all_ranks():
                    if flags := flags_given(self, exclude=("resume", "parallel", "log")):
                        raise UsageError(f"--resume uses the settings of the run: omit {flags}")
                config, folder, weights = None, self.resume, None
            else:
                with group.raise_on_all_ranks():
                    if self.out is None and (is_torchrun() or group.size > 1):  # a restart must find the run folder
                        raise UsageError("torchrun may restart this command, which then resumes its run: use --out RUN")
                    initial = None if self.init is None else read_initial(self.init)
                    config = self._config(initial)
                    folder, weights = self._folder(config), None if initial is None else initial.weights
                    budget = parse_duration(self.budget or _DEFAULT_BUDGET)
                if config.steps == _UNDECIDED and self.steps is None:
                    config = self._with_steps(config, budget, folder, group, console)
            result = train(
                config,
                folder,
                callbacks=[progress, *loggers],
                resume=self.resume is not None,
                command=command_line(),
                initial=weights,
                parallel=self.parallel,
            )
        finally:
            progress.close()
        if result.was_finished and group.is_main:  # training has not called them
            for logger in loggers:
                logger.write(result.folder)
        progress.say(f"held-out {_improvement(result)}; saved in {result.folder}")
        return 0

    def _loggers(self, notify: Callable[[str], None]) -> list[Logger]:
        """The loggers that were asked for, and those of the run that is resumed, if their packages are installed."""
        loggers = {} if self.log is None else make_loggers(self.log)
        folder = self.resume or self.out  # torchrun may restart a run in --out
        for kind in [] if folder is None else existing_logs(folder):
            try:
                loggers = make_loggers(kind) | loggers
            except UsageError as error:
                notify(f"the log {kind} of {folder} is not continued: {error}")
        return list(loggers.values())

    def _config(self, initial: ModelFolder | None) -> TrainConfig:
        """Combine flags, the config file and defaults, in this order of precedence; the vocabulary is the corpus's."""
        if self.steps is not None and self.budget is not None:
            raise UsageError("use either --steps or --budget, not both")
        settings = {} if self.config is None else read_settings(self.config)
        corpus = _table(settings, "data") | without_none(
            source=self.corpus,
            tokens=self.tokens,
            vocabulary_files=self.vocabulary_files,
            field=self.field,
            data_dir=self.data_dir,
            binary=self.binary or None,
        )
        model = _table(settings, "model")
        if initial is not None:
            corpus |= self._tokenizer_settings(initial, corpus, model)
        spec, ratio = (None, {}) if self.mechanism is None else self._arm(self.mechanism)
        shape = without_none(size=self.size, mechanism=spec)
        named = model.pop("size", "1m")
        if "size" in shape:  # a named size replaces the shape in the file
            named = shape.pop("size")
            model = {name: value for name, value in model.items() if name not in ("width", "layers", "heads", "hidden")}
        if not isinstance(named, str):
            raise unknown("size", named, SIZES)
        corpus_config = with_absolute_paths(from_dict(CorpusConfig, corpus, where=" in 'corpus'"))
        opened = open_corpus(corpus_config)
        if initial is not None:
            _check_tokenizer(initial, opened)
        model.setdefault("vocabulary", opened.vocabulary)
        if opened.context is not None:
            settings.setdefault("context", opened.context)
        if initial is None:
            decoder = from_dict(DecoderConfig, {**to_dict(size(named)), **model, **shape})
        else:
            decoder = initial.config
        flags = without_none(
            steps=self.steps,
            context=self.context,
            batch=self.batch,
            optimizer=self.optimizer,
            lr=self.lr,
            qk_ratio=self.qk_ratio,
            qk_growth=self.qk_growth,
            seed=self.seed,
            data_seed=self.data_seed,
            device=self.device,
            compile=self.compile or None,
        )
        flags |= ratio
        if self.evaluate_all:
            flags["final_tokens"] = None
        if opened.task is None:
            settings.setdefault("final_tokens", _FINAL_TOKENS)
            settings = self._regime(decoder, {**settings, **flags}) | settings
        if self.steps is None and self.budget is not None:
            flags["steps"] = _UNDECIDED
        return from_dict(
            TrainConfig, {"steps": _UNDECIDED, **settings, **flags, "data": corpus_config, "model": decoder}
        )

    def _regime(self, model: DecoderConfig, given: dict[str, Any]) -> dict[str, Any]:
        """The defaults for text, given the settings that are fixed."""
        count, context = parameters(model), int(given.get("context", TrainConfig.context))
        optimizer = given.get("optimizer", "adamw" if self.parallel == "fsdp" else "muon")
        batch = int(given.get("batch", default_batch(TOKENS_PER_PARAMETER * count, context)))
        if optimizer not in get_args(OptimizerName):
            return {}
        regime = default_regime(
            parameters=count, batch=batch, context=context, mechanism=model.mechanisms[0], optimizer=optimizer
        )
        return {**asdict(regime), "schedule": "stable"}

    def _with_steps(
        self, config: TrainConfig, budget: float, folder: Path, group: SingleProcess, console: Console
    ) -> TrainConfig:
        """The config with the number of steps that fit into the budget; after a restart, that of the run."""
        steps, text = 0, self.budget or _DEFAULT_BUDGET
        if is_restart(folder, group):
            with group.raise_on_all_ranks():
                steps = read_config(folder).steps
        else:
            with console.status(f"measuring how many steps fit into {text}"):
                steps = steps_for_budget(config, budget, parallel=self.parallel)
            console.print(f"budget  {text}: {steps:,} steps on this machine", highlight=False)
        return replace(config, steps=steps, warmup=None if config.warmup is None else min(config.warmup, steps))

    def _tokenizer_settings(
        self, initial: ModelFolder, corpus: dict[str, Any], model: dict[str, Any]
    ) -> dict[str, str]:
        """The corpus settings that select the tokenizer of the initial weights; flags must not contradict them."""
        if model or self.size is not None or self.mechanism is not None:
            raise UsageError(f"--init uses the model of {self.init}: omit --size, --mechanism and 'model'")
        if initial.tokenizer is None or initial.tokenizer.kind == "words":  # a task has its own words
            return {}
        if {"tokens", "vocabulary_files"} & corpus.keys():
            raise UsageError(f"--init uses the tokenizer of {self.init}: omit --tokens")
        if initial.tokenizer.kind == "bytes":
            return {"tokens": "bytes"}
        return {"tokens": "saved", "vocabulary_files": str(self.init)}

    def _arm(self, name: str) -> tuple[str, dict[str, float | None]]:
        """The mechanism and the ratio in its name, which the flags must not set as well."""
        spec, ratio, _ = parse_arm(name)
        if ratio.is_identity:
            return spec, {}
        if self.qk_ratio is not None or self.qk_growth is not None:
            raise UsageError(f"--mechanism {name} sets a ratio already: omit --qk-ratio and --qk-growth")
        return spec, {"qk_ratio": ratio.start, "qk_growth": ratio.end}

    def _folder(self, config: TrainConfig) -> Path:
        if self.out is not None:
            return self.out
        stem = "-".join(dict.fromkeys(cast(DecoderConfig, config.model).mechanisms))
        if not config.ratio.is_identity:
            stem += f"-r={config.qk_ratio:g}" + ("" if config.qk_growth is None else f"-growth={config.qk_growth:g}")
        return new_folder(f"{stem}-seed{config.seed}")


def read_initial(folder: Path) -> ModelFolder:
    """Read the model of an exported folder, or the final weights or latest checkpoint of a run."""
    from qkflow.hub.load import ModelFolder, read_folder

    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json: --init needs a run folder or a folder made by `qkflow export`")
    if "model_type" in read_json(folder / "config.json"):
        return read_folder(folder)
    run = load_run(folder)
    weights = model_tensors(run.model)
    return ModelFolder(path=folder, config=run.model.config, weights=weights, tokenizer=run.tokenizer)


def _check_tokenizer(initial: ModelFolder, corpus: Corpus) -> None:
    own = initial.tokenizer
    if own is not None and own.to_json() != corpus.tokenizer.to_json():
        raise UsageError(
            f"the model of --init has {own.vocabulary:,} tokens of kind {own.kind!r}, but {corpus.name} has"
            f" {corpus.vocabulary:,} of kind {corpus.tokenizer.kind!r}: use data with the same tokenizer, or"
            " train a new model"
        )


def _improvement(result: Result) -> str:
    """The main result before the first step and after the last."""
    records = read_metrics(result.folder / "metrics.jsonl")
    before = next(record for record in records if record["kind"] == "eval")
    if (recall := read_recall(result.folder)) is None:
        return f"bits per byte: {before['bits_per_byte']:.3f} before, {result.metrics['bits_per_byte']:.3f} after"
    accuracy = (
        f"accuracy: {format_accuracy(before['accuracy'])} before, {format_accuracy(result.metrics['accuracy'])} after"
    )
    return f"{accuracy} (chance {format_accuracy(recall.task['chance'])})"


def read_settings(path: Path) -> dict[str, Any]:
    """A config file as plain data."""
    if not path.is_dir():
        refuse_special_files(path)
    if not path.is_file():
        raise UsageError(f"config file {path} does not exist: expected a .toml or .json file")
    if path.suffix not in (".json", ".toml"):
        raise UsageError(f"a config file must end in .toml or .json, got {path}")
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} must contain a table of settings, got {type(value).__name__}")
    return value


def _table(settings: dict[str, Any], name: str) -> dict[str, Any]:
    table = settings.pop(name, {})
    if not isinstance(table, dict):
        raise UsageError(f"config key {name!r} must be a table of settings, got {table!r}")
    return dict(table)
