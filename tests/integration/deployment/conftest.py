"""Services as processes, for tests of the images and the monitoring."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 60.0


class Processes:
    """Processes that are started one after the other and stopped in reverse order. Each has a log,
    and a port file if it writes one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()

    def start(
        self,
        name: str,
        command: list[str],
        *,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a process, by default in this process's environment."""
        log = self._stack.enter_context(self.log_path(name).open("wb"))
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment or os.environ,
            cwd=directory,
        )
        self._stack.callback(self.stop, name, process)
        return process

    def stop(self, name: str, process: subprocess.Popen[bytes]) -> int:
        """Sends SIGTERM and returns the exit status."""
        process.terminate()
        try:
            return process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            pytest.fail(
                f"{name} did not end within {DEADLINE_S:g} s of SIGTERM; it said: {self.log(name)}"
            )

    def log_path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def log(self, name: str) -> str:
        return self.log_path(name).read_text(errors="replace")

    def port_file(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def ports(self, name: str) -> dict[str, Any]:
        """Waits for a process's port file and returns its content."""
        path = self.port_file(name)
        return dict(
            self.wait_for(
                lambda: path.exists() and json.loads(path.read_text()), f"{name} to serve"
            )
        )

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """Waits until `condition` is true and returns its value."""
        deadline = time.monotonic() + DEADLINE_S
        while not (found := condition()):
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
                    for path in self.folder.glob("*.log")
                )
                pytest.fail(f"waited {DEADLINE_S:g} s for {what}\n{logs}")
            time.sleep(0.05)
        return found

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.close()
