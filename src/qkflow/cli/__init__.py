"""The command line. Each command is a dataclass in its own module; its fields are the flags."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence

from qkflow.cli.check import Check
from qkflow.cli.compare import Compare
from qkflow.cli.console import Console, replace_unencodable
from qkflow.cli.evaluate import Eval
from qkflow.cli.export import Export
from qkflow.cli.generate import Generate
from qkflow.cli.judge import Judge
from qkflow.cli.options import refuse_empty, refuse_extreme
from qkflow.cli.parser import parse_command
from qkflow.cli.probe import Probe
from qkflow.cli.report import Report
from qkflow.cli.reproduce import Reproduce
from qkflow.cli.sharpen import Sharpen
from qkflow.cli.train import Train
from qkflow.errors import DiskError, DivergenceError, Interrupted, UsageError, out_of_memory
from qkflow.formatting import escape_unprintable

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


_MEMORY_FLAGS = {
    "train": "--batch, --context or --size",
    "compare": "--batch, --context, --size or --jobs",
    "sharpen": "--batch, --longest or --jobs",
    "generate": "the number of prompts or --tokens",
    "probe": "--tokens",
    "check": "--width",
}
"""What to reduce if a command runs out of memory."""
_PATH_ERRORS = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP)
"""Errors that are due to the path and not to the disk: another path helps, and repeating the command does not."""


def main(args: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0 success, 1 failure, 2 usage error, 128 + n stopped by signal n."""
    replace_unencodable()
    args = sys.argv[1:] if args is None else args
    try:
        refuse_empty(args, COMMANDS)
        command = parse_command(args, COMMANDS)
        refuse_extreme(command)
        return command.run()
    except UsageError as error:
        return _fail(error, 2)
    except DiskError as error:
        return _fail(error.strerror, 2 if error.errno in _PATH_ERRORS else 1)
    except DivergenceError as error:
        return _fail(error, 1)
    except Interrupted as interrupt:
        return _fail(interrupt, 128 + interrupt.signal, style="yellow")
    except KeyboardInterrupt:
        return _fail("interrupted", 128 + signal.SIGINT, style="yellow")
    except BrokenPipeError:  # keep the interpreter from flushing into the closed pipe at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is None:
            raise
        return _fail(f"{os.fsdecode(error.filename)} cannot be used ({error.strerror}): give another path", 2)
    except (MemoryError, RuntimeError) as error:
        if (reason := out_of_memory(error)) is None:
            raise
        reduce = _MEMORY_FLAGS.get(args[0], "the size of the input")
        return _fail(f"out of memory{reason}: reduce {reduce}", 1)


def _fail(message: object, code: int, style: str = "red") -> int:
    """Print one line to stderr; indented lines of a message are appended to its first."""
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    line = escape_unprintable(str(message).replace("\n  ", " "))
    errors.print(f"qkflow: {line}", style=style, markup=False)
    return code
