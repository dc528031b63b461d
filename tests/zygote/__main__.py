"""Forks services and workers from a process that has imported all they need: importing torch takes
seconds, a fork milliseconds.

Each child is a process like any other: its own pid, environment, signals and exit. Nothing of grpc
is in use when it is forked. Run as a module; commands come on standard input, one JSON object a
line, and what is said goes to standard output.

    {"start": 7, "program": one of PROGRAMS, "arguments": [...], "environment": {...},
     "output": path}
        ->  {"started": 7, "pid": ...}
    a child's end
        ->  {"ended": 7, "status": ...}  as Popen says it

The environment is added to this process's own. With "command", a command line of python, the child
is as that process would be: "environment" is all of it, "error" is the path of its standard error,
"directory" where it runs.
"""

from __future__ import annotations

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

import ctypes
import faulthandler
import gc
import importlib
import json
import pkgutil
import select
import signal
from pathlib import Path
from runpy import run_path
from typing import Any, NoReturn

import shoal_coordinator.__main__
import shoal_coordinator.server
import shoal_ps_server.__main__
import shoal_ps_server.serving
import shoal_worker.strategies
import torch
import torch.optim.lr_scheduler
from shoal.warm.becoming import show_as

from tests.history import recording, training
from tests.integration.worker_async import train
from tests.integration.worker_elastic import train as elastic
from tests.zygote.commands import can_be_forked, run_to_its_end, shoal

PROGRAMS = {
    "coordinator": shoal_coordinator.__main__.main,
    "server": shoal_ps_server.__main__.main,
    "train": train.main,
    "recorded-server": recording.serve,
    "recorded-train": recording.train,
    "history-train": training.main,
    "elastic": elastic.main,
    "script": lambda arguments: run_path(arguments[0], run_name="__main__") and None,
    "shoal": shoal,
}
LATER = (
    "encodings.idna",
    "grpc._channel",
    "shoal_worker.parameter_servers.persistence",
    "shoal_worker.compression.powersgd",
    *(
        f"shoal_worker.strategies.{module.name}"
        for module in pkgutil.iter_modules(shoal_worker.strategies.__path__)
    ),
)
"""Modules that are imported when they are first needed, which would be in each child."""
for name in LATER:
    importlib.import_module(name)
ADDED = {
    name: value
    for name, value in os.environ.items()
    if f"\0{name}=" not in f"\0{Path('/proc/self/environ').read_text()}"
}
"""Variables that imports have set."""


def main() -> None:
    torch.set_num_threads(1)
    # the first optimizer imports a second's worth of torch
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
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
    """In the child: runs the program, and ends as it would."""
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    outputs = [command["output"], command.get("error", command["output"])]
    for descriptor, path in enumerate(outputs, start=1):
        output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, descriptor)
        os.close(output)
    faulthandler.enable()
    if "command" in command:
        become_command(command)
    os.environ.update(command["environment"])
    run_to_its_end(lambda: PROGRAMS[command["program"]](command["arguments"]))


def become_command(command: dict[str, Any]) -> None:
    """Makes the child what a fresh process of the command line would be; replaces it by one if it
    cannot be the same."""
    faulthandler.disable()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.chdir(command["directory"])
    line, environment = command["command"], command["environment"]
    environment = {**ADDED, **environment}
    if not can_be_forked(line, environment) or not show_as(line, environment):
        os.execve(line[0], line, environment)
    os.environ.clear()
    os.environ.update(environment)
    command["environment"] = {}


def reap(children: dict[int, int]) -> None:
    for pid in list(children):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            say({"ended": children.pop(pid), "status": os.waitstatus_to_exitcode(status)})


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
