"""`shoal.Client`, which controls jobs from another program. Its calls block; `aio` has the same
calls for asyncio."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.credentials import CallerSettings
from shoal_common.errors import (
    ConfigurationError,
    PreconditionError,
    ShoalError,
    UnknownResourceError,
)
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.security.secrets import secrets_to_hand_on
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal.client.connections import Connections
from shoal.client.job import Job, JobEnding, JobPhase, JobSummary, Member, Server
from shoal.client.messages import job_of, summary_of
from shoal.client.result import Result
from shoal.client.streams import Deadline, EventStream, LogStream
from shoal.launcher.clusters.jobs import launchers_job_id, new_job_id
from shoal.launcher.clusters.registry import newest_cluster
from shoal.launcher.processes.members import kill_member, kill_server
from shoal.launcher.run.submissions import Submission, Submissions

if TYPE_CHECKING:
    import torch

CALL_TIMEOUT: Final = timedelta(seconds=10)
PATIENCE: Final = timedelta(seconds=30)
LOOK_INTERVAL: Final = timedelta(milliseconds=200)
_NOT_YET: Final = ("CLUSTER_UNKNOWN", "JOB_UNKNOWN")
T = TypeVar("T")


class Client:
    """Submits, awaits, inspects and stops jobs from another program. A context manager;
    thread-safe.

    Calls refer to a job by its id. Every call has a deadline and raises the errors of
    `shoal_common.errors`: UnknownResourceError if something does not exist, UnavailableError and
    DeadlineError if a coordinator does not respond.
    """

    def __init__(
        self, coordinator: str | ChannelSettings | None = None, *, timeout: timedelta = CALL_TIMEOUT
    ) -> None:
        """Creates a client, which connects at the first call.

        Args:
            coordinator: host:port of a shared coordinator, with the token and certificates from the
                environment (SHOAL_TOKEN, SHOAL_TLS_...), or complete ChannelSettings. None: this
                user's jobs on this machine, each with its own coordinator.
            timeout: maximum duration of each call to a coordinator.
        """
        self._connections = Connections(coordinator, timeout=timeout)
        self._submissions = Submissions()
        self._timeout = timeout

    # ----------------------------------------------------------------------------------- submitting

    def submit(
        self,
        script: str | Path,
        *arguments: str,
        workers: int = 1,
        servers: int = 0,
        job_id: str | None = None,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        directory: str | Path | None = None,
    ) -> str:
        """Starts `shoal run` in the background on this machine, and returns the job's id once the
        launcher's process exists.

        The launcher outlives this process. Any process of this user on this machine can wait for
        the job and read its log and its result.

        Args:
            script: the training script, followed by its arguments.
            workers: number of processes on this machine.
            servers: number of parameter servers, for async_sgd; with a shared coordinator,
                parameter servers are started separately.
            job_id: None: a new id, derived from the script's name. The id of a job whose run has
                ended starts a new run of that job.
            flags: additional flags of `shoal run`, such as `("--max-restarts", "3")`.
            environment: additional variables for the launcher and its workers.
            directory: working directory; None: the current one.

        Raises:
            ConfigurationError: the script or directory does not exist, or the id is invalid.
            PreconditionError: JOB_RUNNING: the job's last submission is still running.
            UnavailableError: SUBMIT_FAILED: the process could not be started.
        """
        where = Path(directory) if directory is not None else Path.cwd()
        if not {"-m", "--module", "--no-python"} & set(flags) and not (where / script).is_file():
            raise ConfigurationError(f"script={str(script)!r}: the file does not exist in {where}")
        own = ["--nproc-per-node", str(workers), *(("--servers", str(servers)) if servers else ())]
        return self.submit_command(
            [*own, *flags, str(script), *arguments],
            job_id=job_id,
            environment=environment,
            directory=where,
            name=str(script),
        )

    def submit_command(
        self,
        command: Sequence[str],
        *,
        name: str,
        job_id: str | None = None,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> str:
        """Submits a complete command line of `shoal run`. It must not name a job or a coordinator;
        both are added. `name`: basis of a new job id."""
        job_id = job_id or new_job_id(name)
        shared = self._connections.shared
        where = ["--rdzv-endpoint", shared.address] if shared is not None else ["--standalone"]
        submission = self._submissions.submit(
            job_id,
            [*where, "--rdzv-id", job_id, *command],
            coordinator=None if shared is None else shared.address,
            environment={
                **os.environ,
                **secrets_to_hand_on(),
                **_credentials(shared),
                **(environment or {}),
            },
            directory=directory,
        )
        return submission.job_id

    def wait(self, job_id: str, *, timeout: timedelta | None) -> Result:
        """Blocks until the job has ended, and returns its result.

        Raises:
            DeadlineError: the job has not ended within `timeout` (None: no limit).
            UnknownResourceError: there is no such job.
        """
        deadline = Deadline(timeout)
        while (result := self.outcome(job_id)) is None:
            deadline.check(f"the end of job {job_id!r}")
            time.sleep(LOOK_INTERVAL.total_seconds())
        return result

    def result(self, job_id: str) -> Result:
        """Returns the result of a finished job. Raises PreconditionError (JOB_RUNNING) if the job
        has not ended; use `wait` in this case."""
        result = self.outcome(job_id)
        if result is None:
            raise PreconditionError(
                f"job {job_id!r} has not ended; wait for it with client.wait(job_id, timeout=...)",
                reason="JOB_RUNNING",
            )
        return result

    def outcome(self, job_id: str) -> Result | None:
        """Returns the result of a job; None while the job is running. Raises UnknownResourceError
        if there is no such job."""
        submission = self._submission(job_id)
        return _end_of(self.job(job_id)) if submission is None else _result_of(submission)

    # ----------------------------------------------------------------------------------- inspecting

    def jobs(self) -> tuple[JobSummary, ...]:
        """Returns the jobs known to the shared coordinator. Without a shared coordinator, returns
        the jobs of this machine, including finished jobs that were submitted from it."""
        found: dict[str, JobSummary] = {}
        for client in self._connections.all():
            try:
                summaries = [summary_of(message) for message in client.list_jobs().jobs]
            except ShoalError:
                if self._connections.shared is not None:
                    raise
                continue  # this cluster is just starting or stopping
            inner = {launchers_job_id(summary.job_id) for summary in summaries}
            found |= {
                summary.job_id: summary for summary in summaries if summary.job_id not in inner
            }
        for submission in self._submissions.all() if self._connections.shared is None else ():
            result = _result_of(submission)
            phase = JobPhase.WAITING if result is None else JobPhase.FINISHED
            known = JobSummary(
                job_id=submission.job_id, phase=phase, generation=0, world_size=0, result=result
            )
            found.setdefault(submission.job_id, known)
        return tuple(found[job_id] for job_id in sorted(found))

    def job(self, job_id: str) -> Job:
        """Returns the current state of a job, with its members and servers, from its
        coordinator."""
        return job_of(self._ask(job_id, lambda client: client.get_job(job_id)))

    def members(self, job_id: str) -> tuple[Member, ...]:
        """Returns a job's workers. Workers with a rank come first, in rank order."""
        return self.job(job_id).members

    def servers(self, job_id: str) -> tuple[Server, ...]:
        """Returns a job's parameter servers, ordered by `Server.place`."""
        return self.job(job_id).servers

    def events(
        self,
        job_id: str,
        *,
        after: str = "",
        follow: bool = False,
        timeout: timedelta | None = None,
    ) -> EventStream:
        """Returns an iterator over the job's events, oldest first. It must be closed after use.

        Args:
            after: id of an event; only later events are returned.
            follow: True to also return new events as they happen, across restarts of the
                coordinator, until the job's own cluster ends or the stream is closed.
            timeout: maximum time until the stream ends, after which DeadlineError is raised; None:
                no limit.
        """
        self.job(job_id)  # raises if there is no such job
        client = self._connections.of(job_id)

        def gone() -> bool:
            try:
                return self._connections.shared is None and newest_cluster(job=job_id) is None
            except UnknownResourceError:
                return True

        return EventStream(
            lambda last, left: client.watch_events(
                job_id, after_event_id=last, follow=follow, deadline=left
            ),
            what=f"events of job {job_id!r}",
            after=after,
            follow=follow,
            gone=gone,
            timeout=timeout,
            patience=PATIENCE,
        )

    def logs(
        self,
        job_id: str,
        *,
        rank: int | None = None,
        follow: bool = False,
        timeout: timedelta | None = None,
    ) -> LogStream:
        """Returns an iterator over the lines printed by a submitted job; each worker's lines start
        with its rank.

        Args:
            rank: return only lines of the worker started with this rank, as shown in its prefix.
            follow: True to wait for further lines until the job has ended.
            timeout: maximum time until the end is reached, after which DeadlineError is raised;
            None: no limit.

        Raises:
            UnknownResourceError: LOG_UNKNOWN: the job was not submitted from this machine; its
                output is on its launcher's machine.
        """
        submission = self._submission(job_id)
        if submission is None:
            raise UnknownResourceError(
                f"the output of job {job_id!r} is not stored on this machine. Only the output "
                "of submitted jobs is (shoal.Client().submit(...), `shoal submit`); `shoal "
                "run` prints its output on its terminal, and writes it to files with "
                "--log-dir",
                reason="LOG_UNKNOWN",
            )
        ended = (lambda: submission.has_ended) if follow else None
        return LogStream(
            submission.log,
            what=f"the end of job {job_id!r}",
            rank=rank,
            ended=ended,
            timeout=timeout,
        )

    def state_dict(self, job_id: str, *, timeout: timedelta = PATIENCE) -> dict[str, torch.Tensor]:
        """Returns the model's newest values from the job's parameter servers, on the CPU, by
        parameter name. For repeated reads, use `shoal.ModelReader`, which fetches only changes.

        Raises:
            DeadlineError: no values are available within `timeout`; the message gives the reason.
        """
        from shoal.parameter_servers import ModelReader

        self.job(job_id)  # raises if there is no such job
        with ModelReader(self._connections.settings(job_id), job_id, patience=timeout) as reader:
            return reader.state_dict()

    # ------------------------------------------------------------------------------------- stopping

    def stop(self, job_id: str, *, reason: str = "") -> None:
        """Asks all workers to stop at their next step boundary, and returns immediately; use `wait`
        to wait for the end. The code after the training loop still runs.

        A script without `shoal.init()` has no step boundaries and is not affected; use `kill`
        instead.
        """
        self._ask(
            job_id, lambda client: client.stop_job(job_id, reason=reason or "shoal.Client.stop")
        )

    def drain(
        self, job_id: str, *, rank: int | None = None, server: str | None = None, reason: str = ""
    ) -> str:
        """Asks the worker of a rank, or the parameter server with an id, to leave; exactly one of
        them must be given. No work is lost. Returns the id of the member or server."""
        if (rank is None) == (server is None):
            raise ConfigurationError(f"drain(rank={rank!r}, server={server!r}): pass one of them")
        reason = reason or "shoal.Client.drain"
        if server is None:
            return self._ask(
                job_id, lambda client: client.drain_member(job_id, rank=rank, reason=reason)
            ).member_id
        self._ask(job_id, lambda client: client.drain_server(job_id, server, reason=reason))
        return server

    def readmit(self, job_id: str, host: str) -> None:
        """Lets workers join again from a machine that the job has refused as unhealthy or excluded
        (`Job.machines`)."""
        healthy = pb.MACHINE_CONDITION_HEALTHY
        reason = "shoal.Client.readmit"
        self._ask(
            job_id, lambda client: client.report_machine(job_id, host, healthy, reason=reason)
        )
        launchers = launchers_job_id(job_id)
        with contextlib.suppress(UnknownResourceError):  # a run on one machine has no such job
            self._ask(
                job_id,
                lambda client: client.report_machine(launchers, host, healthy, reason=reason),
            )

    def kill(
        self, job_id: str, *, rank: int | None = None, server: str | None = None
    ) -> Member | None:
        """Kills the worker of a rank and returns its `Member`, or kills a parameter server given by
        its id. Without either, kills all workers of a submitted job and returns when its launcher
        has exited with status 143. Works only on the machine where the processes are running.

        Raises:
            UnknownResourceError: MEMBER_UNKNOWN: no member has this rank; SERVER_UNKNOWN: there is
                no such server; SUBMISSION_UNKNOWN: without either, the job was not submitted here;
                PROCESS_UNKNOWN: the process has exited or runs elsewhere.
            PreconditionError: MEMBER_ELSEWHERE, PROCESS_NOT_OURS: this process may not kill it.
        """
        if rank is not None and server is not None:
            raise ConfigurationError(
                f"kill(rank={rank!r}, server={server!r}): pass only one of them"
            )
        if server is not None:
            if all(each.server_id != server for each in self.job(job_id).servers):
                raise UnknownResourceError(
                    f"job {job_id} has no parameter server {server!r}", reason="SERVER_UNKNOWN"
                )
            kill_server(
                job_id=job_id,
                server_id=server,
                coordinator=self._connections.settings(job_id).address,
            )
            return None
        if rank is None:
            self._submissions.newest(job_id).kill()
            return None
        member = _of_rank(self.job(job_id), rank)
        kill_member(rank=rank, host=member.host, pid=member.pid, member_id=member.member_id)
        return member

    # -------------------------------------------------------------------------------------- closing

    def close(self) -> None:
        """Closes all connections; calls in progress fail with UnavailableError. Jobs continue.
        Idempotent."""
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, job_id: str, call: Callable[[CoordinatorClient], T]) -> T:
        """Sends a request to the job's coordinator. If the job has only just been submitted, first
        waits until its launcher has created it at a coordinator."""
        deadline = Deadline(self._timeout)
        while True:
            try:
                return call(self._connections.of(job_id))
            except UnknownResourceError as error:
                submission = self._submission(job_id)
                if submission is None or error.reason not in _NOT_YET:
                    raise
                if submission.has_ended:
                    raise UnknownResourceError(
                        f"job {job_id!r} has ended, and its coordinator no longer knows it; "
                        f"client.result({job_id!r}) returns its outcome",
                        reason="JOB_ENDED",
                    ) from error
            deadline.check(f"job {job_id!r} to begin; its launcher is running")
            time.sleep(LOOK_INTERVAL.total_seconds())

    def _submission(self, job_id: str) -> Submission | None:
        """Returns the job's last submission from this machine to this client's coordinator; None if
        there is none."""
        shared = self._connections.shared
        try:
            found = self._submissions.newest(job_id)
        except UnknownResourceError:
            return None
        return found if shared is None or shared.address == found.coordinator else None


