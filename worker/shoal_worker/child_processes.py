"""Helpers for data workers and Shoal's own threads. They ensure that this process never waits
forever for a data worker or thread that has failed."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import multiprocessing.queues
import multiprocessing.util
import os
import pickle
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Final

from shoal_common.errors import ConfigurationError

_LONGEST: Final = 107
"""Maximum length of a Unix socket's path, in bytes."""
_SOCKET: Final = len("/pymp-12345678/listener-12345678")
"""Number of characters that multiprocessing appends to the temporary directory."""
# multiprocessing creates its own subdirectory in it, with mode 0700
_SHORT: Final = "/tmp"  # noqa: S108


def keep_socket_paths_short() -> None:
    """Makes multiprocessing use /tmp if the name of the temporary directory is too long. Must be
    called before data workers start, because they pass tensors through sockets in that directory.
    If a socket's path is too long, multiprocessing loses each batch and only prints an error.

    Raises:
        ConfigurationError: /tmp cannot be written to."""
    chosen = tempfile.gettempdir()
    if len(os.fsencode(chosen)) + _SOCKET <= _LONGEST:
        return
    before, tempfile.tempdir = tempfile.tempdir, _SHORT
    try:
        there = multiprocessing.util.get_temp_dir()  # multiprocessing keeps its first result
    except OSError as error:
        raise _too_long(chosen, f"{_SHORT} cannot be used instead: {error}") from error
    finally:
        tempfile.tempdir = before
    if len(os.fsencode(there)) + len("/listener-12345678") > _LONGEST:
        raise _too_long(chosen, f"multiprocessing has already created {there}")


def _too_long(chosen: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"TMPDIR={chosen!r} has {len(os.fsencode(chosen))} bytes: data workers (num_workers=) "
        f"pass batches through sockets there, whose paths may have at most {_LONGEST} bytes, and "
        f"{why}; set TMPDIR to a directory of at most {_LONGEST - _SOCKET} bytes"
    )


@contextlib.contextmanager
def explained_pickling(num_workers: int) -> Iterator[None]:
    """Context for starting data workers. Raises ConfigurationError if an object that they need
    cannot be pickled, which every start method except "fork" requires."""
    try:
        yield
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        method = multiprocessing.get_start_method()
        if method == "fork":
            raise
        raise ConfigurationError(
            f"num_workers={num_workers}: data workers are started with method {method!r} "
            "(Python's default from 3.14 on is 'forkserver'), which pickles the dataset and its "
            f"functions, but pickling failed: {error}. Define them at the top level of a module, "
            "or call multiprocessing.set_start_method('fork') first"
        ) from error


def check_not_imported_again() -> None:
    """Raises ConfigurationError if this process is a data worker that is importing the script, as
    happens with every start method except "fork". Otherwise the script would start training in the
    data worker."""
    process = multiprocessing.process.current_process()
    if getattr(process, "_inheriting", False):  # same test as in multiprocessing itself
        raise ConfigurationError(
            f"process {process.name} is started with method "
            f"{multiprocessing.get_start_method()!r} (Python's default from 3.14 on is "
            "'forkserver'), with which each data worker imports the script, but the script calls "
            "Shoal at its top level. Move those calls below `if __name__ == '__main__':`, or "
            "call multiprocessing.set_start_method('fork') first"
        )


def end_if_a_batch_is_lost() -> None:
    """Makes a data worker exit if it cannot send a batch, so that the rank raises an error within
    seconds. By default multiprocessing prints an error and continues, and the rank would wait for
    the batch forever."""

    def end(error: BaseException, _batch: Any) -> None:
        traceback.print_exception(error)
        # printed for the rank's log
        print(  # noqa: T201
            "shoal: a data worker could not send its batch and exited", file=sys.stderr, flush=True
        )
        os._exit(1)

    # multiprocessing defines this hook for concurrent.futures
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(end)  # type: ignore[attr-defined]


_AWAITED: Final = frozenset(
    f"shoal-{name}"
    for name in (
        "link",
        "donor",
        "watch",
        "desync-detector",
        "leases",
        "store-wakeups",
        "gloo-watch",
        "mpi-progress",
    )
)
"""Threads that live as long as the process is part of a job. The training thread or its peers wait
for them, so an exception that ends one is reported."""


def report_dead_threads(report: Callable[[str], object]) -> None:
    """Sets the function to call with a message when one of Shoal's own threads has ended with an
    exception. The function is called after the traceback has been printed."""
    before = threading.excepthook

    def note(arguments: threading.ExceptHookArgs) -> None:
        before(arguments)
        thread = arguments.thread
        if thread is not None and thread.name in _AWAITED and not sys.is_finalizing():
            report(
                f"thread {thread.name} ended with {arguments.exc_type.__name__}: "
                f"{arguments.exc_value}"
            )

    threading.excepthook = note
