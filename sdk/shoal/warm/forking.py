"""Imports torch and Shoal once, then forks a worker for each request of the launcher.

A worker is forked twice: the intermediate process exits immediately, and the kernel makes the
worker a child of the launcher, which is a subreaper (prctl(2)) during the fork. The launcher is
then the worker's parent, as if it had started the worker itself: it waits for the worker, and the
worker dies with the launcher. The death of the warm process does not affect any worker.

A forked process has one thread, and locks that other threads of its parent held stay locked
forever. The warm process therefore refuses to fork unless it is certain that it has no other
threads, has opened no device, and is not traced.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import struct
import sys
import threading
import warnings
from collections.abc import Iterable
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import Any, Final

from shoal.warm.becoming import Program, show_as
from shoal.warm.messages import receive, send

_IMPORTED: Final = (
    "torch",
    "torch.distributed",
    "torch.optim.lr_scheduler",
    "torch.utils.data",
    "torch._dynamo",  # torch imports it when the first optimizer is created
    "shoal",
    "shoal_worker.api",
    "shoal_worker.replicated.engine",
    "shoal_worker.sharding.engine",
    "shoal_worker.strategies.registry",
    "shoal_ps_server.serving",
)
_DEVICELESS: Final = 3
"""Exit status of a forked process in which torch refuses to use CUDA."""
_DEVICES: Final = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


def serve(descriptor: int, *, launcher: int) -> Program:
    """Serves requests of the launcher. Exits when the launcher closes the socket or exits. Returns
    only in forked workers.

    Args:
        descriptor: descriptor of the socket.
        launcher: process id of the launcher, which becomes the parent of the workers.
    """
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    before = dict(os.environ)
    problem = _prepare()
    added = {name: value for name, value in os.environ.items() if name not in before}
    tops = frozenset(name.partition(".")[0] for name in sys.modules)
    send(connection, {"failed": problem} if problem else {"ready": True})
    while True:
        try:
            request, descriptors = receive(connection)
        except (EOFError, ConnectionResetError):
            os._exit(0)
        problem = _why_unsafe() or _shadowed(request["folder"], tops)
        if problem:
            answer: dict[str, Any] = {"refused": problem}
        else:
            pid, between = _fork_twice()
            if pid == 0:
                connection.close()
                out, error, gate = descriptors
                return Program(
                    request,
                    out=out,
                    error=error,
                    gate=gate,
                    between=between,
                    launcher=launcher,
                    added=added,
                )
            answer = (
                {"pid": pid} if pid > 0 else {"refused": "the operating system could not fork it"}
            )
        for received in descriptors:
            os.close(received)
        send(connection, answer)


def _prepare() -> str:
    """Imports torch, Shoal and their dependencies. Returns the reason why workers cannot be forked;
    empty if they can."""
    gc.disable()  # garbage collection would take a tenth of the time of the imports
    try:
        for name in _IMPORTED:
            importlib.import_module(name)
    except Exception as error:
        return f"importing torch and Shoal failed: {type(error).__name__}: {error}"
    gc.enable()
    # otherwise the workers' garbage collection would visit, and thereby copy, all of this memory
    gc.freeze()
    sys.stdout.flush()
    sys.stderr.flush()
    from shoal_worker.torch_internals import cuda_is_unusable

    # OpenBLAS stops its threads before a fork, and restarts them when they are needed.
    probe = os.fork()
    if probe == 0:
        if cuda_is_unusable():
            os._exit(_DEVICELESS)
        os._exit(0 if show_as(["probe"], {"PROBE": "1"}) else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(probe, 0)[1])
    if status == _DEVICELESS:
        return (
            "importing torch and Shoal called the CUDA runtime, which torch cannot use in forked "
            "processes"
        )
    if status != 0:
        return (
            "the kernel cannot show a forked process under its own command line "
            "(CONFIG_CHECKPOINT_RESTORE)"
        )
    return _why_unsafe()


def _why_unsafe() -> str:
    """Returns the reason why a child that is forked now might not behave like a fresh process;
    empty if there is none."""
    torch = sys.modules["torch"]
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        return f"the warm process has {threads} threads"
    if torch.cuda.is_initialized() or any(path.startswith(_DEVICES) for path in _open_files()):
        return "importing torch and Shoal opened a device"
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12
    tools = monitoring is not None and any(map(monitoring.get_tool, range(6)))
    if (
        tools
        or sys.gettrace()
        or sys.getprofile()
        or threading.gettrace()
        or threading.getprofile()
    ):
        return "a debugger, profiler or coverage tool is active"
    return ""


def _open_files() -> Iterable[str]:
    for descriptor in list(Path("/proc/self/fd").iterdir()):
        try:
            yield str(descriptor.readlink())
        except FileNotFoundError:  # excludes the descriptor used to list the directory
            continue


def _shadowed(folder: str, tops: frozenset[str]) -> str:
    """Returns a description of a file that makes forking incorrect: a fresh interpreter would
    import it, from the first directory of the worker's sys.path, in place of an already imported
    module. Empty if there is none.

    `tops`: top-level names of the imported modules.
    """
    try:
        entries = list(os.scandir(folder)) if folder else []
    except OSError:
        return ""
    for entry in entries:
        name = next(
            (entry.name.removesuffix(end) for end in all_suffixes() if entry.name.endswith(end)), ""
        )
        if (
            not name
            and entry.name in tops
            and any(Path(entry.path, "__init__" + end).exists() for end in all_suffixes())
        ):
            name = entry.name
        if name in tops and name not in sys.builtin_module_names:
            found = getattr(sys.modules.get(name), "__file__", None)
            if found is None or Path(found).resolve() not in _files_of(entry):
                return (
                    f"{entry.path} shadows the module {name!r}, which the warm process has "
                    "imported from elsewhere"
                )
    return ""


def _files_of(entry: os.DirEntry[str]) -> set[Path]:
    path = Path(entry.path).resolve()
    return {path, *(path / f"__init__{end}" for end in all_suffixes())}


def _fork_twice() -> tuple[int, int]:
    """Forks a child that forks a grandchild and exits. Returns the process ids of the grandchild
    and of the child. The first is 0 in the grandchild itself, and -1 if the grandchild could not be
    forked."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns about forks with threads; there are none
        warnings.simplefilter("ignore", DeprecationWarning)
        between = _fork()
        if between == 0:
            parent = os.getpid()
            worker = _fork()
            if worker != 0:
                os.write(writing, struct.pack("i", worker))
                os._exit(0)
    os.close(writing)
    if between == 0:
        os.close(reading)
        return 0, parent
    data = os.read(reading, 4)  # empty if the intermediate process could not write
    os.close(reading)
    if between > 0:
        os.waitpid(between, 0)
    return (int(struct.unpack("i", data)[0]) if len(data) == 4 else -1), between


def _fork() -> int:
    try:
        return os.fork()
    except OSError:
        return -1
