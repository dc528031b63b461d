"""Performs one training run of the demo: starts it as a user would, observes it through the
coordinator, injects the faults, and verifies that no processes remain."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import DeadlineError, InternalError, ShoalError
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.system.processes import tied_to_parent
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal.demo import trace
from shoal.launcher.clusters.registry import ClusterRecord, running_clusters

_POLL_S = 0.2
_MARK = "SHOAL_DEMO_RUN"
_SERVER = "shoal_ps_server"
"""Text that identifies a parameter server's command line."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run of the demo, with the faults to inject."""

    title: str
    strategy: str
    epochs: int
    total_steps: int
    """Number of optimizer steps of the run, summed over all workers if they take steps
    independently."""
    workers: int = 3
    servers: int = 0
    kill_at: float | None = None
    """Fraction of the run after which a parameter server, or a worker if there are none, gets
    SIGKILL; None: no kill."""
    environment: Mapping[str, str] = field(default_factory=dict)
    patience: timedelta = timedelta(seconds=60)
    """Maximum time without a new step. The total duration of the run is not limited."""


@dataclass(kw_only=True)
class Outcome:
    """Observations of one run."""

    plan: Plan
    directory: Path
    exit_code: int = -1
    killed_unix_s: float | None = None
    killed: str = ""
    """Human-readable description of the killed process."""
    left_running: list[str] = field(default_factory=list)

    @property
    def records(self) -> Path:
        """Directory where the loaders record every sample."""
        return self.directory / "records"

    @property
    def traces(self) -> Path:
        """Directory where the workers record their steps."""
        return self.directory / "traces"

    @property
    def log(self) -> Path:
        """File with the output of the run."""
        return self.directory / "output.log"


Show = Callable[[Plan, pb.GetJobResponse | None, Outcome], None]


def perform(plan: Plan, directory: Path, show: Show) -> Outcome:
    """Performs the run `plan` until it has ended. `show`: called several times per second with the
    current state.

    Raises:
        DeadlineError: the run made no progress for longer than the plan allows; it was stopped.
    """
    outcome = Outcome(plan=plan, directory=directory)
    outcome.traces.mkdir(parents=True)
    mark = uuid.uuid4().hex
    environment = {
        **os.environ,
        **plan.environment,
        trace.ENVIRONMENT: str(outcome.traces),
        _MARK: mark,
    }
    with (
        outcome.log.open("wb") as log,
        _process(_command(plan, outcome.records), environment, log) as process,
    ):
        _watch(process, outcome, show, mark)
        outcome.exit_code = process.wait()
    outcome.left_running = _marked_processes(mark)
    return outcome


def _command(plan: Plan, records: Path) -> list[str]:
    return [
        *(
            sys.executable,
            "-P",
            "-m",
            "shoal",
            "run",
            "--standalone",
            "--nproc-per-node",
            str(plan.workers),
            "--servers",
            str(plan.servers),
        ),
        *("--max-restarts", "3", "--record-dir", str(records)),
        *("-m", "shoal.demo.train", plan.strategy, "--epochs", str(plan.epochs)),
    ]


@contextlib.contextmanager
def _process(
    command: list[str], environment: Mapping[str, str], log: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    # the run then ends as after a stop request
    tied = tied_to_parent(command, death_signal=signal.SIGTERM)
    process = subprocess.Popen(tied, env=dict(environment), stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _watch(process: subprocess.Popen[bytes], outcome: Outcome, show: Show, mark: str) -> None:
    plan = outcome.plan
    patience_s = plan.patience.total_seconds()
    step, progressed_at = 0, time.monotonic()
    client: CoordinatorClient | None = None
    cluster: ClusterRecord | None = None
    try:
        while process.poll() is None:
            if client is None:
                cluster = next((c for c in running_clusters() if c.pid == process.pid), None)
                client = (
                    CoordinatorClient(ChannelSettings(address=cluster.coordinator))
                    if cluster is not None
                    else None
                )
            job = _job(client, cluster)
            if job is not None and (reached := steps_done(plan, job.members)) > step:
                step, progressed_at = reached, time.monotonic()
            if time.monotonic() > progressed_at + patience_s:
                raise DeadlineError(
                    f"{plan.title} made no progress for {patience_s:.0f} s after step {step} of "
                    f"{plan.total_steps}; its output is in {outcome.log}"
                )
            if job is not None and plan.kill_at is not None and outcome.killed_unix_s is None:
                _kill_when_due(job, plan, outcome, mark)
            show(plan, job, outcome)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
    finally:
        if client is not None:
            client.close()


def _job(
    client: CoordinatorClient | None, cluster: ClusterRecord | None
) -> pb.GetJobResponse | None:
    if client is None or cluster is None:
        return None
    try:
        return client.get_job(cluster.job_id, deadline=timedelta(seconds=2))
    except ShoalError:
        return None  # not started yet or already ended; the exit status tells which


def steps_done(plan: Plan, members: Iterable[pb.MemberStatus]) -> int:
    """Returns the number of steps committed so far. At the end it is `Plan.total_steps`."""
    steps = [member.progress.step for member in members]
    if not steps:
        return 0
    return min(plan.total_steps, sum(steps) if plan.strategy == "async_sgd" else max(steps))


def _kill_when_due(job: pb.GetJobResponse, plan: Plan, outcome: Outcome, mark: str) -> None:
    assert plan.kill_at is not None
    ranked = [m for m in job.members if m.rank >= 0]
    if len(ranked) < plan.workers or steps_done(plan, ranked) < plan.kill_at * plan.total_steps:
        return
    if plan.servers:
        server = next((process for process in _marked_processes(mark) if _SERVER in process), None)
        if server is None:
            return
        victim, outcome.killed = int(server.partition(":")[0]), "a parameter server"
    else:
        worker = next(m for m in ranked if m.rank == 1)
        victim, outcome.killed = worker.pid, f"rank {worker.rank}"
    outcome.killed += f" (pid {victim})"
    outcome.killed_unix_s = time.time()
    os.kill(victim, signal.SIGKILL)


def _marked_processes(mark: str) -> list[str]:
    """Returns the processes whose environment contains the run's mark, as "PID: COMMAND". They are
    the run's descendants, found even if their parents have exited."""
    if not Path("/proc/self/environ").exists():
        raise InternalError(
            "the demo searches /proc for processes left behind, but this system has no /proc"
        )
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (directory / "environ").read_bytes().split(b"\0"):
                command = (
                    (directory / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                    .strip()
                )
                found.append(f"{directory.name}: {command}")
    return found
