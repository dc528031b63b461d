"""Runs a coordinator while a command runs: `shoal coordinate -- srun shoal run train.py`.

A batch system, or a loop over ssh, starts launchers on many machines with the same command line.
They need one coordinator, whose address is not known before it is running. The coordinator is
therefore started first, with its own Redis server. Then the command is started, with the
coordinator's address in its environment. When the command has exited, the coordinator is stopped
(`hosted_coordinator`).

All objects belong to the thread that calls `run`, the main thread.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from shoal_common.errors import ConfigurationError
from shoal_common.security.secrets import SERVICE_SECRETS, secrets_to_hand_on
from shoal_common.system.processes import tied_to_parent
from shoal_common.system.scratch import ScratchDirectory

from shoal.launcher.clusters import slurm
from shoal.launcher.clusters.hosted_coordinator import HostedCoordinator
from shoal.launcher.clusters.jobs import new_job_id
from shoal.launcher.processes.process import ExitStatus

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOK_MS: Final = 500
"""Polling interval in milliseconds. Polling is needed because a signal that arrives just before a
wait does not interrupt it, and the signal's handler runs only after the wait."""


class Coordination:
    """A command, and the coordinator that runs as long as the command. `run` may be called once."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        host: str,
        insecure: bool,
        environment: Mapping[str, str],
        note: Callable[[str], None],
    ) -> None:
        """`host`: name under which other machines reach this machine. `insecure`: True to use
        neither TLS nor tokens. Raises ConfigurationError."""
        if shutil.which(command[0]) is None:
            raise ConfigurationError(
                f"the program {command[0]!r} was not found on PATH; expected a program and "
                "its arguments, as in -- srun shoal run"
            )
        self._command = command
        self._environment = environment
        self._note = note
        self._scratch = ScratchDirectory("coordinate")
        try:
            self._coordinator = HostedCoordinator(
                self._scratch.path,
                host=host,
                arguments=["--insecure"] if insecure else [],
                environment=environment,
                note=note,
            )
            self._variables = _variables(self._coordinator.address, command[0], environment)
        except BaseException:
            self._scratch.close()
            raise
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Runs the command and returns its status. Raises ShoalError if the coordinator does not
        start, and OSError if the command does not start."""
        try:
            self._coordinator.start()
            variables = self._variables
            self._note(
                f"coordinator at {self._coordinator.address} for job {variables['PET_RDZV_ID']}"
                + (
                    f", {variables['PET_NNODES']} machines (SLURM)"
                    if slurm.allocated(self._environment)
                    else ""
                )
            )
            with self._signals():
                # If this process dies, which only SIGKILL can cause, the command receives a signal
                # that it can handle.
                command = tied_to_parent(self._command, death_signal=signal.SIGTERM)
                self._child = subprocess.Popen(
                    command, env={**_for_command(self._environment), **variables}
                )
                return ExitStatus.from_returncode(self._wait(self._child)).code
        finally:
            self._close()

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        """Waits until the command has exited. If the coordinator dies during the wait, restarts it
        with its data."""
        ending = os.pidfd_open(child.pid)
        try:
            while True:
                poller = select.poll()
                poller.register(ending, select.POLLIN)
                if self._coordinator.is_running:
                    poller.register(self._coordinator.pidfd, select.POLLIN)
                ready = {descriptor for descriptor, _ in poller.poll(_LOOK_MS)}
                if ending in ready:
                    return child.wait()
                if ready:
                    self._coordinator.keep_up()
        finally:
            os.close(ending)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Forwards a signal to the command. Does not forward SIGINT, because the terminal sends
        Ctrl-C to the command too. Does nothing under SLURM: SLURM signals its job steps itself, and
        a forwarded signal would make srun kill its step."""
        if (
            self._child is not None
            and number != signal.SIGINT
            and not slurm.allocated(self._environment)
        ):
            self._child.send_signal(number)

    def _close(self) -> None:
        try:
            self._coordinator.close()
        finally:
            self._scratch.close()


def _for_command(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the command's environment. It lacks the coordinator's secrets but contains the
    launchers' secrets, because launchers may run on machines that cannot read this machine's
    files."""
    return {
        **{name: value for name, value in environment.items() if name not in SERVICE_SECRETS},
        **secrets_to_hand_on(),
    }


def _variables(address: str, program: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables from which the command's processes learn the coordinator's address and
    the job. A job id or a number of machines that is already set is kept; the coordinator's address
    is always replaced."""
    in_slurm = slurm.allocated(environment)
    job_id = environment.get("PET_RDZV_ID") or (
        slurm.run_id(environment) if in_slurm else new_job_id(Path(program).name)
    )
    run = {"PET_RDZV_ID": job_id, **(slurm.run_variables(environment) if in_slurm else {})}
    return {
        **{name: environment.get(name) or value for name, value in run.items()},
        "PET_RDZV_ENDPOINT": address,
        "SHOAL_COORDINATOR": address,
        "SHOAL_JOB_ID": job_id,
        "SHOAL_PS_SERVER_COORDINATOR": address,
        "SHOAL_PS_SERVER_JOB": job_id,
    }
