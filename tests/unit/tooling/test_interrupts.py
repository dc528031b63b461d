"""Processes started by tests can be interrupted, even if the tests run in the background of a
shell."""

from __future__ import annotations

import signal
import subprocess

from tests.conftest import heed_interrupts


def test_a_process_that_tests_in_the_background_start_ends_on_ctrl_c() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in such a shell
    try:
        heed_interrupts()
        with subprocess.Popen(["sleep", "30"]) as sleeper:
            sleeper.send_signal(signal.SIGINT)
            assert sleeper.wait() == -signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)
