"""Makes a forked child behave like a fresh interpreter, and runs its script.

A worker can notice only these differences: modules that are already imported; the seed of `hash`,
which is the same in all workers of a warm process unless PYTHONHASHSEED is set; frames of this
package below the script's frames in stack dumps; and `gc.get_freeze_count()`.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import io
import mmap
import multiprocessing
import os
import runpy
import signal
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.machinery import BuiltinImporter, SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_MM: Final = 35
_PR_SET_MM_MAP: Final = 14
_HANDED_OVER_S: Final = 30.0
"""Maximum time in seconds for the intermediate process to exit."""


class Program:
    """The program that a forked worker runs."""

    def __init__(
        self,
        request: Mapping[str, Any],
        *,
        out: int,
        error: int,
        gate: int,
        between: int,
        launcher: int,
        added: Mapping[str, str],
    ) -> None:
        """Makes this process a worker. Exits if the launcher no longer wants the worker.

        Args:
            request: `command`, `environment` and `folder`, as sent by `launcher.workers.warm`.
            out: descriptor of the standard output.
            error: descriptor of the standard error.
            gate: pipe from the launcher, which writes to it when it has registered the worker, or
                closes it if it does not want the worker.
            between: process id of the current parent, the intermediate process, which is about to
                exit.
            launcher: process id of the launcher, the future parent.
            added: environment variables that the imports have set.
        """
        command: list[str] = request["command"]
        os.setsid()
        _follow_launcher(launcher, between=between)
        os.dup2(out, 1)
        os.dup2(error, 2)
        os.close(out)
        os.close(error)
        if not os.read(gate, 1):
            os._exit(1)
        os.close(gate)
        threads = os.environ.get("OMP_NUM_THREADS")
        environment: dict[str, str] = request["environment"]
        os.environ.clear()
        os.environ.update(environment)
        for name, value in added.items():
            os.environ.setdefault(name, value)
        if environment.get("OMP_NUM_THREADS", threads) != threads:
            sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
        _number_main_thread()
        _seed_anew()
        show_as(command, environment)
        importlib.invalidate_caches()
        sys.orig_argv[:] = command
        self._is_module = command[2] == "-m"
        self._target = command[3] if self._is_module else command[2]
        sys.argv[:] = command[3:] if self._is_module else command[2:]
        if self._is_module:
            sys.argv[0] = "-m"
        if request["folder"] and not sys.flags.safe_path:
            sys.path.insert(0, request["folder"])
        sys.modules["__main__"] = self._main = _new_main()

    def run(self) -> None:
        """Runs the script or module. An uncaught exception terminates the interpreter as if it had
        been started with the script."""
        try:
            if self._is_module:
                # called by `python -m`
                runpy._run_module_as_main(self._target)  # type: ignore[attr-defined]
            else:
                self._run_script()
        except SystemExit:
            raise
        except BaseException:
            sys.excepthook = self._without_own_frames(sys.excepthook)
            raise
        self._forget_file()

    def _run_script(self) -> None:
        # As in the interpreter, the path is not normalized. For an absolute path the working
        # directory is not needed; it may have been deleted during the run.
        path = self._target
        if not os.path.isabs(path):  # noqa: PTH117
            path = os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118
        try:
            with io.open_code(path) as file:
                source = file.read()
        except OSError as error:
            sys.stderr.write(
                f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] "
                f"{error.strerror}\n"
            )
            raise SystemExit(2) from None
        self._main.__file__ = path
        self._main.__dict__["__cached__"] = None
        self._main.__loader__ = SourceFileLoader("__main__", path)
        # this is the worker's own script
        exec(compile(source, path, "exec", dont_inherit=True), self._main.__dict__)  # noqa: S102

    def _forget_file(self) -> None:
        """Deletes the module attributes that the interpreter deletes after a script has finished
        and before exit handlers run."""
        if not self._is_module:
            self._main.__dict__.pop("__file__", None)
            self._main.__dict__.pop("__cached__", None)

    def _without_own_frames(self, hook: Any) -> Any:
        own = {__file__, str(Path(__file__).with_name("__main__.py"))}

        def excepthook(
            kind: type[BaseException], error: BaseException, traceback: TracebackType | None
        ) -> None:
            while traceback is not None and traceback.tb_frame.f_code.co_filename in own:
                traceback = traceback.tb_next
            sys.excepthook, sys.last_traceback = hook, traceback
            hook(kind, error.with_traceback(traceback), traceback)
            self._forget_file()

        return excepthook


def _follow_launcher(launcher: int, *, between: int) -> None:
    """Waits until the parent `between` has exited and the launcher is the parent, then makes the
    kernel kill this process when the launcher exits.

    Exits if a different process has become the parent, because the launcher has exited or has
    stopped waiting."""
    deadline = time.monotonic() + _HANDED_OVER_S
    while os.getppid() == between:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0002)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(1)


def _number_main_thread() -> None:
    """Corrects the main thread's native id, which Python 3.11 and 3.12 do not update after a
    fork."""
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]


def _seed_anew() -> None:
    """Reseeds the random generators that a fresh interpreter would seed from the operating system.
    Python reseeds its own generator after each fork."""
    sys.modules["torch"].default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    multiprocessing.current_process().authkey = os.urandom(32)


def _new_main() -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__.update(
        {"__annotations__": {}, "__builtins__": builtins, "__loader__": BuiltinImporter}
    )
    return main


def show_as(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Makes the kernel show this command line and environment for the process (in ps and /proc),
    because other programs identify workers by them. Returns False if the kernel does not support
    this."""
    words = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(
        os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items()
    )
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
    length = len(words) + len(variables)
    # This memory is never released, since the kernel reads it as long as the process lives.
    start = libc.mmap(
        None,
        ctypes.c_size_t(length),
        3,
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        -1,
        ctypes.c_long(0),
    )
    if start == ctypes.c_void_p(-1).value:
        return False
    ctypes.memmove(start, words + variables, length)
    # Fields 26 to 51 of /proc/PID/stat (proc(5)); the second is the program's name in parentheses,
    # which may contain any characters.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    code, end_code, stack = (int(fields[number - 3]) for number in (26, 27, 28))
    data, end_data, heap = (int(fields[number - 3]) for number in (45, 46, 47))
    middle, end = start + len(words), start + length
    layout = (
        code,
        end_code,
        data,
        end_data,
        heap,
        libc.sbrk(0),
        stack,
        start,
        middle,
        middle,
        end,
        0,
    )
    memory_map = struct.pack("12QIi", *layout, 0, -1)  # struct prctl_mm_map
    return bool(
        libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, memory_map, ctypes.c_ulong(len(memory_map)), 0) == 0
    )
