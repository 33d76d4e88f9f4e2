"""Studies: matched arms over several seeds, designed before they are run, and judged with a known error rate.

    request ─► design.json ─► runs (an engine's processes) ─► summary ─► verdicts

>>> from qkflow.data import CorpusConfig
>>> request = Request(corpus=CorpusConfig(), arms=("standard", "differential"), budget=600.0)
>>> run_experiment(request, "runs/mine")  # doctest: +SKIP
>>> [verdict.sentence for verdict in summarise("runs/mine").verdicts]  # doctest: +SKIP
"""

from qkflow.experiment.executors.base import Engine, make_engine
from qkflow.experiment.extension import extend
from qkflow.experiment.observer import Observer
from qkflow.experiment.request import Request
from qkflow.experiment.run import run_experiment
from qkflow.experiment.stats.verdict import Verdict
from qkflow.experiment.summarise import summarise
from qkflow.experiment.summary import Summary

__all__ = [
    "Engine",
    "Observer",
    "Request",
    "Summary",
    "Verdict",
    "extend",
    "make_engine",
    "run_experiment",
    "summarise",
]
