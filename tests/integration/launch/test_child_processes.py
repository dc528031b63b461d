"""Child processes of a launcher: how it notices their end, and that none of them outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from shoal.launcher.processes.ports import ReservedPort, ServiceAddresses, read_port_file
from shoal.launcher.processes.process import (
    Child,
    ExitStatus,
    Handle,
    descendants,
    start_ticks,
    stop_all,
    wait_all,
)
from shoal_common.errors import CorruptDataError

DEADLINE = timedelta(seconds=60)


def python(code: str, **options: object) -> Child:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return Child(
        command,
        environment=os.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        **options,
    )  # type: ignore[arg-type]


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE.total_seconds()
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.01)


def ended(child: Child) -> ExitStatus:
    assert wait_all([child], DEADLINE) == []
    assert child.status is not None
    return child.status


def gone(pid: int) -> bool:
    return start_ticks(pid) is None


@pytest.mark.parametrize(
    ("code", "status"),
    [("exit(7)", ExitStatus(7)), ("import os; os.kill(os.getpid(), 9)", ExitStatus(137, 9))],
)
def test_exit_codes_and_signals_are_returned(code: str, status: ExitStatus) -> None:
    assert ended(python(code)) == status


def test_missing_program_is_an_error() -> None:
    child = Child(
        ["/no/such/program"],
        environment=os.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert not ended(child).ok


def test_a_child_leads_its_own_session() -> None:
    child = python("import time; time.sleep(60)")
    assert os.getsid(child.pid) == child.pid
    assert os.getpgid(child.pid) == child.pid
    stop_all([child], grace=DEADLINE)


def test_event_loop_is_notified_of_the_end_at_once() -> None:
    timers = 0

    class Counting(asyncio.SelectorEventLoop):
        def call_at(self, *arguments: Any, **more: Any) -> asyncio.TimerHandle:
            nonlocal timers
            timers += 1
            return super().call_at(*arguments, **more)

    async def story() -> None:
        child = python("import time; time.sleep(60)")
        waiting = asyncio.create_task(child.wait())
        await asyncio.sleep(0)
        child.kill()
        assert (await asyncio.wait_for(waiting, DEADLINE.total_seconds())).signal == signal.SIGKILL

    with asyncio.Runner(loop_factory=Counting) as runner:
        runner.run(story())
    assert timers == 1, "beside this test's own deadline it looks by the clock"


def test_descendants_of_a_child_end_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    child = python(f"""
        import os, subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open({str(note)!r}, "w").write(str(child.pid))
        os._exit(0)
    """)
    assert ended(child).ok
    until(lambda: gone(int(note.read_text())), "the grandchild's end")


def test_stopping_first_lets_children_handle_sigterm(tmp_path: Path) -> None:
    ready, log = tmp_path / "ready", tmp_path / "log"
    child = python(f"""
        import pathlib, signal, sys
        def leave(*_):
            pathlib.Path({str(log)!r}).write_text("left")
            sys.exit(5)
        signal.signal(signal.SIGTERM, leave)
        pathlib.Path({str(ready)!r}).touch()
        signal.pause()
    """)
    until(ready.exists, "the handler")
    stop_all([child], grace=DEADLINE)
    assert (child.status, log.read_text()) == (ExitStatus(5), "left")


def test_stopping_kills_unresponsive_children_and_their_descendants_in_other_sessions(
    tmp_path: Path,
) -> None:
    note = tmp_path / "pid"
    child = python(f"""
        import pathlib, signal, subprocess, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
        hidden = subprocess.Popen(sleeping, start_new_session=True)
        pathlib.Path({str(note)!r}).write_text(str(hidden.pid))
        signal.pause()
    """)
    until(lambda: note.exists() and note.read_text(), "the grandchild")
    assert [process.pid for process in descendants(child.pid)] == [int(note.read_text())]
    stop_all([child], grace=timedelta(milliseconds=50))
    assert child.status == ExitStatus(137, 9)
    assert gone(int(note.read_text()))


def test_children_die_with_a_killed_launcher(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
                import os, pathlib, signal, subprocess, sys
                from shoal.launcher.processes.process import Child
                sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
                child = Child(sleeping, environment=os.environ,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                pathlib.Path({str(note)!r}).write_text(str(child.pid))
                signal.pause()
            """),
        ]
    )
    until(lambda: note.exists() and note.read_text(), "the child")
    # From here on the wrapper has replaced itself by the command, or the child ends by itself
    # because its parent is gone.
    launcher.kill()
    launcher.wait(DEADLINE.total_seconds())
    until(lambda: gone(int(note.read_text())), "the child's end")


def test_handle_identifies_one_process_permanently() -> None:
    child = python("import time; time.sleep(60)")
    handle = Handle(child.pid)
    assert not handle.wait(timedelta(0))
    handle.kill()
    assert handle.wait(DEADLINE)
    ended(child)
    handle.kill()  # no effect, even if another process has that pid now
    handle.close()
    with pytest.raises(ProcessLookupError):
        Handle(child.pid)


def test_reserved_port_can_be_reported_before_a_process_listens_on_it() -> None:
    import socket

    with ReservedPort() as reserved:
        taker = socket.create_server(("127.0.0.1", reserved.port))
        socket.create_connection(("127.0.0.1", reserved.port), timeout=5).close()
        taker.close()


def test_port_files_are_read_once_they_exist(tmp_path: Path) -> None:
    path = tmp_path / "service.json"
    assert read_port_file(path) is None
    path.write_text('{"grpc": "127.0.0.1:1", "http": "127.0.0.1:2", "pid": 3}')
    assert read_port_file(path) == ServiceAddresses(
        grpc="127.0.0.1:1", http="127.0.0.1:2", redis=""
    )
    path.write_text("[]")
    with pytest.raises(CorruptDataError, match="port file"):
        read_port_file(path)
