"""One of two processes that train together, again and again: importing torch twice takes longer than all the rest.

    python pair.py RANK FOLDER      FOLDER/orders.json: what to do, in order; FOLDER/answers/NAME.RANK.json: how it went

An order is a `name` and

    folder, config, parallel, resume    of a run
    double                              whether numbers are float64
    act                                 what happens to one process: `rank`, after which `step` (0: in the first
                                        evaluation), and `what`:
                                          "stop"   it is sent SIGTERM
                                          "nan"    its weights are spoilt
                                          "room"   it may write only small files from here on
                                          "raise"  it fails, and leaves
    restarts                            of each process, how often torchrun fragment that it was started again
    command                             arguments of the command line, instead of a run
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
        self.all: list[str] = []

    def on_notice(self, text: str) -> None:
        self.all.append(text)


def acting(act: dict[str, Any], call: Any, *, before: bool = False) -> Any:
    """A step after which something happens, or an evaluation before which it does."""

    def acted(self: Learner, *args: Any) -> Any:
        record = None if before else call(self, *args)
        if self.step == act["step"] and self.group.rank == act["rank"]:
            if act["what"] == "stop":
                os.kill(os.getpid(), signal.SIGTERM)
            elif act["what"] == "room":
                resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
            elif act["what"] == "nan":
                with torch.no_grad():
                    local(self.model.get_parameter("blocks.1.mechanism.value.weight")).fill_(float("nan"))
            else:
                raise RuntimeError("a process on its own")
        return call(self, *args) if before else record

    return acted


def obey(order: dict[str, Any]) -> dict[str, Any]:
    notices = Notices()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(order.get("restarts", [0, 0])[dist.get_rank()])
    torch.set_default_dtype(torch.float64 if order.get("double") else torch.float32)
    act = order.get("act", {"step": None})
    Learner.train_step, Learner.evaluate = acting(act, TRAIN_STEP), EVALUATE
    if act["step"] == 0:
        Learner.evaluate = acting(act, EVALUATE, before=True)
    said, complained = io.StringIO(), io.StringIO()
    try:
        if "command" in order:
            from qkflow.cli import main

            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
                code = main(order["command"])
            return {"outcome": code, "said": said.getvalue(), "complained": complained.getvalue()}
        config = from_dict(TrainConfig, order["config"])
        if "budget" in order:
            return {"outcome": steps_for_budget(config, order["budget"], parallel=order["parallel"])}
        train(
            None if order.get("resume") else config,
            order["folder"],
            callbacks=[notices],
            resume=order.get("resume", False),
            parallel=order["parallel"],
        )
        return {"outcome": "finished", "notices": notices.all}
    except Exception as error:
        return {"outcome": type(error).__name__, "message": str(error), "notices": notices.all}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def serve(rank: int, folder: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    build.load()  # from the suite's own cache, where they may be built already
    os.environ |= {"QKFLOW_CACHE": os.environ["CORPORA"], "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for order in json.loads((folder / "orders.json").read_text()):
        answer = obey(order)
        (folder / "answers" / f"{order['name']}.{rank}.json").write_text(json.dumps(answer))
    if rank == 0:  # the other one has left already
        dist.destroy_process_group()


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]))
