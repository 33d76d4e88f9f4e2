"""Studies: matched arms over several seeds, designed before they are run, and judged with a known error rate.

    request ─► design.json ─► runs (an engine's processes) ─► summary ─► verdicts

>>> from qkflow.data import CorpusConfig
>>> request = Request(corpus=CorpusConfig(), arms=("standard", "differential"), budget=600.0)
>>> run_study(request, "runs/mine")  # doctest: +SKIP
>>> [verdict.sentence for verdict in summarise("runs/mine").verdicts]  # doctest: +SKIP
"""

from qkflow.study.engine import Engine, make_engine
from qkflow.study.extension import extend
from qkflow.study.observer import Observer
from qkflow.study.request import Request
from qkflow.study.run import run_study
from qkflow.study.summarise import summarise
from qkflow.study.summary import Summary
from qkflow.study.verdict import Verdict

__all__ = [
    "Engine",
    "Observer",
    "Request",
    "Summary",
    "Verdict",
    "extend",
    "make_engine",
    "run_study",
    "summarise",
]
