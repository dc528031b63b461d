"""`shoal.Client`: what a program does with jobs from outside of them. Blocking; `aio` has the same
calls for asyncio."""

from __future__ import annotations

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
from shoal_common.process_secrets import secrets_to_hand_on
from shoal_common.rpc.channel import ChannelSettings

from shoal.client.connections import Connections
from shoal.client.job import Job, JobEnding, JobPhase, JobSummary, Member, Server
from shoal.client.messages import job_of, summary_of
from shoal.client.result import Result
from shoal.client.streams import Deadline, EventStream, LogStream
from shoal.launcher.jobs import launchers_job_id, new_job_id
from shoal.launcher.members import kill_member
from shoal.launcher.registry import newest_cluster
from shoal.launcher.submissions import Submission, Submissions

if TYPE_CHECKING:
    import torch

CALL_TIMEOUT: Final = timedelta(seconds=10)
PATIENCE: Final = timedelta(seconds=30)
LOOK_INTERVAL: Final = timedelta(milliseconds=200)
_NOT_YET: Final = ("CLUSTER_UNKNOWN", "JOB_UNKNOWN")
T = TypeVar("T")


class Client:
    """Jobs from outside: submits them, waits for them, looks at them, stops them. A context
    manager; any thread may call.

    A job is named by its id. Every call has a deadline, and raises the errors of
    `shoal_common.errors`: UnknownResourceError for what is not there, UnavailableError and
    DeadlineError for a coordinator that does not answer.
    """

    def __init__(
        self, coordinator: str | ChannelSettings | None = None, *, timeout: timedelta = CALL_TIMEOUT
    ) -> None:
        """Does not connect yet.

        Args:
            coordinator: host:port of a shared one, with the token and certificates that the
                environment names (SHOAL_TOKEN, SHOAL_TLS_...), or ChannelSettings that say all of
                it. None: jobs of this user on this machine, whose clusters have a coordinator each.
            timeout: of each call to a coordinator.
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
        launcher's process is there.

        The launcher outlives this process. Any process of this user on this machine can wait for
        it, read its log and its result.

        Args:
            script: the training script; what follows are its arguments.
            workers: processes on this machine.
            servers: parameter servers, for async_sgd; of a job at a shared coordinator they are
                started elsewhere.
            job_id: None: a new one, made from the script's name. That of a job whose run has ended:
                another run of it.
            flags: further ones of `shoal run`, such as `("--max-restarts", "3")`.
            environment: what the launcher and its workers get beside this process's environment.
            directory: where it runs; None: here.

        Raises:
            ConfigurationError: no such script or directory, or an id that no job can have.
            PreconditionError: JOB_RUNNING: the job's last submission still runs.
            UnavailableError: SUBMIT_FAILED: the process could not be started.
        """
        where = Path(directory) if directory is not None else Path.cwd()
        if not {"-m", "--module", "--no-python"} & set(flags) and not (where / script).is_file():
            raise ConfigurationError(f"script={str(script)!r}: there is no such file in {where}")
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
        """Likewise, for a whole command line of `shoal run`, which names neither job nor
        coordinator. `name`: a new id is made from it."""
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
        """Blocks until the job has ended.

        Raises:
            DeadlineError: it has not within `timeout` (None: however long it takes).
            UnknownResourceError: there is no such job.
        """
        deadline = Deadline(timeout)
        while (result := self.outcome(job_id)) is None:
            deadline.check(f"the end of job {job_id!r}")
            time.sleep(LOOK_INTERVAL.total_seconds())
        return result

    def result(self, job_id: str) -> Result:
        """How the job ended. Raises PreconditionError (JOB_RUNNING): it has not; `wait` for it."""
        result = self.outcome(job_id)
        if result is None:
            raise PreconditionError(
                f"job {job_id!r} has not ended; client.wait(job_id, timeout=...) waits for it",
                reason="JOB_RUNNING",
            )
        return result

    def outcome(self, job_id: str) -> Result | None:
        """How the job ended; None: it has not. Raises UnknownResourceError: there is no such
        job."""
        submission = self._submission(job_id)
        return _end_of(self.job(job_id)) if submission is None else _result_of(submission)

    # -------------------------------------------------------------------------------------- looking

    def jobs(self) -> tuple[JobSummary, ...]:
        """All jobs that the coordinator knows; without one, those of this machine, with those
        submitted here that have ended."""
        found: dict[str, JobSummary] = {}
        for client in self._connections.all():
            try:
                summaries = [summary_of(message) for message in client.list_jobs().jobs]
            except ShoalError:
                if self._connections.shared is not None:
                    raise
                continue  # this cluster is just beginning, or ending
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
        """The job with its members and servers, as its coordinator knows them."""
        return job_of(self._ask(job_id, lambda client: client.get_job(job_id)))

    def members(self, job_id: str) -> tuple[Member, ...]:
        """The job's workers, those with a rank first, in rank order."""
        return self.job(job_id).members

    def servers(self, job_id: str) -> tuple[Server, ...]:
        """The job's parameter servers, by place."""
        return self.job(job_id).servers

    def events(
        self,
        job_id: str,
        *,
        after: str = "",
        follow: bool = False,
        timeout: timedelta | None = None,
    ) -> EventStream:
        """What has happened in the job, oldest first; an iterator that is closed when it is done
        with.

        Args:
            after: the id of an event; only later ones come.
            follow: later ones as they happen, over restarts of the coordinator, until the job's own
                cluster ends or the stream is closed.
            timeout: DeadlineError when it is not at its end by then; None: however long it takes.
        """
        self.job(job_id)  # it is there
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
        """What a submitted job has printed, line by line, the workers' with their rank in front; an
        iterator.

        Args:
            rank: only lines of the worker that was started as this rank, as its prefix says.
            follow: waits for further lines, until the job has ended.
            timeout: DeadlineError when the end has not come by then; None: however long it takes.

        Raises:
            UnknownResourceError: LOG_UNKNOWN: the job was not submitted from this machine; its
                output is where its launcher runs.
        """
        submission = self._submission(job_id)
        if submission is None:
            raise UnknownResourceError(
                f"the output of job {job_id!r} is not kept here: it goes where its `shoal run` was "
                "started, and into files with --log-dir; that of jobs that were submitted "
                "(shoal.Client().submit(...), `shoal submit`) is kept",
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
        """The model's newest values from the job's parameter servers, by name, on the CPU. To read
        again and again use `shoal.ModelReader`, which asks only for what has changed.

        Raises:
            DeadlineError: there are none within `timeout`, and why.
        """
        from shoal.parameter_servers import ModelReader

        self.job(job_id)  # it is there
        with ModelReader(self._connections.settings(job_id), job_id, patience=timeout) as reader:
            return reader.state_dict()

    # --------------------------------------------------------------------------------------- ending

    def stop(self, job_id: str, *, reason: str = "") -> None:
        """Asks all workers to stop at their next step border, and returns; `wait` for the end. The
        code after the loop runs.

        A script without `shoal.init()` has no borders, and is not reached: `kill` ends it.
        """
        self._ask(
            job_id, lambda client: client.stop_job(job_id, reason=reason or "shoal.Client.stop")
        )

    def drain(
        self, job_id: str, *, rank: int | None = None, server: str | None = None, reason: str = ""
    ) -> str:
        """Asks the worker of a rank, or a parameter server by its id, to leave, and returns the id
        of the member or server. Nothing is lost."""
        if (rank is None) == (server is None):
            raise ConfigurationError(f"drain(rank={rank!r}, server={server!r}): give one of them")
        reason = reason or "shoal.Client.drain"
        if server is None:
            return self._ask(
                job_id, lambda client: client.drain_member(job_id, rank=rank, reason=reason)
            ).member_id
        self._ask(job_id, lambda client: client.drain_server(job_id, server, reason=reason))
        return server

    def kill(self, job_id: str, *, rank: int | None = None) -> Member | None:
        """SIGKILL to the worker of a rank, which is returned; or to all workers of a submitted job:
        returns when its launcher has ended, with status 143. Only on the machine where they run.

        Raises:
            UnknownResourceError: MEMBER_UNKNOWN: nobody has this rank; SUBMISSION_UNKNOWN: without
                a rank, the job was not submitted here.
            PreconditionError: MEMBER_ELSEWHERE, PROCESS_NOT_OURS: it is not for this process to
                kill.
        """
        if rank is None:
            self._submissions.newest(job_id).kill()
            return None
        member = _of_rank(self.job(job_id), rank)
        kill_member(rank=rank, host=member.host, pid=member.pid, member_id=member.member_id)
        return member

    # -------------------------------------------------------------------------------------- closing

    def close(self) -> None:
        """Closes all connections; calls in progress end with UnavailableError. Jobs go on.
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
        """Asks the job's coordinator; of a job that was just submitted, when it has one and is
        known there."""
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
                        f"job {job_id!r} has ended, and its coordinator knows no more of it; "
                        f"client.result({job_id!r}) says how",
                        reason="JOB_ENDED",
                    ) from error
            deadline.check(f"job {job_id!r} to begin, whose launcher is there")
            time.sleep(LOOK_INTERVAL.total_seconds())

    def _submission(self, job_id: str) -> Submission | None:
        """The job's last run that was submitted from here to this client's coordinator; None: there
        is none."""
        shared = self._connections.shared
        try:
            found = self._submissions.newest(job_id)
        except UnknownResourceError:
            return None
        return found if shared is None or shared.address == found.coordinator else None


def _of_rank(job: Job, rank: int) -> Member:
    """Raises UnknownResourceError, which says what ranks there are."""
    ranked = {member.rank: member for member in job.members if member.rank is not None}
    if rank in ranked:
        return ranked[rank]
    if ranked:
        there = f"there are {', '.join(map(str, sorted(ranked)))}"
    elif not job.generation:
        there = (
            "none has one yet: its workers are still starting, or never call shoal.init(); see "
            "`shoal status`"
        )
    else:
        there = (
            f"none has one now, {len(job.members)} of at least {job.min_workers} workers are "
            "there; see `shoal status`"
        )
    raise UnknownResourceError(
        f"job {job.job_id} has no rank {rank}: {there}", reason="MEMBER_UNKNOWN"
    )


def _result_of(submission: Submission) -> Result | None:
    """None: it goes on."""
    told = submission.outcome()
    if told is None:
        return None
    ended = None if told.ended_unix_s is None else datetime.fromtimestamp(told.ended_unix_s, UTC)
    return Result(
        job_id=submission.job_id,
        ok=told.exit_status == 0,
        exit_status=told.exit_status,
        summary=told.summary,
        ended=ended,
    )


def _end_of(job: Job) -> Result | None:
    """What a coordinator knows of a job's end; exit statuses are launchers'."""
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
    """What the launcher of a job at a shared coordinator reads from its environment."""
    if shared is None:
        return {}
    tls = shared.tls
    told = {
        "SHOAL_TOKEN": None if _in_a_file(shared.token) else shared.token,
        "SHOAL_TLS_CA": tls and tls.authority,
        "SHOAL_TLS_CERT": tls and tls.certificate,
        "SHOAL_TLS_KEY": tls and tls.key,
    }
    return {name: str(value) for name, value in told.items() if value is not None}


def _in_a_file(token: str | None) -> bool:
    """Whether the launcher finds this token by itself, by the variable that names its file."""
    own = CallerSettings.load()
    return own.token_file is not None and own.bearer_token == token
