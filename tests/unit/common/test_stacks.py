"""The Python stacks of another process are read while it hangs, no matter what it hangs in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from shoal_common.errors import DeadlineError, PreconditionError, UnknownResourceError
from shoal_common.system.stacks import read_stacks, serving_children

HANGS = {
    "sleep": "time.sleep(600)",
    "lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "the interpreter's lock": "PATTERN.match('a' * 60 + 'b')",
    "read": "os.read(os.pipe()[0], 1)",
    "loop": "while True: pass",
}


@contextmanager
def process(hang: str, *, before: str = "", serves: bool = True) -> Iterator[int]:
    """Starts a process that hangs in a function `hang`, and yields its pid."""
    code = f"""
import os, re, sys, threading, time
from shoal_common.system.stacks import serve_stacks
{"serve_stacks()" if serves else ""}
PATTERN = re.compile("(a+)+$")  # here, because compiling has frames of its own
{before}
def hang():
    print("hangs", flush=True)
    {hang}
hang()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "hangs\n"
            yield child.pid
        finally:
            for pid in [*serving_children(child.pid), child.pid]:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
def test_innermost_function_of_the_main_thread_names_where_a_process_hangs(
    hang: str,
) -> None:
    with process(hang) as pid:
        for _ in range(3):
            stack = read_stacks(pid)[0].splitlines()
            assert "in hang" in stack[0]
            assert "in <module>" in stack[-1]


def test_further_threads_follow_the_main_thread() -> None:
    other = "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    with process("time.sleep(600)", before=other) as pid:
        main, further = read_stacks(pid)
        assert "in hang" in main
        assert "in run" in further


def test_main_thread_comes_first_among_more_threads_than_faulthandler_writes() -> None:
    others = "[threading.Thread(target=time.sleep, args=(600,), daemon=True).start() for _ in "
    for hang in ("time.sleep(600)", "PATTERN.match('a' * 60 + 'b')"):
        with process(hang, before=f"{others}range(120)]") as pid:
            main, *further = read_stacks(pid)
            assert "in hang" in main.splitlines()[0]
            assert "in <module>" in main
            assert len(further) == 100
            assert all("in run" in each for each in further)


def test_forked_processes_serve_their_stacks_as_well() -> None:
    child = """
ready, told = os.pipe()
if os.fork() == 0:
    os.write(told, b"1")
    time.sleep(600)
os.read(ready, 1)
"""
    with process("time.sleep(600)", before=child) as pid:
        (forked,) = serving_children(pid)
        assert "in hang" not in read_stacks(forked)[0]
        assert "in hang" in read_stacks(pid)[0]


def test_a_stopped_process_is_named_with_its_state_and_answers_the_next_call() -> None:
    with process("time.sleep(600)") as pid:
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(DeadlineError, match=rf"pid {pid} .* within 0\.2 s .*T \(stopped\)"):
            read_stacks(pid, timeout=timedelta(seconds=0.2))
        os.kill(pid, signal.SIGCONT)
        assert "in hang" in read_stacks(pid)[0]


def test_a_process_that_does_not_serve_its_stacks_gets_no_signal() -> None:
    with process("time.sleep(600)", serves=False) as pid:
        with pytest.raises(PreconditionError, match=f"pid {pid} does not serve its stacks"):
            read_stacks(pid)
        os.kill(pid, 0)


def test_a_script_that_uses_the_signal_keeps_it() -> None:
    used = "import signal; signal.signal(signal.SIGRTMAX - 3, lambda *_: None)"
    code = f"{used}\nfrom shoal_common.system.stacks import serve_stacks\nassert not serve_stacks()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_ended_process_is_unknown() -> None:
    with process("time.sleep(600)") as pid:
        pass
    with pytest.raises(UnknownResourceError, match=f"there is no process {pid}"):
        read_stacks(pid)
