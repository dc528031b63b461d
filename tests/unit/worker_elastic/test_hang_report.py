"""A worker that makes no progress sends its stacks, and reads those of a silent neighbour."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shoal_worker.elastic.coordinator.hang_report import HangReport, neighbour_stacks
from shoal_worker.elastic.coordinator.progress import ProgressMeter
from shoal_worker.metrics import WorkerMetrics

from tests.unit.worker_elastic.test_progress import Clock
from tests.zygote.children import eventually


def test_stacks_are_due_once_while_there_is_no_progress() -> None:
    clock = Clock()
    meter = ProgressMeter(WorkerMetrics(), clock=clock)
    report = HangReport(meter)
    report.look()
    assert report.take() == ""  # the loop has not begun
    meter.entered()
    clock.now += 4.9
    report.look()
    assert report.take() == ""
    clock.now += 0.2
    report.look()
    assert "in test_stacks_are_due_once" in report.take()
    report.look()
    assert report.take() == ""
    meter.entered()
    clock.now += 6
    report.look()
    assert "in test_stacks_are_due_once" in report.take()


def test_threads_of_the_script_are_included_unless_the_worker_waits_for_its_peers() -> None:
    clock = Clock()
    meter = ProgressMeter(WorkerMetrics(), clock=clock)
    waits = threading.Event()
    waited_for: queue.SimpleQueue[int] = queue.SimpleQueue()

    def prefetch() -> None:
        waits.set()
        waited_for.get()

    thread = threading.Thread(target=prefetch, name="prefetch", daemon=True)
    thread.start()
    assert waits.wait(60)
    try:
        meter.entered()
        clock.now += 6
        report = HangReport(meter)
        report.look()
        assert "thread prefetch:\n" in report.take()
        meter.entered()
        with meter.waits.of("all_reduce"):
            clock.now += 6
            report.look()
            assert "prefetch" not in report.take()
    finally:
        waited_for.put(0)
        thread.join()


def test_threads_with_equal_stacks_share_one_entry() -> None:
    clock = Clock()
    meter = ProgressMeter(WorkerMetrics(), clock=clock)
    ends = threading.Event()
    threads = [
        threading.Thread(target=lambda: ends.wait(60), name=f"reader-{number}", daemon=True)
        for number in range(40)
    ]
    report = HangReport(meter)

    def shown() -> bool:
        meter.entered()
        clock.now += 6
        report.look()
        return "and 39 more like it:\n" in report.take()

    try:
        for thread in threads:
            thread.start()
        eventually(shown, "all threads to wait in the same line")
    finally:
        ends.set()
        for thread in threads:
            thread.join()


@contextmanager
def member(line: str) -> Iterator[int]:
    """Starts a process with the id of member m1 that hangs in `line`, and yields its pid."""
    code = (
        "import os, re\nfrom shoal_common.system.stacks import serve_stacks\n"
        f"serve_stacks()\nprint(flush=True); {line}"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "SHOAL_MEMBER_ID": "m1"},
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        try:
            child.stdout.readline()
            yield child.pid
        finally:
            os.kill(child.pid, signal.SIGKILL)


def test_neighbour_whose_call_holds_the_gil_is_described() -> None:
    with member("re.match('(a+)+$', 'a' * 60 + 'b')") as pid:
        seen = neighbour_stacks("m1", pid)
        assert neighbour_stacks("m2", pid) is None  # another member had this pid
    assert seen is not None
    assert "<string>:4" in seen.script_line
    assert seen.script_line.endswith("in a call that holds Python's lock")
    assert 'File "<string>", line 4 in <module>' in seen.stacks
    assert neighbour_stacks("m1", pid) is None


def test_stopped_neighbour_is_described() -> None:
    with member("os.kill(os.getpid(), 19)") as pid:
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        seen = neighbour_stacks("m1", pid)
    assert seen is not None
    assert f"it is stopped (pid {pid})" in seen.script_line
