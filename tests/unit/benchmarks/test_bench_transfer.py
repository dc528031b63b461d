"""Systems that move tensors take turns: one that polls uses no processor time during the turns of
the others."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from benchmarks.processes import Stage
from benchmarks.ps_transfer import Side

POLLS = "import pathlib, sys\npathlib.Path(sys.argv[1]).touch()\nwhile True: pass"


def test_a_system_that_polls_stalls_until_its_turn(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with Stage() as stage:
        polling = stage.start("polls", [sys.executable, "-c", POLLS, str(begun)])
        stage.wait_until("the process that polls", begun.exists, timeout_s=30)
        side = Side(key="polls", name="polls", polls=True, processes=stage.processes())
        process = psutil.Process(polling.pid)
        side.stand_still()
        stage.wait_until(
            "its standing still", lambda: process.status() == psutil.STATUS_STOPPED, timeout_s=10
        )
        side.go_on()
        stage.wait_until(
            "its going on", lambda: process.status() == psutil.STATUS_RUNNING, timeout_s=10
        )
