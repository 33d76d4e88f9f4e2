"""Studies: matched arms over several seeds, designed before they are run, and judged with a known error rate.

    request ─► design.json ─► runs (an engine's processes) ─► summary ─► verdicts

>>> from qkflow.data import CorpusConfig
>>> request = ExperimentSpec(corpus=CorpusConfig(), arms=("standard", "differential"), budget=600.0)
>>> run_experiment(request, "runs/mine")  # doctest: +SKIP
>>> [verdict.sentence for verdict in read_result("runs/mine").verdicts]  # doctest: +SKIP
"""

from qkflow.experiment.executors.base import Executor, make_executor
from qkflow.experiment.extension import extend
from qkflow.experiment.observer import Observer
from qkflow.experiment.runner import run_experiment
from qkflow.experiment.spec import ExperimentSpec
from qkflow.experiment.stats.verdict import Verdict
from qkflow.experiment.summarise import read_result
from qkflow.experiment.summary import ExperimentResult

__all__ = [
    "Executor",
    "ExperimentResult",
    "ExperimentSpec",
    "Observer",
    "Verdict",
    "extend",
    "make_executor",
    "read_result",
    "run_experiment",
]
