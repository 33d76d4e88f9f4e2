"""One of two processes that run a list of training jobs together. They are shared, because importing torch is slow.

    python two_process_worker.py RANK FOLDER

reads FOLDER/jobs.json and writes FOLDER/results/NAME.RANK.json. Keys of a job:

    name
    folder, config, parallel, resume    a run
    double                              use float64
    event                               what happens in one process: its `rank`, the `step` after which it happens
                                        (0: in the first evaluation), and the `kind`:
                                          "stop"       SIGTERM
                                          "nan"        weights become NaN
                                          "full disk"  only small files can be written from then on
                                          "raise"      an exception
    restarts                            the restart count of torchrun for each process
    command                             arguments of the command line instead of a run
    budget                              seconds, instead of a run
"""

import contextlib
import io
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from qkflow.config import from_dict
from qkflow.ops.csrc import build
from qkflow.training import Callback, TrainConfig, steps_for_budget, train
from qkflow.training.parallel import local
from qkflow.training.step import Learner

TRAIN_STEP, EVALUATE = Learner.train_step, Learner.evaluate


class Notices(Callback):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_notice(self, text: str) -> None:
        self.texts.append(text)


def with_event(event: dict[str, Any], call: Any, *, before: bool = False) -> Any:
    """Return the call with an event after it, or before it."""

    def call_with_event(self: Learner, *args: Any) -> Any:
        record = None if before else call(self, *args)
        if self.step == event["step"] and self.group.rank == event["rank"]:
            if event["kind"] == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
            elif event["kind"] == "full disk":
                resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
            elif event["kind"] == "nan":
                with torch.no_grad():
                    local(self.model.get_parameter("blocks.1.mechanism.value.weight")).fill_(float("nan"))
            else:
                raise RuntimeError("an error in one process")
        return call(self, *args) if before else record

    return call_with_event


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    notices = Notices()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(job.get("restarts", [0, 0])[dist.get_rank()])
    torch.set_default_dtype(torch.float64 if job.get("double") else torch.float32)
    event = job.get("event", {"step": None})
    Learner.train_step, Learner.evaluate = with_event(event, TRAIN_STEP), EVALUATE
    if event["step"] == 0:
        Learner.evaluate = with_event(event, EVALUATE, before=True)
    stdout, stderr = io.StringIO(), io.StringIO()
    try:
        if "command" in job:
            from qkflow.cli import main

            with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
                code = main(job["command"])
            return {"outcome": code, "stdout": stdout.getvalue(), "stderr": stderr.getvalue()}
        config = from_dict(TrainConfig, job["config"])
        if "budget" in job:
            return {"outcome": steps_for_budget(config, job["budget"], parallel=job["parallel"])}
        train(
            None if job.get("resume") else config,
            job["folder"],
            callbacks=[notices],
            resume=job.get("resume", False),
            parallel=job["parallel"],
        )
        return {"outcome": "finished", "notices": notices.texts}
    except Exception as error:
        return {"outcome": type(error).__name__, "message": str(error), "notices": notices.texts}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def serve(rank: int, folder: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    build.load()  # from the cache of the test suite
    os.environ |= {"QKFLOW_CACHE": os.environ["CORPORA"], "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for job in json.loads((folder / "jobs.json").read_text()):
        result = run_job(job)
        (folder / "results" / f"{job['name']}.{rank}.json").write_text(json.dumps(result))
    if rank == 0:  # the other process has already exited
        dist.destroy_process_group()


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]))
