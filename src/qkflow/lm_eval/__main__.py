"""lm-eval's own command line, to which our models are known."""

from lm_eval.__main__ import cli_evaluate

import qkflow.lm_eval  # noqa: F401

if __name__ == "__main__":
    cli_evaluate()
