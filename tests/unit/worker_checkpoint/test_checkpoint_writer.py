"""Checkpoints are written in the background, one at a time, and no error is lost."""

import os
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
from shoal_common.errors import DeadlineError, UnavailableError
from shoal_worker.checkpoint.writer import CheckpointWriter

SOON = timedelta(seconds=20)


@pytest.fixture
def writer():
    writer = CheckpointWriter()
    yield writer
    writer.close(SOON)


def test_a_job_runs_beside_the_caller(writer):
    go, done = threading.Event(), []

    def job():
        assert go.wait(20)
        done.append(threading.current_thread().name)

    writer.submit(job, what="writing step-1", timeout=SOON)
    assert writer.busy
    assert done == []
    go.set()
    writer.wait(SOON)
    assert done == ["writing step-1"]
    assert not writer.busy


def test_a_job_has_a_lower_priority_than_training(writer):
    found = []

    def job():
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    writer.submit(job, what="writing step-1", timeout=SOON)
    writer.wait(SOON)
    assert found == [min(before + 10, 19)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_jobs_never_overlap_and_keep_their_order(writer):
    running, log = [], []

    def job(number):
        running.append(number)
        log.append((number, len(running)))
        running.remove(number)

    for number in range(20):
        writer.submit(lambda number=number: job(number), what=f"job {number}", timeout=SOON)
    writer.wait(SOON)
    assert log == [(number, 1) for number in range(20)]


@pytest.mark.parametrize("call", ["submit", "wait", "close"])
def test_an_error_is_raised_once_by_the_next_call_and_logged_at_once(writer, call, caplog):
    error = UnavailableError("disk full")
    ran = []

    def fail():
        raise error

    writer.submit(fail, what="writing step-1", timeout=SOON)
    calls = {
        "submit": lambda: writer.submit(lambda: ran.append(1), what="writing step-2", timeout=SOON),
        "wait": lambda: writer.wait(SOON),
        "close": lambda: writer.close(SOON),
    }
    with pytest.raises(UnavailableError) as raised:
        calls[call]()
    assert raised.value is error
    assert ran == []
    assert "writing step-1 failed: disk full" in caplog.text
    calls[call]()


def test_job_that_takes_too_long_is_named_and_continues(writer):
    go, done = threading.Event(), []
    writer.submit(
        lambda: go.wait(20) and done.append(1), what="writing step-7 to ckpt", timeout=SOON
    )
    with pytest.raises(DeadlineError, match="writing step-7 to ckpt"):
        writer.submit(lambda: None, what="the next", timeout=timedelta(seconds=0.05))
    go.set()
    writer.wait(SOON)
    assert done == [1]


def test_exiting_process_finishes_the_checkpoint_in_progress(tmp_path):
    program = """
import sys, threading
from datetime import timedelta
from pathlib import Path
from shoal_worker.checkpoint.writer import CheckpointWriter
def job():
    threading.main_thread().join(20)  # until the script is over and the process about to end
    Path(sys.argv[1]).write_text("whole")
CheckpointWriter().submit(job, what="writing", timeout=timedelta(seconds=1))
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "out")], check=True, timeout=60)
    assert (tmp_path / "out").read_text() == "whole"
