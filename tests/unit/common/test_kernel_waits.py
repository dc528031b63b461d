"""The kernel tells what a thread waits for, and that a computing thread does not wait."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shoal_common.system.kernel_waits import KernelWait, kernel_wait, process_state

from tests.zygote.children import eventually

Wait = Callable[[], object]


def opened_fifo(folder: Path) -> Iterator[Wait]:
    os.mkfifo(folder / "fifo")
    yield lambda: (folder / "fifo").open("rb").close()
    with (folder / "fifo").open("wb"):
        pass


def read_pipe(folder: Path) -> Iterator[Wait]:
    read, write = os.pipe()
    yield lambda: os.read(read, 1)
    os.write(write, b"1")


def locked_file(folder: Path) -> Iterator[Wait]:
    with (folder / "file").open("w") as one, (folder / "file").open("w") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        yield lambda: fcntl.flock(other, fcntl.LOCK_EX)
        fcntl.flock(one, fcntl.LOCK_UN)


def received(folder: Path) -> Iterator[Wait]:
    one, other = socket.socketpair()
    with one, other:
        yield lambda: one.recv(1)
        other.send(b"1")


def acquired(folder: Path) -> Iterator[Wait]:
    lock = threading.Lock()
    lock.acquire()
    yield lock.acquire
    lock.release()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (opened_fifo, "opening {folder}/fifo"),
        (read_pipe, "reading a pipe"),
        (locked_file, "waiting for the lock of the file {folder}/file"),
        (received, "waiting for the network"),
        (acquired, "waiting for a lock or another thread"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_file_lock_or_socket_that_a_thread_waits_for_is_named(
    tmp_path: Path, make: Callable[[Path], Iterator[Wait]], expected: str
) -> None:
    waits = make(tmp_path)
    thread = threading.Thread(target=next(waits), daemon=True)
    thread.start()
    looks, tid = KernelWait(), thread.native_id
    assert tid is not None
    eventually(lambda: looks.look(tid) == expected.format(folder=tmp_path), expected)
    next(waits, None)
    thread.join()
    assert kernel_wait(tid) == ""


def test_a_thread_that_computes_in_python_waits_for_nothing() -> None:
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    looks = KernelWait()
    assert thread.native_id is not None
    seen = []
    for _ in range(20):
        seen.append(looks.look(thread.native_id))
        time.sleep(0.01)  # in which the thread computes
    over.set()
    thread.join()
    assert set(seen) == {""}


def test_state_of_an_ended_process_is_empty() -> None:
    assert process_state(os.getpid()).startswith(("R", "S"))
    child = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitpid(child, 0)
    assert process_state(child) == ""
