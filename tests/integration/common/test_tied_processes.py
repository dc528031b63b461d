"""Child processes that cannot outlive the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from shoal_common.system.processes import tied_to_parent

_SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


def test_program_replaces_the_wrapper():
    done = subprocess.Popen(
        tied_to_parent([sys.executable, "-c", "import os; print(os.getpid())"]),
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = done.communicate(timeout=60)
    assert int(output) == done.pid


def test_exit_status_is_that_of_the_program():
    assert (
        subprocess.run(tied_to_parent(["sh", "-c", "exit 7"]), timeout=60, check=False).returncode
        == 7
    )


def test_chosen_signal_arrives_when_the_starting_thread_ends():
    """EmbeddedRedis works around this rule of the kernel; if the rule changes, the workaround can
    be removed."""
    children: list[subprocess.Popen[str]] = []
    release = threading.Event()

    def start() -> None:
        children.append(
            subprocess.Popen(
                tied_to_parent(_SLEEPER, death_signal=signal.SIGTERM),
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert children[0].stdout
        assert children[0].stdout.readline() == "up\n"
        release.wait(60)

    starter = threading.Thread(target=start)
    starter.start()
    release.set()
    starter.join(60)
    with children[0] as child:
        assert child.wait(60) == -signal.SIGTERM


def test_child_whose_parent_is_already_gone_does_not_start():
    command = tied_to_parent(["true"])
    command[command.index(str(os.getpid()))] = "1"
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "the parent process is gone" in done.stderr
