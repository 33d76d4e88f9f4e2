"""A process that resumes the study in a folder and prints when runs are in training. Tests kill it."""

import sys

from qkflow.errors import Interrupted
from qkflow.experiment.progress import Observer, Progress
from qkflow.experiment.runner import run_experiment


class Printer(Observer):
    has_printed = False

    def on_progress(self, progress: Progress) -> None:
        if progress.running and not self.has_printed:
            self.has_printed = True
            print("running", flush=True)

    def on_notice(self, text: str) -> None:
        print("notice", text, flush=True)


if __name__ == "__main__":
    try:
        run_experiment(None, sys.argv[1], observer=Printer())
    except Interrupted as error:
        sys.exit(128 + error.signal)
    print("finished", flush=True)
