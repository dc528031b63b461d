"""Data workers and helper threads of this process: if one fails, the process that waits for it must
not wait for ever."""

from __future__ import annotations

import multiprocessing.queues
import multiprocessing.util
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import Any, Final

from shoal_common.errors import ConfigurationError

_LONGEST: Final = 107
"""Bytes of a Unix socket's path, at most."""
_SOCKET: Final = len("/pymp-12345678/listener-12345678")
"""Characters that multiprocessing appends to the temporary directory."""
# multiprocessing makes a directory of its own in it, with mode 0700
_SHORT: Final = "/tmp"  # noqa: S108


def keep_socket_paths_short() -> None:
    """Before data workers start. They pass tensors through sockets in the temporary directory, or
    in /tmp if its name is too long for them: multiprocessing would lose each batch, and print an
    error.

    Raises:
        ConfigurationError: /tmp cannot be written to.
    """
    chosen = tempfile.gettempdir()
    if len(os.fsencode(chosen)) + _SOCKET <= _LONGEST:
        return
    before, tempfile.tempdir = tempfile.tempdir, _SHORT
    try:
        there = multiprocessing.util.get_temp_dir()  # it keeps what it returns first
    except OSError as error:
        raise _too_long(chosen, f"{_SHORT} cannot be used in its place: {error}") from error
    finally:
        tempfile.tempdir = before
    if len(os.fsencode(there)) + len("/listener-12345678") > _LONGEST:
        raise _too_long(chosen, f"multiprocessing has made {there} already")


def _too_long(chosen: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"TMPDIR={chosen!r} has {len(os.fsencode(chosen))} bytes: data workers (num_workers=) pass "
        f"batches through sockets there, whose paths have at most {_LONGEST}, and {why}; set "
        f"TMPDIR to a directory of at most {_LONGEST - _SOCKET} bytes"
    )


def end_if_a_batch_is_lost() -> None:
    """In a data worker: ends it if a batch cannot be sent, so that the rank raises within seconds.
    multiprocessing prints an error and goes on, and the rank would wait for the batch for ever."""

    def end(error: BaseException, _batch: Any) -> None:
        traceback.print_exception(error)
        # for the rank's log
        print(  # noqa: T201
            "shoal: a data worker could not send its batch, and ends", file=sys.stderr, flush=True
        )
        os._exit(1)

    # a hook, for concurrent.futures
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
"""Threads that live as long as the process takes part, and that the training thread, or its peers,
wait for."""


def report_dead_threads(report: Callable[[str], object]) -> None:
    """Calls `report` from now on when one of Shoal's own threads ends by an exception, after its
    traceback was printed."""
    before = threading.excepthook

    def note(arguments: threading.ExceptHookArgs) -> None:
        before(arguments)
        thread = arguments.thread
        if thread is not None and thread.name in _AWAITED and not sys.is_finalizing():
            report(
                f"its thread {thread.name} ended with {arguments.exc_type.__name__}: "
                f"{arguments.exc_value}"
            )

    threading.excepthook = note
