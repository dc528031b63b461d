"""Forks services and workers from a process that has imported all they need: importing torch takes seconds, a fork milliseconds.

Each child is a process like any other: its own pid, environment, signals and exit. Nothing of grpc is in use when it is forked. Run as a
module; commands come on standard input, one JSON object a line, and what is said goes to standard output.

    {"start": 7, "program": one of PROGRAMS, "arguments": [...], "environment": {...}, "output": path}
                                                                                          ->  {"started": 7, "pid": ...}
    a child's end                                                                         ->  {"ended": 7, "status": ...}  as Popen says it
"""

from __future__ import annotations

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

import atexit
import ctypes
import faulthandler
import gc
import json
import select
import signal
import sys
from runpy import run_path
from typing import Any, NoReturn

import shoal_coordinator.__main__
import shoal_coordinator.server
import shoal_ps_server.__main__
import shoal_ps_server.serving
import torch
import torch.optim.lr_scheduler

from tests.history import recording, training
from tests.integration.worker_async import train
from tests.integration.worker_elastic import train as elastic

PROGRAMS = {
    "coordinator": shoal_coordinator.__main__.main,
    "server": shoal_ps_server.__main__.main,
    "train": train.main,
    "recorded-server": recording.serve,
    "recorded-train": recording.train,
    "history-train": training.main,
    "elastic": elastic.main,
    "script": lambda arguments: run_path(arguments[0], run_name="__main__") and None,
}


def main() -> None:
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # the first optimizer imports a second's worth of torch
    gc.collect()
    gc.freeze()  # else each child looks through all of it, and copies it on the way, when it ends
    woken, wakes = os.pipe2(os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakes)
    children: dict[int, int] = {}
    received = b""
    say({"ready": True})
    while True:
        readable, _, _ = select.select([0, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            reap(children)
        if 0 in readable:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                command = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    become(command)
                children[pid] = command["start"]
                say({"started": command["start"], "pid": pid})


def become(command: dict[str, Any]) -> NoReturn:
    """In the child: runs the program, and ends as it would, but for the taking apart of all that was imported, which takes a second."""
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    output = os.open(command["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    faulthandler.enable()
    os.environ.update(command["environment"])
    status: Any = 1
    try:
        status = PROGRAMS[command["program"]](command["arguments"])
    except SystemExit as end:
        status = end.code
    except BaseException:  # as the interpreter does it
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as end:
            status = end.code
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0)


def reap(children: dict[int, int]) -> None:
    for pid in list(children):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            say({"ended": children.pop(pid), "status": os.waitstatus_to_exitcode(status)})


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
