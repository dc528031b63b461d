"""A run with a coordinator shared by launchers on several machines: `shoal run --rdzv-endpoint`.

torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR) must agree on all machines before any worker
starts. The launchers are therefore members of a separate job, `<job>.nodes`, and get their node
ranks from its generations. If a new generation has different launchers, or a launcher has restarted
its workers, all workers of plain scripts are restarted. Elastic workers get their ranks from the
job itself and keep running.

An unreachable coordinator, or one that has lost its data, does not end the run: the launchers wait
for it and create lost jobs again.

The site belongs to the event loop's thread; the session's thread only wakes the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import (
    ConfigurationError,
    DeadlineError,
    PreconditionError,
    ShoalError,
    UnavailableError,
    UnknownResourceError,
)
from shoal_common.formats.runs import Run
from shoal_common.rpc.reach import Obstacle
from shoal_common.settings import Address, parse_address
from shoal_common.system.own_address import OwnAddress
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal.launcher.clusters.cluster import StartService
from shoal.launcher.clusters.jobs import JobSettings, launchers_job_id
from shoal.launcher.processes.credentials import member_channel
from shoal.launcher.processes.ports import ReservedPort
from shoal.launcher.run.node_session import NodeSession, NodeStatus
from shoal.launcher.run.reporter import ExitReporter
from shoal.launcher.run.site import Ending, RunCompletedError
from shoal.launcher.workers.environment import NodePlacement
from shoal.launcher.workers.settings import RunSettings

_CONNECT_TIMEOUT: Final = timedelta(seconds=60)
_CALL_DEADLINE: Final = timedelta(seconds=2)
_RETRY_S: Final = 0.2
_LOOK_S: Final = 5.0
_REMINDER_S: Final = 10.0
"""Interval in seconds between messages about missing launchers."""
_EXPLAIN_AFTER_S: Final = 2.0
"""Time in seconds after which the launcher determines why a coordinator does not respond."""
_WITHOUT_A_PLACE: Final = timedelta(seconds=60)
"""Maximum time that workers of a plain script continue while their launcher has no node rank. After
a network failure, all launchers may get their node ranks back."""
_DEFAULT_MASTER_PORT: Final = 29500
_RUN_ENDING: Final = "RUN_ENDING"


class SharedSite:
    """Environment of a run whose coordinator is shared with other launchers. Implements
    `site.Site`."""

    def __init__(self, settings: RunSettings, *, note: Callable[[str], None]) -> None:
        """`note`: callback that shows a message to the user; called from any thread. Raises
        ConfigurationError for unusable addresses and certificates."""
        assert settings.endpoint is not None
        if settings.master_address is not None and settings.node_rank is None:
            raise ConfigurationError(
                "--master-addr requires --node-rank; pass both, or omit both to let the launchers "
                "agree"
            )
        self.coordinator = settings.endpoint
        self.run: Run | None = None
        self._settings = settings
        self._note = note
        self._own = self._find_own() if settings.local_address or settings.listen_address else None
        """Addresses of this machine as given by flags. None: they are determined once the
        coordinator is reachable."""
        self._client = CoordinatorClient(member_channel(settings.endpoint))
        self._nodes_job = JobSettings(
            job_id=launchers_job_id(settings.job_id),
            min_workers=settings.nodes.least,
            max_workers=settings.nodes.most,
            join_grace=settings.effective_join_grace,
        )
        self._launcher_id = ""
        self._session: NodeSession | None = None
        self._port: ReservedPort | None = None
        self._placed: tuple[str, ...] = ()
        """Value of `NodeStatus.starts` when the workers were last started."""
        self._received: NodeStatus | None = None
        """Latest status that `moved` or `place` has passed to the agent; None before the first
        placement."""
        self._left_alone = False
        """True if the coordinator refused the session while workers were running. The workers
        continue, but launchers that join or leave are no longer noticed."""
        self._before = ""
        """Human-readable outcome of the previous run; empty if unknown."""
        self._give_up_at = 0.0
        """Time at which the wait for other launchers ends, by the event loop's clock."""

    def begin(self, start_service: StartService) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._opened = asyncio.Event()

    async def open(self, launcher_id: str) -> ExitReporter:
        self._launcher_id = launcher_id
        await self._enter_run()
        self._opened.set()
        return ExitReporter(self._client, job_id=self._settings.job_id, launcher_id=launcher_id)

    async def keep(self) -> None:
        """Watches the launchers' job and the session until cancelled. Raises PreconditionError when
        the job is stopped."""
        while self._session is None:
            await asyncio.sleep(_LOOK_S)
            await asyncio.to_thread(self._look_for_job)
        while True:
            self._raise_if_stopped(self._session)
            error = self._session.error
            if (
                error is not None
                and not self._session.is_closed
                and self._received is not None
                and not self._left_alone
            ):
                self._left_alone = True
                self._note(
                    "the workers continue, but launchers that join or leave are no longer noticed: "
                    f"{error}"
                )
            await self._wait_for_change()

    async def place(self, *, again: bool) -> NodePlacement:
        await self._opened.wait()
        if self._settled:
            return self._settled_place()
        if again:
            await self._join_anew("its workers are being restarted")
        timeout_s = self._settings.join_timeout.total_seconds()
        self._give_up_at = self._loop.time() + timeout_s
        reminder = self._loop.create_task(self._say_who_is_missing())
        try:
            async with asyncio.timeout(timeout_s):
                return await self._agreed_place()
        except TimeoutError:
            why = self._session.node_status.why if self._session is not None else ""
            raise DeadlineError(
                f"{self._settings.nodes.least} launchers for {self._run_name} did not all join "
                f"within {timeout_s:g} s"
                + (f" ({why})" if why else "")
                + (f"; {self._before}" if self._before else "")
            ) from None
        finally:
            reminder.cancel()

    async def moved(self) -> None:
        alone_since: float | None = None
        while True:
            session, received = self._session, self._received
            node_status = session.node_status if session is not None else None
            if (
                session is None
                or node_status is None
                or received is None
                or (node_status.placement is None and received.placement is None)
            ):
                await self._wait_for_change()
                continue
            if node_status.placement is None:
                alone_since = self._loop.time() if alone_since is None else alone_since
                left_s = alone_since + _WITHOUT_A_PLACE.total_seconds() - self._loop.time()
                if left_s > 0:
                    await self._wait_for_change(timeout_s=left_s)
                    continue
            alone_since = None
            session.works_in = node_status.generation
            if node_status.starts != received.starts:
                self._received = node_status
                return
            await self._wait_for_change()

    def fail(self, reason: str) -> None:
        if self._session is not None:
            try:
                self._client.stop_job(
                    self._nodes_job.job_id, reason=reason, deadline=_CALL_DEADLINE
                )
            except ShoalError as error:
                self._note(
                    f"could not tell the launchers on other machines that this one failed: {error}"
                )

    def saved_page(self, known: Mapping[str, Any]) -> str | None:
        """Returns None, because a shared coordinator serves the page itself and outlives the
        run."""
        return None

    def close(self, ending: Ending) -> None:
        try:
            if self._session is not None:
                self._take_leave(self._session, ending)
            if self.run is not None:
                self._announce_end(ending)
        finally:
            self._client.close()
            if self._port is not None:
                self._port.close()

    # ----------------------------------------------------------------------------------------------

    @property
    def _settled(self) -> bool:
        """True if flags determine this launcher's node rank and the master address, so that the
        launchers need not agree on them."""
        return self._settings.master_address is not None

    def _settled_place(self) -> NodePlacement:
        assert self._settings.node_rank is not None
        assert self._settings.master_address is not None
        return NodePlacement(
            node_rank=self._settings.node_rank,
            node_count=self._settings.nodes.most,
            master_address=self._settings.master_address,
            master_port=self._settings.master_port or _DEFAULT_MASTER_PORT,
        )

    def _job(self) -> JobSettings:
        nodes, workers = self._settings.nodes, self._settings.workers
        return JobSettings(
            job_id=self._settings.job_id,
            min_workers=nodes.least * workers,
            max_workers=nodes.most * workers,
            min_survivors=self._settings.min_survivors,
            parameter_servers=self._settings.servers,
            parameter_server_backups=self._settings.server_backups,
            max_parameter_servers=self._settings.max_servers,
            join_grace=self._settings.effective_join_grace,
        )

    @property
    def _run_name(self) -> str:
        """Human-readable name of the run."""
        return (
            f"run {self.run.number} of job {self._settings.job_id}"
            if self.run is not None
            else f"job {self._settings.job_id}"
        )

    async def _enter_run(self) -> None:
        """Enters the job's current or next run, and joins its launchers."""
        self._client.run, self.run = None, None
        settings = self._settings
        if settings.run:
            await asyncio.to_thread(self._check_run_before, settings.run)
        try:
            made = await self._create(self._job(), number=settings.run, resume=settings.resume)
        except PreconditionError as error:
            if (
                error.reason == "RUN_ENDED"
                and settings.run
                and await asyncio.to_thread(self._is_completed, settings.run)
            ):
                raise RunCompletedError(f"{error}, so there is nothing to do") from error
            raise
        self._client.run = made.run
        self.run = Run(number=made.run.number, began_unix_ms=made.run.began_unix_ms)
        self._before = _previous_run_text(made)
        if made.begun and made.HasField("previous"):
            again = f"; with --run {made.previous.run.number}, no run would have begun"
            is_again = made.previous.ending == pb.JOB_ENDING_COMPLETED and not settings.run
            self._note(f"{self._run_name} began; {self._before}" + again * is_again)
        elif self.run.number > 1 or settings.resume:
            self._note(f"continuing {self._run_name} here")
        if not self._settled:
            await self._create(self._nodes_job, follow=True)
            self._join()

    def _check_run_before(self, number: int) -> None:
        """Raises PreconditionError if launchers report that the previous run is still in progress.
        The coordinator cannot detect this, because workers of a plain script are not members: to
        the coordinator, the run has no members, and starting the next run would end it."""
        try:
            before = self._client.get_job(self._settings.job_id, deadline=_CALL_DEADLINE)
            nodes = self._client.get_job(self._nodes_job.job_id, deadline=_CALL_DEADLINE)
        except ShoalError:
            # Either the coordinator is unreachable, and creating the job will wait for it, or the
            # job does not exist.
            return
        hosts = sorted({member.host for member in nodes.members})
        if (
            hosts
            and nodes.run == before.run
            and before.run.number == number - 1
            and before.phase in _GOING_ON
        ):
            raise PreconditionError(
                f"run {before.run.number} of job {self._settings.job_id} is still in progress "
                f"with {len(nodes.members)} launchers "
                f"({', '.join(hosts[:5])}{', ...' if len(hosts) > 5 else ''}); stop it before "
                f"starting run {number}, or omit --run to join it",
                reason="RUN_UNDER_WAY",
            )

    def _is_completed(self, number: int) -> bool:
        self._client.run = pb.RunId(number=number)
        try:
            return (
                self._client.get_job(self._settings.job_id, deadline=_CALL_DEADLINE).ending
                == pb.JOB_ENDING_COMPLETED
            )
        except ShoalError:
            return False

    async def _create(
        self, job: JobSettings, *, number: int = 0, resume: bool = False, follow: bool = False
    ) -> pb.CreateJobResponse:
        """Creates a job at the coordinator. Waits for the coordinator, which may start later than
        the launchers, and until all members of a previous run have left."""
        began, answered = self._loop.time(), False
        said_at = began - _REMINDER_S
        explain_at = began + _EXPLAIN_AFTER_S
        while True:
            limit = (
                self._settings.join_timeout
                if answered
                else min(_CONNECT_TIMEOUT, self._settings.join_timeout)
            )
            left_s = began + limit.total_seconds() - self._loop.time()
            try:
                return await asyncio.to_thread(
                    self._client.create_job,
                    job.message(),
                    number=number,
                    resume=resume,
                    follow=follow,
                )
            except (UnavailableError, DeadlineError) as error:
                answered |= error.reason == _RUN_ENDING
                if not answered and (left_s <= 0 or self._loop.time() >= explain_at):
                    explain_at = self._loop.time() + _REMINDER_S
                    obstacle = await asyncio.to_thread(self._client.find_obstacle)
                    cause = str(error) if obstacle is None else obstacle.cause
                    if left_s <= 0 or (obstacle is not None and obstacle.permanent):
                        raise UnavailableError(
                            f"no coordinator responded at {self.coordinator} (--rdzv-endpoint) for "
                            f"{self._loop.time() - began:.0f} s: {cause}"
                            + (
                                ""
                                if _secured(obstacle)
                                else "; on one machine, use --standalone, which starts its own"
                            )
                        ) from error
                    self._note(
                        f"waiting up to {left_s:.0f} s longer for the coordinator at "
                        f"{self.coordinator}: {cause}"
                    )
                if left_s <= 0:
                    raise DeadlineError(
                        f"the previous run did not end within {limit.total_seconds():g} s: {error}"
                    ) from error
                if error.reason == _RUN_ENDING and self._loop.time() >= said_at + _REMINDER_S:
                    said_at = self._loop.time()
                    self._note(f"waiting up to {left_s:.0f} s longer: {error}")
                await asyncio.sleep(_RETRY_S)

    def _find_own(self) -> OwnAddress:
        endpoint = parse_address(self.coordinator)
        return OwnAddress.find(
            self._settings.local_address,
            self._settings.listen_address,
            towards=(endpoint.host, endpoint.port),
        )

    def _join(self) -> None:
        """Joins the launchers' job as a new member."""
        own = self._own or self._find_own()
        if self._port is None and self._settings.master_port is None:
            # only reserves the port; the worker of rank 0 will listen on it on all interfaces
            self._port = ReservedPort(host="0.0.0.0")  # noqa: S104
        port = self._settings.master_port or (self._port.port if self._port is not None else 0)
        self._session = NodeSession(
            self._client,
            job_id=self._nodes_job.job_id,
            launcher_id=self._launcher_id,
            address=str(Address(own.announced, port)),
            on_change=self._wake,
            on_job_lost=self._create_lost,
        )

    async def _join_anew(self, why: str) -> None:
        """Rejoins the launchers' job as a new member. To the other launchers, this looks like a
        death: like this launcher, they stop their workers and wait for a new generation."""
        assert self._session is not None
        await asyncio.to_thread(self._session.leave, pb.Leave.REASON_FAILED, why)
        self._join()

    def _create_lost(self) -> None:
        """Creates the jobs again after the coordinator has lost its data. Every launcher tries
        this, and the first attempt succeeds. Raises ShoalError."""
        created = self._client.create_job(self._job().message(), deadline=_CALL_DEADLINE).created
        if not self._settled:
            created |= self._client.create_job(
                self._nodes_job.message(), follow=True, deadline=_CALL_DEADLINE
            ).created
        if created:
            self._note(
                f"the coordinator at {self.coordinator} lost its data, including job "
                f"{self._settings.job_id}; created the job again, and running workers continue"
            )

    def _look_for_job(self) -> None:
        with contextlib.suppress(ShoalError):
            # e.g. the coordinator is unreachable; the next pass tries again
            try:
                self._client.get_job(self._settings.job_id, deadline=_CALL_DEADLINE)
            except UnknownResourceError:
                self._create_lost()

    async def _say_who_is_missing(self) -> None:
        """Prints a line about missing launchers every 10 s, until cancelled."""
        while True:
            await asyncio.sleep(_REMINDER_S)
            self._note(await asyncio.to_thread(self._missing))

    def _missing(self) -> str:
        left_s = max(0.0, self._give_up_at - self._loop.time())
        what = f"waiting up to {left_s:.0f} s longer for the launchers of {self._run_name}"
        try:
            job = self._client.get_job(self._nodes_job.job_id, deadline=_CALL_DEADLINE)
        except ShoalError as error:
            return (
                f"{what}; the coordinator at {self.coordinator} could not be asked how many "
                f"have joined ({error})"
            )
        hosts = sorted(member.host for member in job.members)
        least = self._settings.nodes.least
        before = f"; {self._before}" if self._before else ""
        return (
            f"{what}: {len(hosts)} of at least {least} have joined ({', '.join(hosts) or 'none'}), "
            f"{max(0, least - len(hosts))} are missing{before}"
        )

    def _wake(self) -> None:
        """Wakes the event loop. Called on the session's thread, which may outlive the loop."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._changed.set)

    async def _agreed_place(self) -> NodePlacement:
        while True:
            session = self._session
            assert session is not None, "joined before the site counted as open"
            self._raise_if_stopped(session)
            if session.is_closed and self._received is not None:
                raise PreconditionError(
                    f"{self._run_name} ended on another machine", reason="RUN_ENDED"
                )
            if session.is_closed:
                # the run ended between this launcher's two requests, so this is a later run
                await self._enter_run()
                continue
            if session.error is not None:
                raise session.error
            node_status = session.node_status
            if node_status.placement is None:
                await self._wait_for_change()
            elif node_status.starts == self._placed:
                # The workers on this machine were stopped, but the place is unchanged. The other
                # launchers must learn that the next workers are new.
                await self._join_anew("its workers are being restarted")
            else:
                self._received, self._placed = node_status, node_status.starts
                session.works_in = node_status.generation
                return node_status.placement

    def _raise_if_stopped(self, session: NodeSession) -> None:
        if session.stopped is not None:
            raise PreconditionError(
                f"job {self._settings.job_id} was stopped: {session.stopped}", reason="JOB_STOPPED"
            )

    async def _wait_for_change(self, *, timeout_s: float | None = None) -> None:
        """Waits until the session reports a change, or for the timeout. Callers check the state
        before they wait, so several can wait for the same event."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def _take_leave(self, session: NodeSession, ending: Ending) -> None:
        session.leave(*_LEAVES[ending])
        if (
            self._settings.nodes.fixed
            and session.error is None
            and session.stopped is None
            and ending is not Ending.STOPPED
        ):
            # With a fixed number of launchers, all are needed, so the others need not wait for this
            # one.
            with contextlib.suppress(ShoalError):
                self._stop_those_that_wait(
                    "have finished" if ending is Ending.FINISHED else "failed"
                )

    def _announce_end(self, ending: Ending) -> None:
        """Reports the outcome of a plain script's run. Its workers are not members of the job and
        cannot report it themselves. The coordinator ignores a report about a different run."""
        if ending is Ending.STOPPED or (ending is Ending.FAILED and not self._settings.nodes.fixed):
            return
        came_to = pb.JOB_ENDING_COMPLETED if ending is Ending.FINISHED else pb.JOB_ENDING_FAILED
        what = "finished" if ending is Ending.FINISHED else "failed"
        with contextlib.suppress(ShoalError):
            reason = f"the workers on {socket.gethostname()} {what}"
            self._client.stop_job(
                self._settings.job_id, reason=reason, ending=came_to, deadline=_CALL_DEADLINE
            )

    def _stop_those_that_wait(self, what: str) -> None:
        """Stops the launchers' job unless it is finished, so that no other launcher waits for this
        one. The job is finished if this launcher finished while all launchers had node ranks; the
        others then finish on their own."""
        job_id = self._nodes_job.job_id
        if self._client.get_job(job_id).phase != pb.JOB_PHASE_FINISHED:
            self._client.stop_job(job_id, reason=f"the workers on {socket.gethostname()} {what}")


