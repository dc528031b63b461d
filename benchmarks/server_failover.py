"""T11: SIGKILL of a parameter server that is a primary. Measures how long the workers pause, and
whether pushes are lost or applied twice.

One run gives many samples. The primary is killed; when the job has recovered (the workers take
steps, and the killed server has returned as a backup in sync), the new primary is killed. At the
end of the run, the pushes are counted one by one (`benchmarks.workers.tally`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import psutil
from shoal.launcher.clusters.registry import newest_cluster
from shoal_common.clients import CoordinatorClient, ParameterServerClient
from shoal_common.errors import ShoalError, UnknownResourceError
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2

from benchmarks import plots
from benchmarks.errors import MeasurementError
from benchmarks.figures import quantile
from benchmarks.processes import Stage
from benchmarks.registry import Options
from benchmarks.report import Row, Table
from benchmarks.systems import start_with_servers
from benchmarks.workers.steplog import Commit, StepLogs
from benchmarks.workers.tally import APPLIED, LEAVE, STOP, Account, account, acknowledged_file
from benchmarks.workers.workload import Workload

TARGET_S: Final = 0.5
PAPER_S: Final = 0.8
"""Pause in seconds that the parameter server paper reports for its own cluster."""
WORKERS: Final = 2
WIDTH: Final = 256
BATCH: Final = 32
STEPS_AROUND: Final = 20
"""Number of steps that give a worker's normal step time, and that it must take after a kill before
the job has recovered."""
REST_S: Final = 6.0
"""Seconds between a recovery and the next kill. Shoal's launcher gives up a server that has ended
within 5 s of serving four times in a row."""
_QUICK_KILLS: Final = 3
_LONGEST_PHASE_S: Final = 0.1
_TIMEOUT_S: Final = 120


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Pauses of one worker around one kill. A pause is the time between two successive steps, minus
    the duration of an ordinary step."""

    first_s: float
    """Longest pause during the first steps after the kill."""
    later_s: float
    """Longest pause from then until the job has recovered. During this time, the killed server
    returns and catches up."""
    step_s: float
    """Median duration of the worker's last steps before the kill, in seconds."""

    @property
    def longest_s(self) -> float:
        return max(self.first_s, self.later_s)


@dataclass(kw_only=True)
class System:
    """One arrangement of parameter servers, and its measurements."""

    name: str
    backups: int
    kills: int
    pauses: list[Pause] = field(default_factory=list)
    """Pauses of each worker around each kill."""
    pushes: Account | None = None
    failure: str = ""

    @property
    def longest_s(self) -> list[float]:
        return [pause.longest_s for pause in self.pauses]

    @property
    def command(self) -> str:
        backed = f" --server-backups {self.backups}" if self.backups else ""
        words = " ".join(_workload(Path("steps")).arguments())
        return (
            f"shoal run --standalone --nproc-per-node {WORKERS} --servers 1{backed} -m "
            f"benchmarks.workers.train_async {words}"
        )


def measure(options: Options) -> Table:
    """Runs the benchmark described in the module. Takes about 8 minutes; with `quick`, about 2."""
    backed = System(name="with a backup", backups=1, kills=30)
    restarted = System(name="without, restarted from its journal", backups=0, kills=10)
    for system in (backed, restarted):
        try:
            _measure(system, _QUICK_KILLS if options.quick else system.kills)
        except (MeasurementError, ShoalError) as error:
            system.failure = str(error)
    rows = tuple(row(system, restarted) for system in (backed, restarted))
    plots.samples(
        options.output / "t11.png",
        rows,
        sample="pause_s",
        label="pause of a worker beyond a step, s",
        target=TARGET_S,
    )
    return Table(
        key="t11",
        title="A parameter server's primary killed: pause of its workers, pushes lost",
        target=f"p99 <= {TARGET_S} s, no acknowledged push lost, none applied twice",
        method=(
            f"{WORKERS} workers train a {WIDTH}-wide perceptron, {BATCH} samples per push, under "
            "async_sgd (asp) with Adam and one parameter server, whose journal is synced before a "
            "push is acknowledged (--fsync group). The current primary is killed (SIGKILL) at a "
            "random moment of a step. The launcher restarts it on the same cores; in a job with "
            f"backups, it becomes the backup of the new primary. The next kill follows {REST_S:g} "
            f"s after the job has recovered: each worker has taken {STEPS_AROUND} steps, there is "
            "a primary, and its backup is in sync. The pause of a worker is the longest time "
            "between two successive steps that ended between the kill and the recovery, minus the "
            f"median of its last {STEPS_AROUND} steps before the kill. It therefore includes the "
            "time in which the new backup catches up. Two columns distinguish the longest of each "
            f"worker's first {STEPS_AROUND} steps after a kill from the longest later step. Each "
            "worker and kill is a sample; with so few samples, p99 is close to the largest one. "
            "Every push is counted: in addition to the model, the servers update a tensor with one "
            "element for each push of each worker. The gradient of a push is 1 at its own element. "
            "With Adam at betas of 0, an eps of 1 and a learning rate of 2, the element decreases "
            "by exactly 1 each time that the push is applied. At the end, each worker reports how "
            "many of its pushes were acknowledged. If the element of an acknowledged push is 0, "
            "the push was lost; if it is below -1, the push was applied more than once. Partitions "
            "without such elements must have the version 1 + the number of acknowledged pushes; a "
            "difference counts as an error. The parameter server paper (Li et al., OSDI 2014) has "
            f"{PAPER_S} s, on its own cluster."
        ),
        columns=(
            "kills",
            "step s",
            "p50 s",
            "p99 s",
            "max s",
            "first, max s",
            "later, max s",
            "p50, of a restart",
            "pushes",
            "lost",
            "twice",
        ),
        rows=rows,
        verdict=verdict(backed),
    )


