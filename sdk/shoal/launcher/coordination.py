"""A coordinator for as long as a command runs: `shoal coordinate -- srun shoal run train.py`.

A batch system, or a loop over ssh, starts launchers on many machines, and is told nothing but a command line. They need one coordinator,
whose address is known only when it serves. Here it comes first, with a Redis of its own; then the command, whose environment names it.

The coordinator outlives what it coordinates: batch systems send SIGTERM to all processes of a job at once, while workers need it to leave
together. So the signal is blocked in it (and in its Redis), and it ends when the command has ended.

All belongs to the thread that calls `run`, the main one.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Final
from urllib.parse import quote

from shoal_common.errors import ConfigurationError, ShoalError
from shoal_common.process_secrets import SERVICE_SECRETS, secrets_to_hand_on
from shoal_common.processes import tied_to_parent
from shoal_common.scratch import ScratchDirectory

from shoal.launcher import slurm
from shoal.launcher.cluster import START_TIMEOUT, Service
from shoal.launcher.jobs import new_job_id
from shoal.launcher.process import ExitStatus, stop_all, wait_all

_STOP_GRACE: Final = timedelta(seconds=10)
_SHORT_LIFE_S: Final = 5.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Coordination:
    """One command with its coordinator. `run` may be called once."""

    def __init__(
        self, command: Sequence[str], *, host: str, insecure: bool, environment: Mapping[str, str], note: Callable[[str], None]
    ) -> None:
        """`host`: how other machines name this one. `insecure`: without TLS or tokens. Raises ConfigurationError."""
        if shutil.which(command[0]) is None:
            raise ConfigurationError(
                f"the command {command[0]!r} is not on PATH; expected a program and its arguments, as in -- srun shoal run"
            )
        self._command = command
        self._environment = environment
        self._note = note
        self._scratch = ScratchDirectory("coordinate")
        try:
            self._coordinator = self._service(host, insecure=insecure)
            self._variables = _variables(self._coordinator.address, command[0], environment)
        except BaseException:
            self._scratch.close()
            raise
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """The command's status. Raises ShoalError when the coordinator does not start, OSError when the command does not."""
        try:
            self._start_coordinator()
            told = self._variables
            self._note(
                f"coordinator at {self._coordinator.address} for job {told['PET_RDZV_ID']}"
                + (f", {told['PET_NNODES']} machines (SLURM)" if slurm.allocated(self._environment) else "")
            )
            with self._signals():
                # Its end is a signal's that it may act on; this process's own is SIGKILL's at most.
                command = tied_to_parent(self._command, death_signal=signal.SIGTERM)
                self._child = subprocess.Popen(command, env={**_for_command(self._environment), **told})
                return ExitStatus.from_returncode(self._wait(self._child)).code
        finally:
            self._close()

    def _service(self, host: str, *, insecure: bool) -> Service:
        given = self._environment
        redis = [] if given.get("SHOAL_COORDINATOR_REDIS") else ["--redis", _redis_url(host, self._scratch.path)]
        arguments = [*redis, *(["--insecure"] if insecure else [])]
        try:
            return Service("coordinator", "shoal_coordinator", arguments, directory=self._scratch.path, environment=given, host=host)
        except OSError as error:
            raise ConfigurationError(f"--host {host!r} is not this machine: {error}; name it as the other machines do") from error

    def _start_coordinator(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a child inherits it
        try:
            self._coordinator.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._coordinator.wait_ready(START_TIMEOUT)
        self._served_since = time.monotonic()

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        """Until the command has ended; a coordinator that dies meanwhile is started again, with what it knew."""
        ending = os.pidfd_open(child.pid)
        try:
            while True:
                poller = select.poll()
                poller.register(ending, select.POLLIN)
                if self._coordinator.child.status is None:
                    poller.register(self._coordinator.child.pidfd, select.POLLIN)
                if any(descriptor == ending for descriptor, _ in poller.poll()):
                    return child.wait()
                self._revive()
        finally:
            os.close(ending)

    def _revive(self) -> None:
        pid, status = self._coordinator.child.pid, self._coordinator.child.poll()
        lost = f"the coordinator (pid {pid}) ended ({status}; its last words: {self._coordinator.last_words()})"
        if time.monotonic() - self._served_since < _SHORT_LIFE_S:
            self._note(f"{lost} as soon as it served, and is given up: workers go on, but none can join or be replaced")
            return
        try:
            self._start_coordinator()
        except ShoalError as error:
            self._note(f"{lost} and does not come back: {error}; workers go on, but none can join or be replaced")
        else:
            self._note(f"{lost} and serves again as pid {self._coordinator.child.pid}")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Passed on, but for what the command gets by itself: a terminal's Ctrl-C, and SLURM's signals to its steps. srun would
        answer one of its own by killing them."""
        if self._child is not None and number != signal.SIGINT and not slurm.allocated(self._environment):
            self._child.send_signal(number)

    def _close(self) -> None:
        try:
            if self._coordinator.started:
                child = self._coordinator.child
                child.send(signal.SIGINT)
                wait_all([child], _STOP_GRACE)
                stop_all([child], grace=timedelta(0))
        finally:
            self._coordinator.release()
            self._scratch.close()


def _redis_url(host: str, directory: Path) -> str:
    return f"embedded://{f'[{host}]' if ':' in host else host}{quote(str(directory / 'redis'))}"


def _for_command(environment: Mapping[str, str]) -> dict[str, str]:
    """Without the coordinator's secrets; with those of the launchers, which may be on other machines, where no file of this one is."""
    return {**{name: value for name, value in environment.items() if name not in SERVICE_SECRETS}, **secrets_to_hand_on()}


def _variables(address: str, program: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What the command's processes read. A job id or a number of machines that is set already stays; the coordinator is this one."""
    in_slurm = slurm.allocated(environment)
    job_id = environment.get("PET_RDZV_ID") or (slurm.run_id(environment) if in_slurm else new_job_id(Path(program).name))
    run = {"PET_RDZV_ID": job_id, **(slurm.run_variables(environment) if in_slurm else {})}
    return {
        **{name: environment.get(name) or value for name, value in run.items()},
        "PET_RDZV_ENDPOINT": address,
        "SHOAL_COORDINATOR": address,
        "SHOAL_JOB_ID": job_id,
        "SHOAL_PS_SERVER_COORDINATOR": address,
        "SHOAL_PS_SERVER_JOB": job_id,
    }
