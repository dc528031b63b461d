"""Prints everything that a worker can observe about its process, as JSON. Values that differ
between runs are reduced to their common part.

Run by test_warm_workers.py in a forked worker and in a fresh interpreter.
"""

# fmt: off
import atexit
import ctypes
import faulthandler
import gc
import json
import locale
import logging
import multiprocessing
import os
import pickle
import random
import resource
import signal
import stat
import sys
import tempfile
import threading
import uuid
import warnings
from pathlib import Path

if __name__ == "__main__":
    # multiprocessing's processes import this file too, but need none of these modules
    import numpy as np
    import shoal_worker.api  # noqa: F401 - it sets variables
    import torch


class Pickled:
    """A class that is defined in the script, for pickling."""

    number = 3


def square(number):
    """Runs in a multiprocessing process."""
    return number**2, Pickled().number, __name__, os.environ["RANK"]


def stream(text):
    """Returns a text stream's settings."""
    return [text.encoding, text.errors, text.newlines, text.line_buffering, text.write_through,
            text.isatty(), type(text.buffer).__name__,
            text.fileno(), text.name, text.mode, stat.S_IFMT(os.fstat(text.fileno()).st_mode)]


def seen():
    """Returns all observations, by name."""
    main = sys.modules["__main__"]
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    death = ctypes.c_int()
    libc.prctl(2, ctypes.byref(death), 0, 0, 0)
    proc = Path("/proc/self")
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    parent = (Path("/proc") / str(os.getppid()) / "cmdline").read_text().replace("\0", " ")
    own = ("SHOAL_", "TORCHELASTIC_", "MASTER_PORT")
    kernel = (proc / "environ").read_text().split("\0")
    return {
        "environment": {name: value for name,
                        value in os.environ.items() if not name.startswith(own)},
        "names": sorted(os.environ),
        "libc": [libc.getenv(b"RANK"), libc.getenv(b"ROLE_NAME"),
                 libc.getenv(b"NO_SUCH")].__repr__(),
        "kernel": sorted(line for line in kernel if line and not line.startswith(own)),
        "commandline": (proc / "cmdline").read_text(),
        "comm": (proc / "comm").read_text(),
        "parent": "shoal run" in parent or "shoal" in parent or "pytest" in parent,
        "directory": str(Path.cwd()),
        "umask": status["Umask"],
        "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")],
        "handlers": {number.name: repr(signal.getsignal(number)).partition(" at ")[0]
                     for number in signal.valid_signals()
                     if isinstance(number, signal.Signals)},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "limits": {name: resource.getrlimit(getattr(resource, name))
                   for name in dir(resource) if name.startswith("RLIMIT_")},
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "death signal": death.value,
        "subreaper": status.get("NoNewPrivs"),
        "affinity": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "streams": [stream(each) for each in (sys.stdin, sys.stdout, sys.stderr)],
        "same streams": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__,
                         sys.stderr is sys.__stderr__],
        "descriptors": sorted(int(each.name) for each in Path("/proc/self/fd").iterdir()),
        "sys": [sys.argv, sys.orig_argv, sys.path, repr(sys.flags), sys.warnoptions,
                repr(sys._xoptions), sys.executable, sys.prefix,
                sys.dont_write_bytecode, sys.pycache_prefix, sys.getrecursionlimit(),
                sys.getswitchinterval(), sys.platlibdir,
                [repr(each).partition(" at ")[0] for each in sys.meta_path], len(sys.path_hooks)],
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__,
                  sys.gettrace(), sys.getprofile(),
                  threading.gettrace(), sys.breakpointhook is sys.__breakpointhook__],
        "main": [sorted(vars(main)), main.__file__, main.__name__,
                 repr(main.__spec__).partition(" at ")[0], main.__package__,
                 repr(getattr(main, "__cached__", "none")), main.__annotations__,
                 type(main.__loader__).__name__,
                 type(main.__builtins__).__name__, main is sys.modules[Pickled.__module__],
                 type(main).__name__],
        "collector": [gc.isenabled(), gc.get_threshold(), gc.get_debug()],
        "threads": [threading.main_thread().native_id == os.getpid(),
                    threading.current_thread() is threading.main_thread(),
                    [each.name for each in threading.enumerate()],
                    len(list(Path("/proc/self/task").iterdir())),
                    threading.get_native_id() == os.getpid()],
        "torch": [torch.Generator().initial_seed(), torch.get_num_threads(),
                  torch.get_num_interop_threads(),
                  str(torch.get_default_dtype()), torch.is_grad_enabled(),
                  torch.cuda.is_initialized(), torch.cuda.is_available(),
                  torch.get_deterministic_debug_mode()],
        "fault handler": faulthandler.is_enabled(),
        "warnings": [repr(each) for each in warnings.filters],
        "logging": [logging.root.level, repr(logging.root.handlers), logging.raiseExceptions,
                    logging.getLogger("torch").level,
                    [type(each).__name__ for each in logging.getLogger("torch").handlers]],
        "locale": [locale.getlocale(), locale.getpreferredencoding(), sys.getfilesystemencoding()],
        "temporary": tempfile.gettempdir(),
        "multiprocessing": [multiprocessing.current_process().name,
                            multiprocessing.parent_process(), multiprocessing.get_start_method(),
                            multiprocessing.current_process().daemon,
                            multiprocessing.active_children()],
        "pickled": pickle.loads(pickle.dumps(Pickled())).number,
        "children": [list(pool(method)) for method in ("spawn", "fork", "forkserver")],
    }


def pool(method):
    """Runs a function of the script in a process started by `method`."""
    with multiprocessing.get_context(method).Pool(1) as processes:
        yield from processes.map(square, [3])


if __name__ == "__main__":
    everything = seen()
    for name, value in everything.items():
        print(name, json.dumps(value, default=repr))
    random_ones = [torch.initial_seed(), torch.rand(3).tolist(), random.random(), np.random.rand(),
                   uuid.uuid4().hex,
                   next(tempfile._get_candidate_names()),
                   multiprocessing.current_process().authkey.hex()]
    print("random", json.dumps(random_ones))
    atexit.register(print, "exit: 1st registered, has __file__:", "__file__" in globals())
    atexit.register(lambda: print("exit: 2nd registered, has __file__:", "__file__" in globals()))
    threading.Thread(target=lambda: (threading.main_thread().join(), print("a thread outlives the "
                                                                           "script"))).start()