def _measure(system: System, kills: int) -> None:
    generator = random.Random(0)
    with Stage() as stage:
        directory = stage.directory / "steps"
        directory.mkdir()
        job_id = f"t11-{uuid.uuid4().hex[:8]}"
        launcher = start_with_servers(
            stage, _workload(directory), job_id=job_id, backups=system.backups
        )
        with _Job(stage, job_id, system.backups) as job:
            logs, killed_ns = StepLogs(directory), 0
            _wait_until_well(stage, job, logs, killed_ns)
            for _ in range(kills):
                time.sleep(REST_S)
                primary = job.process_of(job.primary().server_id)
                time.sleep(generator.uniform(0, _LONGEST_PHASE_S))
                killed_ns = time.monotonic_ns()
                os.kill(primary, signal.SIGKILL)
                _wait_until_well(stage, job, logs, killed_ns)
                system.pauses += [pause_of(commits, killed_ns) for commits in logs.commits.values()]
            system.pushes = _count(stage, directory, job)
        (directory / LEAVE).touch()
        stage.finish(launcher.process, timeout_s=_TIMEOUT_S)


def _workload(directory: Path) -> Workload:
    return Workload(log=directory, ranks=WORKERS, width=WIDTH, batch=BATCH)


def _wait_until_well(stage: Stage, job: _Job, logs: StepLogs, since_ns: int) -> None:
    """Waits until each worker has taken enough steps since the time `since_ns`, and all servers are
    running and in sync."""
    stage.wait_until(
        "all to be well", lambda: job.is_whole() and _stepping(logs, since_ns), timeout_s=_TIMEOUT_S
    )


def _stepping(logs: StepLogs, since_ns: int) -> bool:
    """Returns whether each worker has taken enough steps since the time `since_ns`."""
    logs.read()
    after = [
        sum(1 for commit in commits if commit.time_ns > since_ns)
        for commits in logs.commits.values()
    ]
    return len(after) == WORKERS and min(after) > STEPS_AROUND


def pause_of(commits: Sequence[Commit], killed_ns: int) -> Pause:
    """Returns the pauses of one worker around a kill. The duration of an ordinary step is the
    median of the worker's last steps before the kill.

    `commits`: steps of the worker until the job had recovered. `killed_ns`: time of the kill.

    Raises:
        MeasurementError: there are too few steps before or after the kill.
    """
    steps = [
        (later.time_ns, (later.time_ns - earlier.time_ns) / 1e9)
        for earlier, later in itertools.pairwise(commits)
    ]
    before = [seconds for end_ns, seconds in steps if end_ns <= killed_ns][-STEPS_AROUND:]
    after = [seconds for end_ns, seconds in steps if end_ns > killed_ns]
    if len(before) < STEPS_AROUND or len(after) <= STEPS_AROUND:
        raise MeasurementError(
            f"{len(before)} steps before the kill and {len(after)} after it; expected "
            f"{STEPS_AROUND}, and more"
        )
    ordinary_s = statistics.median(before)
    first_s, later_s = (
        max(part) - ordinary_s for part in (after[:STEPS_AROUND], after[STEPS_AROUND:])
    )
    return Pause(first_s=first_s, later_s=later_s, step_s=ordinary_s)


