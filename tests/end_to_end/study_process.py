"""A process that resumes the study in a folder and prints when runs are in training. Tests kill it."""

import sys

from qkflow.errors import Interrupted
from qkflow.experiment.progress import Observer, Progress
from qkflow.experiment.runner import run_experiment


class Speaker(Observer):
    spoken = False

    def on_progress(self, progress: Progress) -> None:
        if progress.running and not self.spoken:
            self.spoken = True
            print("running", flush=True)

    def on_notice(self, text: str) -> None:
        print("notice", text, flush=True)


if __name__ == "__main__":
    try:
        run_experiment(None, sys.argv[1], observer=Speaker())
    except Interrupted as stopped:
        sys.exit(128 + stopped.signal)
    print("finished", flush=True)
