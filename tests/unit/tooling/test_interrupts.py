"""Processes started by tests can be interrupted, even if the tests run in the background of a
shell."""

from __future__ import annotations

import signal
import subprocess

from tests.conftest import heed_interrupts


def test_process_started_in_the_background_by_a_test_ends_on_ctrl_c() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in such a shell
    try:
        heed_interrupts()
        with subprocess.Popen(["sleep", "30"]) as sleeper:
            sleeper.send_signal(signal.SIGINT)
            assert sleeper.wait() == -signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)