def _count(stage: Stage, directory: Path, job: _Job) -> Account:
    """Ends the training, and compares the applied pushes with the acknowledged ones."""
    (directory / STOP).touch()
    stage.wait_until("the workers' accounts", (directory / APPLIED).exists, timeout_s=_TIMEOUT_S)
    tally = json.loads((directory / APPLIED).read_text())["tally"]
    acknowledged = [
        json.loads((directory / acknowledged_file(rank)).read_text()) for rank in range(WORKERS)
    ]
    return account(tally, acknowledged, job.versions())


class _Job:
    """State of the running job as reported by its coordinator and servers. Methods that query a
    service raise ShoalError if it does not respond."""

    def __init__(self, stage: Stage, job_id: str, backups: int) -> None:
        """Waits until the job's coordinator is registered on this machine. Raises MeasurementError
        if it is not registered in time."""
        self._stage = stage
        self._job_id = job_id
        self._backups = backups
        stage.wait_until("the coordinator", self._is_registered, timeout_s=_TIMEOUT_S)
        self._client = CoordinatorClient(
            ChannelSettings(address=newest_cluster(job=job_id).coordinator)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def _is_registered(self) -> bool:
        try:
            newest_cluster(job=self._job_id)
        except UnknownResourceError:
            return False
        return True

    def _servers(self) -> list[coordinator_pb2.ServerStatus]:
        return list(self._client.get_job(self._job_id).servers)

    def is_whole(self) -> bool:
        """Returns whether the job has one living primary and, if it uses a backup, a backup in
        sync."""
        there = [server for server in self._servers() if server.alive]
        primaries = [
            server for server in there if server.role == coordinator_pb2.SERVER_ROLE_PRIMARY
        ]
        return len(primaries) == 1 and sum(server.in_sync for server in there) == self._backups

    def primary(self) -> coordinator_pb2.ServerStatus:
        return next(
            server
            for server in self._servers()
            if server.role == coordinator_pb2.SERVER_ROLE_PRIMARY
        )

    def process_of(self, server_id: str) -> int:
        """Returns the process id of a server. Raises MeasurementError if there is no such
        process."""
        for process in self._stage.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                if "--server-id" in words and words[words.index("--server-id") + 1] == server_id:
                    return int(process.pid)
        raise MeasurementError(f"no process of server {server_id}\n{self._stage.outputs()}")

    def versions(self) -> list[int]:
        """Returns the version of each of the primary's partitions."""
        with ParameterServerClient(ChannelSettings(address=self.primary().address)) as client:
            return [partition.version for partition in client.get_server().partitions]


# ---------------------------------------------------------------------------------------- the table


def row(system: System, restarted: System) -> Row:
    """Returns a row of the table, compared with the row `restarted`."""
    cells = {"kills": str(len(system.pauses) // WORKERS)}
    if longest_s := system.longest_s:
        cells |= {
            "step s": f"{statistics.median(pause.step_s for pause in system.pauses):.3f}",
            "p50 s": f"{quantile(longest_s, 0.5):.3f}",
            "p99 s": f"{quantile(longest_s, 0.99):.3f}",
            "max s": f"{max(longest_s):.3f}",
            "first, max s": f"{max(pause.first_s for pause in system.pauses):.3f}",
            "later, max s": f"{max(pause.later_s for pause in system.pauses):.3f}",
        }
    if longest_s and restarted.pauses and system is not restarted:
        cells["p50, of a restart"] = (
            f"{quantile(longest_s, 0.5) / quantile(restarted.longest_s, 0.5):.3f}"
        )
    if system.pushes is not None:
        cells |= {
            "pushes": str(system.pushes.acknowledged),
            "lost": str(system.pushes.lost),
            "twice": str(system.pushes.twice),
        }
    samples = {
        "pause_s": longest_s,
        "first_s": [pause.first_s for pause in system.pauses],
        "later_s": [pause.later_s for pause in system.pauses],
        "step_s": [pause.step_s for pause in system.pauses],
    }
    return Row(
        name=system.name,
        command=system.command,
        cells=cells,
        samples=samples,
        failure=system.failure,
    )


def verdict(backed: System) -> str:
    """Returns a sentence that compares the pauses and the numbers of lost and repeated pushes with
    the target."""
    if not backed.pauses or backed.pushes is None:
        return "Not measured."
    p99, pushes = quantile(backed.longest_s, 0.99), backed.pushes
    pause = "reached" if p99 <= TARGET_S else "not reached"
    kept = "reached" if pushes.lost == pushes.twice == 0 else "not reached"
    comparison = (
        f"of {pushes.acknowledged} acknowledged pushes {pushes.lost} lost, {pushes.twice} twice "
        f"({kept})"
    )
    return (
        f"Measured: p99 {p99:.3f} s ({pause}), {p99 / PAPER_S:.2f} x the paper's pause; "
        f"{comparison}."
    )
