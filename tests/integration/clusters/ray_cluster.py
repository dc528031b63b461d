"""A Ray cluster on this machine: `ray start`, a head without processors, and nodes with one
processor each, which tests kill and add."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Final, Self

import psutil
from shoal_common.system.processes import tied_to_parent

from tests.zygote import children

_PATIENCE_S: Final = 180.0
eventually = functools.partial(children.eventually, within_s=_PATIENCE_S)
_MARK: Final = "SHOAL_TEST_RAY"
_STORE: Final = str(80 * 2**20)
"""Bytes of shared memory of a node, the smallest size that Ray accepts."""


class RayCluster:
    """A Ray cluster whose nodes are processes on one machine. A context manager; `close` asserts
    that no process of Shoal is left."""

    def __init__(self, nodes: int) -> None:
        self._mark = uuid.uuid4().hex
        self._wanted = nodes
        # not pytest's directory: a socket's path has at most 107 characters
        self._directory = Path(tempfile.mkdtemp(prefix="ray-"))
        self._nodes: list[subprocess.Popen[bytes]] = []
        self.address = ""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SHOAL_", "PET_", "RAY_"))
        }
        self.environment = {
            **inherited,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            # By default 15: beside another busy process, workers would get hardly any time.
            "RAY_worker_niceness": "0",
            # Ray notices within seconds that a node was killed.
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_failure_threshold": "4",
            _MARK: self._mark,
        }

    def __enter__(self) -> Self:
        try:
            head = self._start(
                "--head",
                "--port",
                "0",
                "--include-dashboard=false",
                "--num-cpus",
                "0",
                "--temp-dir",
                str(self._directory),
            )
            received = re.search(r"ray start --address='(\S+)'", self._said(head))
            assert received is not None, self._said(head)
            self.address = received[1]
            self.environment["RAY_ADDRESS"] = self.address
            for _ in range(self._wanted):
                self.add_node()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def add_node(self) -> int:
        """Starts a node with one processor; returns its number."""
        self._start("--address", self.address, "--num-cpus", "1")
        return len(self._nodes) - 1

    def kill_node(self, number: int) -> None:
        """Kills a node's raylet with SIGKILL; to Ray, the machine is dead."""
        (raylet,) = [
            child
            for child in psutil.Process(self._nodes[number].pid).children()
            if child.name() == "raylet"
        ]
        raylet.kill()

    def drive(self, script: Path) -> subprocess.Popen[bytes]:
        """Starts a driver, `python SCRIPT`, which connects to this cluster. Its output goes to a
        file beside the script."""
        with script.with_suffix(".out").open("ab") as output:
            return subprocess.Popen(
                tied_to_parent([sys.executable, str(script)]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment,
                cwd=script.parent,
            )

    def wait_until_free(self) -> None:
        """Waits until no process of Shoal runs in the cluster."""
        eventually(
            lambda: not self._of_shoal(),
            lambda: f"the end of {[process.cmdline() for process in self._of_shoal()]}",
        )

    def _of_shoal(self) -> list[psutil.Process]:
        found = []
        for process in self._marked():
            with contextlib.suppress(psutil.Error):
                if any("shoal" in word for word in process.cmdline()[1:4]):
                    found.append(process)
        return found

    def _marked(self) -> list[psutil.Process]:
        """Returns all processes of this cluster, no matter what their parents are."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.environ().get(_MARK) == self._mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def _start(self, *flags: str) -> int:
        number = len(self._nodes)
        command = [
            "ray",
            "start",
            "--block",
            "--disable-usage-stats",
            "--object-store-memory",
            _STORE,
            *flags,
        ]
        with self._log(number).open("wb") as log:
            self._nodes.append(
                subprocess.Popen(
                    tied_to_parent(command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self.environment,
                )
            )
        eventually(
            lambda: "--block" in self._said(number), lambda: f"a node of Ray: {self._said(number)}"
        )
        return number

    def _log(self, number: int) -> Path:
        return self._directory / f"node-{number}.log"

    def _said(self, number: int) -> str:
        return self._log(number).read_text()

    def _kill(self) -> None:
        try:
            for process in self._marked():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            for node in self._nodes:
                node.wait(_PATIENCE_S)
            eventually(lambda: not self._marked(), lambda: f"the end of {self._marked()}")
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)
