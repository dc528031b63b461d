"""Forks services and workers from a process that has imported everything they need: importing torch
takes seconds, a fork takes milliseconds.

Each child is a process like any other: its own pid, environment, signals and exit. grpc is not in
use when it is forked. The module is run as a program. Commands come on standard input, one JSON
object per line, and replies go to standard output.

    {"start": 7, "program": one of PROGRAMS, "arguments": [...], "environment": {...},
     "output": path}
        ->  {"started": 7, "pid": ...}
    a child's end
        ->  {"ended": 7, "status": ...}  as in Popen

The environment is added to that of this process. With "command", a command line of python, the
child is like a process of that command line: "environment" is its whole environment, "error" is the
path of its standard error, and "directory" is its working directory.
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

import shoal.cli
import shoal.client
import shoal.launcher
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
from tests.ranks import nursery
from tests.zygote import commands
from tests.zygote.commands import can_be_forked, run_to_its_end

PROGRAMS = {
    "coordinator": shoal_coordinator.__main__.main,
    "server": shoal_ps_server.__main__.main,
    "train": train.main,
    "recorded-server": recording.serve,
    "recorded-train": recording.train,
    "history-train": training.main,
    "elastic": elastic.main,
    "script": lambda arguments: run_path(arguments[0], run_name="__main__") and None,
    "shoal": commands.shoal,
    "nursery": nursery.serve,
}
LATER = (
    "encodings.idna",
    "google.protobuf.json_format",
    "grpc._channel",
    "grpc._interceptor",
    "importlib.readers",
    "rich.console",
    "shoal.ticks",
    "shoal_worker.backends.gloo.backend",
    "shoal_worker.parameter_servers.persistence",
    "shoal_worker.compression.powersgd",
    *(
        module.name
        for package in (shoal.cli, shoal.client, shoal.launcher, shoal_worker.strategies)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ),
)
"""Modules that are imported lazily and would otherwise be imported in each child."""
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
    # the first optimizer imports parts of torch for a second
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    gc.collect()
    # otherwise each child's garbage collector would visit and copy all objects when it ends
    gc.freeze()
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
    """Runs the program in the child and ends the process as the program would."""
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
    """Turns the child into what a fresh process of the command line would be. Executes a fresh
    interpreter if a fork cannot be equivalent."""
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
