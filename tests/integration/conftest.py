"""The command `shoal` as a process, for tests of the launcher and the command line."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from shoal.launcher.clusters.registry import ClusterRecord, running_clusters
from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2 as pb

from tests.zygote.children import HELPER, ForkedProcess, Zygote

_DEADLINE_S = 200.0


class Command:
    """One running command. Its output goes to files, so that tests can read it while it grows."""

    def __init__(
        self,
        arguments: list[str],
        *,
        directory: Path,
        environment: dict[str, str],
        zygote: Zygote | None,
    ) -> None:
        """zygote: forks the process; None: a fresh process starts."""
        self._mark = uuid.uuid4().hex
        self._known: set[psutil.Process] = set()
        self._out, self._err = (directory / f"{self._mark}.{name}" for name in ("out", "err"))
        environment = {**environment, "SHOAL_TEST_COMMAND": self._mark}
        self.process: subprocess.Popen[bytes] | ForkedProcess
        with self._out.open("wb") as out, self._err.open("wb") as err:
            if zygote is None:
                self.process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    cwd=directory,
                    env=environment,
                )
            else:
                self.process = zygote.start_command(
                    "shoal",
                    arguments,
                    environment=environment,
                    directory=directory,
                    output=self._out,
                    error=self._err,
                )

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def wait(self) -> int:
        """Waits for the command and returns its exit status."""
        try:
            return self.process.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the command did not end; it said: {self.stdout}\n{self.stderr}")

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Waits for `condition`; fails if the command exits first."""
        deadline = time.monotonic() + _DEADLINE_S
        while not condition():
            ended = self.process.poll() is not None
            if time.monotonic() > deadline or (ended and not condition()):
                pytest.fail(
                    f"waited for {what}; the command {'ended' if ended else 'goes on'}; it said: "
                    f"{self.stdout}\n{self.stderr}"
                )
            time.sleep(0.01)

    def wait_for_output(self, *texts: str) -> None:
        self.wait_for(
            lambda: all(text in self.stdout for text in texts), f"{texts} on standard output"
        )

    def family(self) -> list[psutil.Process]:
        """Returns this command and the processes that it has started and that are still running, no
        matter what their parents are now.

        They are found by a variable in their environment. Valkey overwrites its environment, so it
        is found by its parent, and remembered.
        """
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SHOAL_TEST_COMMAND") == self._mark:
                    self._known |= {process, *process.children()}
        return [process for process in self._known if _runs(process) and not _is_helper(process)]

    def wait_until_gone(self) -> None:
        """Waits until no process of this command is running any more."""
        deadline = time.monotonic() + _DEADLINE_S
        while family := self.family():
            assert time.monotonic() < deadline, (
                f"still running: {[process.cmdline() for process in family]}"
            )
            time.sleep(0.03)  # it inspects all processes

    def close(self) -> None:
        """Ends the command with two signals, like pressing Ctrl-C twice, so that it can clean up.
        Kills it if that does not help."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    # each further signal is stronger
                    self.process.wait(5)
        self.wait_until_gone()


def _runs(process: psutil.Process) -> bool:
    """Returns whether a process is running and not already exiting. A killed process loses its
    memory first, and with it its command line."""
    try:
        return (
            process.is_running()
            and process.status() != psutil.STATUS_ZOMBIE
            and process.cmdline() != []
        )
    except psutil.NoSuchProcess:
        return False


def _is_helper(process: psutil.Process) -> bool:
    """Returns whether a process belongs to the test and the command has not used it for a child. It
    is killed when the command ends, and may outlive it for a moment."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline() == [HELPER]
    return False


class Shell:
    """Starts commands that share a registry of clusters and a directory."""

    def __init__(self, directory: Path, zygote: Zygote | None = None) -> None:
        """`zygote`: forks the commands `shoal`, which in turn fork the Python processes that they
        start (tests/zygote/commands.py); None: all start fresh."""
        self.directory = directory
        self._zygote = zygote
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("SHOAL_", "PET_"))
            },
            "XDG_RUNTIME_DIR": str(directory / "runtime"),
            "XDG_STATE_HOME": str(directory / "state"),
            "OMP_NUM_THREADS": "1",
            "SHOAL_PREEMPTION_NOTICE": "none",
        }
        self._commands: list[Command] = []

    def start(self, *arguments: str | Path, **variables: str) -> Command:
        """Starts `shoal ARGUMENTS`."""
        return self._start(self._zygote, sys.executable, "-m", "shoal", *arguments, **variables)

    def start_program(self, *arguments: str | Path, **variables: str) -> Command:
        """Starts a program in a fresh process."""
        return self._start(None, *arguments, **variables)

    def _start(self, zygote: Zygote | None, *arguments: str | Path, **variables: str) -> Command:
        command = Command(
            [str(a) for a in arguments],
            directory=self.directory,
            environment={**self.environment, **variables},
            zygote=zygote,
        )
        self._commands.append(command)
        return command

    def run(self, *arguments: str | Path, **variables: str) -> tuple[int, str, str]:
        """Runs `shoal ARGUMENTS` to its end; returns exit status, standard output and standard
        error."""
        command = self.start(*arguments, **variables)
        return command.wait(), command.stdout, command.stderr

    def script(self, text: str, name: str = "script.py") -> Path:
        path = self.directory / name
        path.write_text(text)
        return path

    def close(self) -> None:
        for command in self._commands:
            command.close()

    def cluster(self) -> ClusterRecord:
        """Waits for a running cluster and returns the newest one."""
        deadline = time.monotonic() + _DEADLINE_S
        while not (clusters := running_clusters(self.directory / "runtime" / "shoal")):
            assert time.monotonic() < deadline, "waited for a cluster"
            time.sleep(0.01)
        return clusters[0]

    def job(self) -> pb.GetJobResponse:
        """Returns the cluster's job, as the coordinator describes it."""
        record = self.cluster()
        with CoordinatorClient(ChannelSettings(address=record.coordinator)) as client:
            return client.get_job(record.job_id)

    def pids(self) -> list[int]:
        """Returns the process ids of the members with ranks, in rank order."""
        return [member.pid for member in self.job().members if member.rank >= 0]


def _zygote_for(request: pytest.FixtureRequest) -> Zygote | None:
    """Returns None for tests marked `fresh`, whose commands start fresh interpreters."""
    if request.node.get_closest_marker("fresh"):
        return None
    return request.getfixturevalue("zygote")


@pytest.fixture
def shell(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Shell]:
    """The command `shoal`; all processes that it has started have exited when the test ends. Tests
    marked `fresh` start fresh interpreters."""
    shell = Shell(tmp_path, _zygote_for(request))
    yield shell
    shell.close()


@pytest.fixture(scope="module")
def shared_shell(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Shell]:
    """One shell for all tests of a module, which must leave its cluster unchanged."""
    shell = Shell(tmp_path_factory.mktemp("shell"), _zygote_for(request))
    yield shell
    shell.close()


@pytest.fixture(scope="session")
def elastic_worker() -> Path:
    """A script that joins its job as shoal.init() does, without torch; see its docstring."""
    return Path(__file__).parent / "programs" / "elastic_worker.py"
