"""`qkflow compare`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from qkflow.cli.options import (
    command_line,
    flag,
    flags_given,
    new_folder,
    parse_duration,
    parse_numbers,
    with_absolute_paths,
    without_none,
)
from qkflow.cli.studies import conduct
from qkflow.data import CorpusConfig
from qkflow.errors import UsageError
from qkflow.experiment.executors.base import make_executor
from qkflow.experiment.extension import extend
from qkflow.experiment.spec import ExperimentSpec
from qkflow.mechanisms import mechanisms


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Find out whether a mechanism helps on a text or a task: matched arms, several seeds, one page with the answer.

    For example:
      qkflow compare my.txt                        every mechanism, ten minutes
      qkflow compare my.txt --arms standard,differential --budget 2h
      qkflow compare my.txt --arms standard,coupled,differential+affine
      qkflow compare enwik8 --arms standard,standard:window=64 --match seconds
      qkflow compare mqar:pairs=4+8+16 --arms standard,qdelta   recall, by number of pairs
      qkflow compare --resume runs/study           after Ctrl-C, a crash, a power cut
      qkflow compare --extend runs/study --seeds 10  more seeds, the same error rate
    """

    corpus: Annotated[str | None, tyro.conf.Positional, flag("CORPUS", "python-stdlib")] = None
    """A file or folder of text, or a name: python-stdlib, enwik8, text8, wikitext-103, hf:NAME; or a task: mqar,
    s-niah-1, s-niah-2, s-niah-3, as in mqar:pairs=4+8."""
    arms: Annotated[str | None, flag("A,B,...", "all mechanisms")] = None
    """Mechanisms, the baseline first, as in standard,differential:window=64."""
    budget: Annotated[str | None, flag("TIME", "10m")] = None
    """Time for the whole study, such as 3m, 2h or 3d: size, tokens and seeds are chosen to fit."""
    seeds: Annotated[int | None, flag("N", "what fits, 2 to 10")] = None
    """Runs of each arm."""
    match: Annotated[Literal["tokens", "flops", "seconds"] | None, flag("{tokens,flops,seconds}", "tokens")] = None
    """What the arms have in common besides their number of parameters."""
    size: Annotated[str | None, flag("NAME", "what fits")] = None
    """100k, 500k, 1m, 5m, 60m, 150m or 350m parameters."""
    train_tokens: Annotated[str | None, flag("N", "what fits")] = None
    """Training tokens of a run, such as 2M. With --seeds and --size nothing is left to the budget."""
    rates: Annotated[str | None, flag("LR,LR,...", "0.003")] = None
    """Learning rates: with several, each arm is tuned over all of them first."""
    context: Annotated[int | None, flag("N", "128 or 256, or the task's")] = None
    """Tokens a window."""
    batch: Annotated[int | None, flag("N", "16 or 32")] = None
    """Windows a step."""
    margin: Annotated[float | None, flag("PART", "0.005")] = None
    """Differences within this part of the baseline's loss count as equivalent."""
    passes: Annotated[float | None, flag("N", "4")] = None
    """How often the text may be read, at most."""
    engine: Annotated[Literal["local", "ray"] | None, flag("{local,ray}", "local")] = None
    """Processes of this machine, or a Ray cluster."""
    ray_address: Annotated[str | None, flag("ADDRESS")] = None
    """The Ray cluster; without it, RAY_ADDRESS, or one on this machine."""
    jobs: Annotated[int | None, flag("N", "one a core")] = None
    """Runs at a time."""
    threads: Annotated[int | None, flag("N", "1")] = None
    """CPU threads of each run."""
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"] | None, flag("{auto,cpu,cuda,mps}", "auto")] = None
    """Where to compute."""
    tokens: Annotated[Literal["bytes", "bpe", "gpt2"] | None, flag("{bytes,bpe,gpt2}", "bytes")] = None
    """Bytes, BPE trained on the corpus, or GPT-2's from local files."""
    vocabulary_files: Annotated[str | None, flag("DIR")] = None
    """Where GPT-2's two vocabulary files lie, for --tokens gpt2."""
    field: Annotated[str | None, flag("NAME", "text")] = None
    """The field of .jsonl lines that holds the text."""
    data_dir: Annotated[str | None, flag("DIR")] = None
    """Where named corpora lie."""
    out: Annotated[Path | None, flag("STUDY", "a new one in runs/")] = None
    """The study's folder; one that holds this very study is continued."""
    resume: Annotated[Path | None, flag("STUDY")] = None
    """Go on with the study in this folder; nothing else is needed."""
    extend: Annotated[Path | None, flag("STUDY")] = None
    """Begin a new study that keeps this one's runs and adds seeds to them."""

    def run(self) -> int:
        """Run the study, then show and write what it found."""
        console = Console()
        where = make_executor(self.engine or "local", address=self.ray_address)
        if self.resume is not None:
            self._refuse("--resume goes on with the study as it was begun", but=("resume",))
            conduct(None, self.resume, engine=where, console=console)
        elif self.extend is not None:
            self._refuse("--extend keeps the design of the study", but=("extend", "seeds", "out"))
            if self.seeds is None:
                raise UsageError("--extend needs the number of seeds in all: give --seeds N")
            request = extend(self.extend, seeds=self.seeds)
            conduct(request, self._folder(), engine=where, console=console, command=command_line())
        else:
            conduct(self._request(), self._folder(), engine=where, console=console, command=command_line())
        return 0

    def _refuse(self, why: str, but: tuple[str, ...]) -> None:
        if flags := flags_given(self, exclude=(*but, "engine", "ray_address")):
            raise UsageError(f"{why}: leave out {flags}")

    def _request(self) -> ExperimentSpec:
        corpus = without_none(
            source=self.corpus,
            tokens=self.tokens,
            vocabulary_files=self.vocabulary_files,
            field=self.field,
            data_dir=self.data_dir,
        )
        return ExperimentSpec(
            corpus=with_absolute_paths(CorpusConfig(**corpus)),
            arms=all_arms() if self.arms is None else split_arms(self.arms),
            **without_none(
                match=self.match,
                budget=None if self.budget is None else parse_duration(self.budget),
                size=self.size,
                tokens=None if self.train_tokens is None else count(self.train_tokens),
                seeds=self.seeds,
                learning_rates=None if self.rates is None else parse_numbers(self.rates, "--rates", "1e-3,3e-3"),
                context=self.context,
                batch=self.batch,
                margin=self.margin,
                passes=self.passes,
                jobs=self.jobs,
                threads=self.threads,
                device=self.device,
            ),
        )

    def _folder(self) -> Path:
        if self.out is not None:
            return self.out
        if self.extend is not None:
            return new_folder(f"{self.extend.name}-extended", parent=self.extend.parent)
        return new_folder(re.sub(r"[^\w.=-]+", "_", f"compare-{Path(self.corpus or 'python-stdlib').name}"))


def all_arms() -> tuple[str, ...]:
    """Every registered mechanism, standard first: it is the baseline."""
    return ("standard", *sorted(name for name in mechanisms() if name != "standard"))


def split_arms(text: str) -> tuple[str, ...]:
    """Arms from a list with commas, which may also stand between the settings of one arm.

    >>> split_arms("standard, differential:window=64,qk_norm=true,standard:window=8")
    ('standard', 'differential:window=64,qk_norm=true', 'standard:window=8')
    """
    arms: list[str] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if arms and "=" in piece and ":" not in piece.split("=")[0]:
            arms[-1] += f",{piece}"
        else:
            arms.append(piece)
    return tuple(arm for arm in arms if arm)


def count(text: str) -> int:
    """A number of tokens as people write it.

    >>> count("2M"), count("1.5G"), count("300k"), count("65536")
    (2000000, 1500000000, 300000, 65536)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text.strip().replace("_", ""))
    if found is None:
        raise UsageError(f"a number of tokens is written like 300k, 2M, 1.5G or 65536: got {text!r}")
    return round(float(found[1]) * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[found[2].lower()])
