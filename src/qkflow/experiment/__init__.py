"""Experiments: matched arms over several seeds, designed before they are run, with verdicts at a known error rate.

    spec -> design.json -> runs (in an executor's processes) -> result with verdicts

>>> from qkflow.data import CorpusConfig
>>> spec = ExperimentSpec(data=CorpusConfig(), arms=("standard", "differential"), budget=600.0)
>>> result = run_experiment(spec, "runs/study")  # doctest: +SKIP
>>> [verdict.sentence for verdict in result.verdicts]  # doctest: +SKIP
"""

from qkflow.experiment.executors.base import Executor, make_executor
from qkflow.experiment.progress import Observer
from qkflow.experiment.result import ExperimentResult
from qkflow.experiment.runner import run_experiment
from qkflow.experiment.spec import ExperimentSpec
from qkflow.experiment.stats.verdict import Verdict
from qkflow.experiment.summary import read_result

__all__ = [
    "Executor",
    "ExperimentResult",
    "ExperimentSpec",
    "Observer",
    "Verdict",
    "make_executor",
    "read_result",
    "run_experiment",
]
