"""Processes for tests on devices, each a new interpreter. CUDA cannot be used in a process that was
forked after torch has queried the devices, so the zygote's processes are for the host only."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from shoal_common.system.processes import tied_to_parent

from tests.zygote.children import Child, Zygote

_ROOT = Path(__file__).parents[2]


class Fresh(Zygote):
    """Starts the programs "coordinator" and "script" like a zygote, but slowly."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []
        self._watchers: list[threading.Thread] = []

    def start(
        self, program: str, arguments: Sequence[str], *, output: Path, **environment: str
    ) -> Child:
        """Implements `Zygote.start`."""
        words = {"coordinator": ["-m", "shoal_coordinator"], "script": []}[program]
        search = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with output.open("ab") as log:
            process = subprocess.Popen(
                tied_to_parent([sys.executable, *words, *arguments]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1", **environment},
                cwd=_ROOT,
            )
        child = Child(output)
        child.pid = process.pid
        child.started.set()
        self._running.append(process)
        watcher = threading.Thread(target=self._watch, args=(process, child))
        watcher.start()
        self._watchers.append(watcher)
        return child

    def close(self) -> None:
        """Implements `Zygote.close`."""
        for process in self._running:
            process.kill()
        for watcher in self._watchers:
            watcher.join()

    @staticmethod
    def _watch(process: subprocess.Popen[bytes], child: Child) -> None:
        child.status = process.wait()
        child.ended.set()
