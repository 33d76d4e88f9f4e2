"""Our models in lm-eval (extra `lm-eval`): its tasks, asked of a run folder or of an exported one.

    from qkflow.lm_eval import evaluate
    evaluate("runs/mine", ["lambada_openai", "blimp"], limit=100)["results"]

On the command line, lm-eval learns of us by being started from here; all else is its own:

    python -m qkflow.lm_eval run --model qkflow --model_args run=runs/mine --tasks blimp --include_path my/tasks

How texts become tokens: every text begins behind an end-of-document token, as documents did in training. What is too
long is cut from the left to `max_length` tokens (a run's context unless given). A rolling likelihood is taken in
windows of `max_length`, as `qkflow eval` does it; texts of more than one window differ in the last one alone, which
lm-eval fills up with what comes before, while ours begins where the one before it ended.
"""

try:
    import lm_eval.models  # noqa: F401 (all of lm-eval's own: it does not look for them once one is registered)
except ImportError as error:
    raise ImportError("qkflow.lm_eval needs lm-eval: pip install 'qkflow[lm-eval]'") from error

from qkflow.lm_eval.adapter import QKFlowLM
from qkflow.lm_eval.asking import evaluate

__all__ = ["QKFlowLM", "evaluate"]
