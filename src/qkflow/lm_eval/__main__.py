"""lm-eval's command line, with qkflow models registered."""

from lm_eval.__main__ import cli_evaluate

import qkflow.lm_eval  # noqa: F401

if __name__ == "__main__":
    cli_evaluate()