def _of_rank(job: Job, rank: int) -> Member:
    """Returns the member with a rank. If no member has it, raises an UnknownResourceError that
    lists the existing ranks."""
    ranked = {member.rank: member for member in job.members if member.rank is not None}
    if rank in ranked:
        return ranked[rank]
    if ranked:
        there = f"its ranks are {', '.join(map(str, sorted(ranked)))}"
    elif not job.generation:
        there = (
            "it has no ranks yet: its workers are still starting, or never call shoal.init(); see "
            "`shoal status`"
        )
    else:
        there = (
            f"it has no ranks now, since only {len(job.members)} of at least "
            f"{job.min_workers} workers are there; see `shoal status`"
        )
    raise UnknownResourceError(
        f"job {job.job_id} has no rank {rank}: {there}", reason="MEMBER_UNKNOWN"
    )


def _result_of(submission: Submission) -> Result | None:
    """Returns the result of a submission; None while it is running."""
    outcome = submission.outcome()
    if outcome is None:
        return None
    ended = (
        None if outcome.ended_unix_s is None else datetime.fromtimestamp(outcome.ended_unix_s, UTC)
    )
    return Result(
        job_id=submission.job_id,
        ok=outcome.exit_status == 0,
        exit_status=outcome.exit_status,
        summary=outcome.summary,
        ended=ended,
    )


def _end_of(job: Job) -> Result | None:
    """Returns the result of a job according to its coordinator; None if the job has not ended. The
    result has no exit status, because only launchers know it."""
    if job.phase is not JobPhase.FINISHED:
        return None
    return Result(
        job_id=job.job_id,
        ok=job.ending in (JobEnding.COMPLETED, JobEnding.STOPPED),
        exit_status=None,
        summary=job.ending_reason or "",
        ended=None,
    )


def _credentials(shared: ChannelSettings | None) -> dict[str, str]:
    """Returns the environment variables that pass the credentials for a shared coordinator to a
    job's launcher."""
    if shared is None:
        return {}
    tls = shared.tls
    given = {
        "SHOAL_TOKEN": None if _in_a_file(shared.token) else shared.token,
        "SHOAL_TLS_CA": tls and tls.authority,
        "SHOAL_TLS_CERT": tls and tls.certificate,
        "SHOAL_TLS_KEY": tls and tls.key,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def _in_a_file(token: str | None) -> bool:
    """Returns whether the launcher can read this token from the file named in its environment."""
    own = CallerSettings.load()
    return own.token_file is not None and own.bearer_token == token
