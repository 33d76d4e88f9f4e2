"""`qkflow sharpen`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from qkflow.cli.compare import exit_code, run_and_present
from qkflow.cli.console import Console
from qkflow.cli.options import command_line, flag, flags_given, new_folder, parse_numbers, without_none
from qkflow.data.tasks import TaskConfig, TaskName
from qkflow.errors import UsageError
from qkflow.experiment.executors.base import make_executor
from qkflow.experiment.presets import SEEDS, sharpen_spec
from qkflow.experiment.spec import ExperimentSpec, RationaleSpec
from qkflow.models.one_layer import Form
from qkflow.probes.attention import Pooling


@dataclass(frozen=True, kw_only=True)
class Sharpen:
    """Test whether faster query-key learning sharpens attention on a task, and write a report.

    Each arm trains W_Q and W_K r times as fast as the rest, and is tuned over the same learning rates. Attention is
    then measured on the words that determine the answer.

    For example:
      qkflow sharpen                                   subject-verb agreement, two minutes
      qkflow sharpen --ratios 1,10,100 --growth 40
      qkflow sharpen --task synthetic --form CACO --ratios 1,2,5
      qkflow sharpen --data lm_syneval.jsonl.xz --published
      qkflow sharpen --task hatexplain --data hatexplain/
      qkflow sharpen --task squad-entities --data squad/
      qkflow sharpen --resume runs/sharpen-agreement   after Ctrl-C or a crash
    """

    task: Annotated[
        TaskName | None, flag("{agreement,synthetic,squad,squad-entities,hatexplain,sst2}", "agreement")
    ] = None
    """Task."""
    data: Annotated[str | None, flag("PATH", "the built-in grammar")] = None
    """Files of the task: Marvin and Linzen's or BLiMP's for agreement, the folder of SQuAD, HateXplain or SST-2."""
    ratios: Annotated[str | None, flag("R,R,...", "those of the task")] = None
    """Learning-rate ratios of W_Q and W_K, one arm each. The first is the baseline."""
    growth: Annotated[str | None, flag("R,R,...")] = None
    """Additional arms, whose ratio grows linearly from 1 to this value."""
    published: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Add an arm with the published ratios, which speed up embeddings, too."""
    seeds: Annotated[int | None, flag("N", str(SEEDS))] = None
    """Runs per arm."""
    rates: Annotated[str | None, flag("LR,LR,...", "those of the task")] = None
    """Learning rates that each arm is tuned over."""
    steps: Annotated[int | None, flag("N", "that of the task")] = None
    """Steps per run."""
    batch: Annotated[int | None, flag("N", "that of the task")] = None
    """Batch size (instances)."""
    train: Annotated[int | None, flag("N", "all")] = None
    """Maximum number of training instances."""
    test: Annotated[int | None, flag("N", "all")] = None
    """Maximum number of test instances."""
    longest: Annotated[int | None, flag("N", "that of the task")] = None
    """Maximum tokens per instance. Longer instances are skipped and counted."""
    mechanism: Annotated[str | None, flag("NAME", "standard")] = None
    """Attention mechanism, such as standard:window=8 or differential."""
    form: Annotated[Form | None, flag("FORM", "FAFO")] = None
    """For the synthetic task: which circuits are factorised."""
    tau: Annotated[float | None, flag("MASS", "0.5")] = None
    """Attention mass on the rationale from which attention counts as confident."""
    pooling: Annotated[Pooling | None, flag("{rollout,average,max}", "average")] = None
    """How the attention of several layers is pooled."""
    fraction: Annotated[float | None, flag("FRACTION", "0.05")] = None
    """Fraction of the tokens that is deleted to measure comprehensiveness."""
    jobs: Annotated[int | None, flag("N", "one per core")] = None
    """Concurrent runs."""
    out: Annotated[Path | None, flag("STUDY", "a new folder in runs/")] = None
    """Folder of the study. If it holds the same study, it is resumed."""
    resume: Annotated[Path | None, flag("STUDY")] = None
    """Resume the study in this folder. No other option is needed."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the results as JSON instead of a table."""

    def run(self) -> int:
        """Run the study, print its result and write its report."""
        console = Console(stderr=self.json)
        executor = make_executor("local")
        if self.resume is not None:
            if flags := flags_given(self, exclude=("resume", "json")):
                raise UsageError(f"--resume continues the study unchanged: leave out {flags}")
            folder = self.resume
            result = run_and_present(None, folder, executor=executor, console=console, quiet=self.json)
        else:
            folder = self.out or new_folder(f"sharpen-{self.task or 'agreement'}")
            with console.status("reading the task"):
                spec = self._spec()
            result = run_and_present(
                spec, folder, executor=executor, console=console, command=command_line(), quiet=self.json
            )
        if self.json:
            Console(soft_wrap=True).print((folder / "results.json").read_text(), markup=False, highlight=False, end="")
        return exit_code(result)

    def _spec(self) -> ExperimentSpec:
        try:
            data = None if self.data is None else str(Path(self.data).expanduser().absolute())
        except RuntimeError:
            raise UsageError(f"--data {self.data} has an unknown home directory: give the full path") from None
        task = TaskConfig(
            **without_none(name=self.task, data=data, train=self.train, test=self.test, longest=self.longest)
        )
        return sharpen_spec(
            task,
            published=self.published,
            rationale=RationaleSpec(**without_none(tau=self.tau, pooling=self.pooling, fraction=self.fraction)),
            **without_none(
                ratios=None if self.ratios is None else parse_numbers(self.ratios, "--ratios", "1,5,20"),
                growths=None if self.growth is None else parse_numbers(self.growth, "--growth", "10,40"),
                rates=None if self.rates is None else parse_numbers(self.rates, "--rates", "1e-3,3e-3"),
                seeds=self.seeds,
                steps=self.steps,
                batch=self.batch,
                mechanism=self.mechanism,
                form=self.form,
                jobs=self.jobs,
            ),
        )
