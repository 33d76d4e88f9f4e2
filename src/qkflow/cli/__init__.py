"""The command line. Each command is a dataclass in its own module; its fields are the flags."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import tyro
from rich.console import Console

from qkflow.cli.check import Check
from qkflow.cli.compare import Compare
from qkflow.cli.evaluate import Eval
from qkflow.cli.export import Export
from qkflow.cli.generate import Generate
from qkflow.cli.judge import Judge
from qkflow.cli.probe import Probe
from qkflow.cli.report import Report
from qkflow.cli.reproduce import Reproduce
from qkflow.cli.sharpen import Sharpen
from qkflow.cli.train import Train
from qkflow.errors import DiskError, DivergenceError, Interrupted, UsageError

__all__ = ["main"]

COMMANDS = {
    "compare": Compare,
    "sharpen": Sharpen,
    "judge": Judge,
    "report": Report,
    "reproduce": Reproduce,
    "train": Train,
    "eval": Eval,
    "generate": Generate,
    "probe": Probe,
    "export": Export,
    "check": Check,
}


def main(args: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0 success, 1 failure, 2 usage error, 128 + n stopped by signal n."""
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        command = tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="qkflow", description="Attention whose queries and keys move.", args=args
        )
        return command.run()
    except UsageError as error:
        errors.print(f"qkflow: {error}", style="red", markup=False)
        return 2
    except (DiskError, DivergenceError) as error:
        reason = error.strerror if isinstance(error, DiskError) else error
        errors.print(f"qkflow: {reason}", style="red", markup=False)
        return 1
    except Interrupted as interrupt:
        errors.print(f"qkflow: {interrupt}", style="yellow", markup=False)
        return 128 + interrupt.signal
    except KeyboardInterrupt:
        errors.print("qkflow: interrupted", style="yellow")
        return 128 + signal.SIGINT
    except BrokenPipeError:  # keep the interpreter from flushing into the closed pipe at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
