"""Prints a description of the machine, and checks whether the installed torch has the names that
Shoal uses.

For each missing name, prints a line that begins with MISSING; the exit status is then 1. Works
without a GPU, but with a CPU build of torch it can check only a few names.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_COMMANDS = (
    ("uname", "-a"),
    ("nvidia-smi",),
    ("nproc",),
    ("free", "-g"),
    ("df", "-h", "/", "/tmp", "/dev/shm"),
    ("ip", "-br", "addr"),
)


def main() -> int:
    """Prints the description and the results. Returns 1 if a name is missing, otherwise 0."""
    for command in _COMMANDS:
        print(f"$ {' '.join(command)}\n{_output_of(command)}")
    print("programs:", {name: shutil.which(name) for name in ("cc", "c++", "nvcc", "ninja")})
    print("packages:", *sorted(f"{each.name}=={each.version}" for each in metadata.distributions()))
    print("python", sys.version.split()[0], "torch", torch.__version__, "CUDA", torch.version.cuda)
    missing = [name for name, ask in _questions() if not _answered(name, ask)]
    return 1 if missing else 0


def _output_of(command: tuple[str, ...]) -> str:
    if shutil.which(command[0]) is None:
        return "not installed"
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return (answer.stdout + answer.stderr).strip()


def _answered(name: str, ask: Callable[[], Any]) -> bool:
    try:
        answer = ask()
    except Exception as error:  # each question by itself
        print(f"MISSING {name}: {type(error).__name__}: {error}")
        return False
    print(f"found   {name}: {answer}")
    return True


def _questions() -> list[tuple[str, Callable[[], Any]]]:
    """Returns the checks: for each, a name to print, and a function that raises an exception if
    torch lacks it."""
    found: list[tuple[str, Callable[[], Any]]] = [
        ("shoal", lambda: metadata.version("shoal")),
        ("torch.AcceleratorError", lambda: torch.AcceleratorError),
        ("dist.DistError", lambda: dist.DistError),
        ("ProcessGroup._register_backend", lambda: dist.ProcessGroup._register_backend),
        ("ProcessGroup._set_default_backend", lambda: dist.ProcessGroup._set_default_backend),
        ("collectives of Shoal's own names", _collectives),
    ]
    if not dist.is_nccl_available():
        print("this torch is built without NCCL: nothing is asked of it")
        return found
    library = distributed_c10d.ProcessGroupNCCL
    for name in (
        "abort",
        "shutdown",
        "eager_connect_single_device",
        "comm_split_count",
        "allreduce",
    ):
        found.append((f"ProcessGroupNCCL.{name}", lambda name=name: getattr(library, name)))
    for name in ("split_from", "split_color"):
        found.append(
            (f"ProcessGroupNCCL.Options.{name}", lambda name=name: getattr(library.Options, name))
        )
    found += [
        ("ProcessGroupNCCL.Options", _options),
        ("NCCL at run time", library.get_runtime_nccl_version),
    ]
    if torch.cuda.is_available():
        found.append(
            (
                "device",
                lambda: (
                    torch.cuda.get_device_name(),
                    str(torch.cuda.get_device_properties(0).uuid),
                ),
            )
        )
    return found


def _collectives() -> str:
    from shoal_worker import torch_internals

    return f"{torch_internals.__name__} imports"


def _options() -> str:
    options = distributed_c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=3650)
    options.config.blocking = 0
    if options._timeout != timedelta(days=3650) or options.config.blocking != 0:
        raise AssertionError(
            f"_timeout is {options._timeout}, config.blocking {options.config.blocking}"
        )
    return f"_timeout {options._timeout}, config.blocking {options.config.blocking}"


if __name__ == "__main__":
    sys.exit(main())