def _secured(obstacle: Obstacle | None) -> bool:
    """Returns whether the coordinator can be reached but does not accept the credentials."""
    return obstacle is not None and obstacle.permanent


def _previous_run_text(made: pb.CreateJobResponse) -> str:
    """Returns a human-readable description of the previous run's outcome."""
    if not made.HasField("previous"):
        return ""
    past = made.previous
    how = _ENDINGS.get(past.ending, "ended")
    ago_s = max(0, made.now_unix_ms - past.ended_unix_ms) // 1000
    return f"run {past.run.number} {how} {ago_s} s ago" + (
        f" ({past.ending_reason})" if past.ending_reason else ""
    )


_GOING_ON: Final = (pb.JOB_PHASE_WAITING, pb.JOB_PHASE_RUNNING)
_ENDINGS: Final = {
    pb.JOB_ENDING_COMPLETED: "was completed",
    pb.JOB_ENDING_STOPPED: "was stopped",
    pb.JOB_ENDING_FAILED: "failed",
}
_LEAVES: Final = {
    Ending.FINISHED: (pb.Leave.REASON_FINISHED, ""),
    Ending.FAILED: (pb.Leave.REASON_FAILED, "its workers failed"),
    Ending.STOPPED: (pb.Leave.REASON_DRAINED, "its launcher was stopped"),
}
