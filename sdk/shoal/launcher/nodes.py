"""A run on several machines, at a coordinator that all launchers share: `shoal run --rdzv-endpoint`.

torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR) must agree on all machines before any worker starts. So the launchers are members of
a job of their own, `<job>.nodes`, and take their node ranks from its generations: one with other launchers, or other starts of theirs, is a
new start of all plain workers. Elastic workers get their ranks from the job itself, and stay as they are.

Nothing ends because the coordinator is away, or has lost its data: the launchers wait for it, and create anew what it has lost.

The site belongs to the event loop's thread; the session's thread only wakes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import (
    ConfigurationError,
    DeadlineError,
    PreconditionError,
    ShoalError,
    UnavailableError,
    UnknownResourceError,
)
from shoal_common.settings import Address, parse_address
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal.launcher.credentials import channel_settings
from shoal.launcher.environment import NodePlacement
from shoal.launcher.jobs import JobSettings, launchers_job_id
from shoal.launcher.node_session import NodeSession, Standing
from shoal.launcher.ports import ReservedPort
from shoal.launcher.reporter import ExitReporter
from shoal.launcher.settings import RunSettings
from shoal.launcher.site import Ending

_CONNECT_TIMEOUT: Final = timedelta(seconds=60)
_CALL_DEADLINE: Final = timedelta(seconds=2)
_RETRY_S: Final = 0.2
_LOOK_S: Final = 5.0
_REMINDER_S: Final = 10.0
"""Between two lines that say who is waited for."""
_WITHOUT_A_PLACE: Final = timedelta(seconds=60)
"""So long plain workers go on while their launcher has no place among the others: after a cut, all may come back to where they were."""
_DEFAULT_MASTER_PORT: Final = 29500


class SharedSite:
    """See `site.Site`."""

    def __init__(self, settings: RunSettings, *, note: Callable[[str], None]) -> None:
        """`note` tells a person what happens; called on any thread. Raises ConfigurationError for addresses and certificates that cannot
        work."""
        assert settings.endpoint is not None
        if settings.master_address is not None and settings.node_rank is None:
            raise ConfigurationError("--master-addr without --node-rank: give both, or neither and let the launchers agree")
        self.coordinator = settings.endpoint
        self._settings = settings
        self._note = note
        self._client = CoordinatorClient(channel_settings(settings.endpoint))
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
        """`Standing.starts` of the place that the workers were started in last."""
        self._told: Standing | None = None
        """What `moved` and `place` have told the agent last; None before the first place."""
        self._left_alone = False
        """The session was refused while workers ran: they go on, and nobody hears of launchers that come or go."""

    def begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._opened = asyncio.Event()

    async def open(self, launcher_id: str) -> ExitReporter:
        self._launcher_id = launcher_id
        await self._create(self._job())
        if not self._settled:
            await self._create(self._nodes_job)
            self._join()
        self._opened.set()
        return ExitReporter(self._client, job_id=self._settings.job_id, launcher_id=launcher_id)

    async def keep(self) -> None:
        """Raises PreconditionError when the job was stopped."""
        while self._session is None:
            await asyncio.sleep(_LOOK_S)
            await asyncio.to_thread(self._look_for_job)
        while True:
            self._raise_if_stopped(self._session)
            error = self._session.error
            if error is not None and not self._session.is_closed and self._told is not None and not self._left_alone:
                self._left_alone = True
                self._note(f"the workers go on, but launchers that come or go are not noticed any more: {error}")
            await self._wait_for_change()

    async def place(self, *, again: bool) -> NodePlacement:
        await self._opened.wait()
        if self._settled:
            return self._settled_place()
        if again:
            await self._join_anew("its workers are started anew")
        timeout_s = self._settings.join_timeout.total_seconds()
        reminder = self._loop.create_task(self._say_who_is_missing())
        try:
            async with asyncio.timeout(timeout_s):
                return await self._agreed_place()
        except TimeoutError:
            why = self._session.standing.why if self._session is not None else ""
            raise DeadlineError(
                f"{self._settings.nodes.least} launchers for job {self._settings.job_id} did not come together within {timeout_s:g} s"
                + (f" ({why})" if why else "")
            ) from None
        finally:
            reminder.cancel()

    async def moved(self) -> None:
        alone_since: float | None = None
        while True:
            session, told = self._session, self._told
            standing = session.standing if session is not None else None
            if session is None or standing is None or told is None or (standing.placement is None and told.placement is None):
                await self._wait_for_change()
                continue
            if standing.placement is None:
                alone_since = self._loop.time() if alone_since is None else alone_since
                left_s = alone_since + _WITHOUT_A_PLACE.total_seconds() - self._loop.time()
                if left_s > 0:
                    await self._wait_for_change(timeout_s=left_s)
                    continue
            alone_since = None
            session.works_in = standing.generation
            if standing.starts != told.starts:
                self._told = standing
                return
            await self._wait_for_change()

    def fail(self, reason: str) -> None:
        if self._session is not None:
            with contextlib.suppress(ShoalError):
                self._client.stop_job(self._nodes_job.job_id, reason=reason, deadline=_CALL_DEADLINE)

    def close(self, ending: Ending) -> None:
        try:
            if self._session is not None:
                self._take_leave(self._session, ending)
        finally:
            self._client.close()
            if self._port is not None:
                self._port.close()

    # ---------------------------------------------------------------------------------------------------------------------

    @property
    def _settled(self) -> bool:
        """The places were settled beforehand, by flags."""
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
            parameter_servers=self._settings.servers,
            parameter_server_backups=self._settings.server_backups,
            max_parameter_servers=self._settings.max_servers,
            join_grace=self._settings.effective_join_grace,
        )

    async def _create(self, job: JobSettings) -> None:
        """Creates a job at the coordinator, which may start later than its launchers."""
        timeout_s = min(_CONNECT_TIMEOUT, self._settings.join_timeout).total_seconds()
        deadline = self._loop.time() + timeout_s
        while True:
            try:
                await asyncio.to_thread(self._client.create_job, job.message())
            except (UnavailableError, DeadlineError) as error:
                if self._loop.time() > deadline:
                    raise UnavailableError(
                        f"no coordinator has answered at {self.coordinator} (--rdzv-endpoint) for {timeout_s:g} s; "
                        "on one machine use --standalone, which brings its own"
                    ) from error
                await asyncio.sleep(_RETRY_S)
            else:
                return

    def _join(self) -> None:
        """A new incarnation of this launcher among the launchers."""
        address = self._settings.local_address or address_towards(parse_address(self.coordinator))
        if self._port is None and self._settings.master_port is None:
            self._port = ReservedPort(host="0.0.0.0")  # noqa: S104 - only kept; the worker of rank 0 listens on all interfaces
        port = self._settings.master_port or (self._port.port if self._port is not None else 0)
        self._session = NodeSession(
            self._client,
            job_id=self._nodes_job.job_id,
            launcher_id=self._launcher_id,
            address=str(Address(address, port)),
            on_change=self._wake,
            on_job_lost=self._create_lost,
        )

    async def _join_anew(self, why: str) -> None:
        """A death, to the other launchers: they stop their workers and wait for a new generation, as this one does."""
        assert self._session is not None
        await asyncio.to_thread(self._session.leave, pb.Leave.REASON_FAILED, why)
        self._join()

    def _create_lost(self) -> None:
        """The coordinator has lost its data. Any of the launchers creates the jobs anew; the others find them. Raises ShoalError."""
        created = self._client.create_job(self._job().message(), deadline=_CALL_DEADLINE).created
        if not self._settled:
            created |= self._client.create_job(self._nodes_job.message(), deadline=_CALL_DEADLINE).created
        if created:
            self._note(
                f"the coordinator at {self.coordinator} has lost its data, and job {self._settings.job_id} with it: created anew; "
                "workers that live go on"
            )

    def _look_for_job(self) -> None:
        with contextlib.suppress(ShoalError):  # away, say: asked again
            try:
                self._client.get_job(self._settings.job_id, deadline=_CALL_DEADLINE)
            except UnknownResourceError:
                self._create_lost()

    async def _say_who_is_missing(self) -> None:
        """A line every 10 s, until cancelled."""
        while True:
            await asyncio.sleep(_REMINDER_S)
            self._note(await asyncio.to_thread(self._missing))

    def _missing(self) -> str:
        what = f"waiting for the launchers of job {self._settings.job_id}"
        try:
            job = self._client.get_job(self._nodes_job.job_id, deadline=_CALL_DEADLINE)
        except ShoalError as error:
            return f"{what}: the coordinator at {self.coordinator} does not say who is there ({error})"
        hosts = sorted(member.host for member in job.members)
        return f"{what}: {len(hosts)} of at least {self._settings.nodes.least} are there ({', '.join(hosts) or 'none'})"

    def _wake(self) -> None:
        """Called on the session's thread, which may outlast the loop."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._changed.set)

    async def _agreed_place(self) -> NodePlacement:
        while True:
            session = self._session
            assert session is not None, "joined before the site counted as open"
            self._raise_if_stopped(session)
            if session.is_closed:
                raise PreconditionError(f"job {self._settings.job_id} came to its end on another machine", reason="JOB_CLOSED")
            if session.error is not None:
                raise session.error
            standing = session.standing
            if standing.placement is None:
                await self._wait_for_change()
            elif standing.starts == self._placed:
                # The workers here were stopped, and this is where they were before: to the others too they have to be new ones.
                await self._join_anew("its workers are started anew")
            else:
                self._told, self._placed = standing, standing.starts
                session.works_in = standing.generation
                return standing.placement

    def _raise_if_stopped(self, session: NodeSession) -> None:
        if session.stopped is not None:
            raise PreconditionError(f"job {self._settings.job_id} was stopped: {session.stopped}", reason="JOB_STOPPED")

    async def _wait_for_change(self, *, timeout_s: float | None = None) -> None:
        """Until the session has heard something, or the time is over. Each waiter looks at the state before it waits, so they may share the
        event."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def _take_leave(self, session: NodeSession, ending: Ending) -> None:
        session.leave(*_LEAVES[ending])
        if self._settings.nodes.fixed and session.error is None and session.stopped is None and ending is not Ending.STOPPED:
            # None of a fixed number can do without this launcher: nobody is to wait for it.
            with contextlib.suppress(ShoalError):
                self._stop_those_that_wait("have finished" if ending is Ending.FINISHED else "failed")

    def _stop_those_that_wait(self, what: str) -> None:
        """Where a launcher finished while all had their places, the job is finished, and the others come to their end by themselves."""
        job_id = self._nodes_job.job_id
        if self._client.get_job(job_id).phase != pb.JOB_PHASE_FINISHED:
            self._client.stop_job(job_id, reason=f"the workers on {socket.gethostname()} {what}")


_LEAVES: Final = {
    Ending.FINISHED: (pb.Leave.REASON_FINISHED, ""),
    Ending.FAILED: (pb.Leave.REASON_FAILED, "its workers failed"),
    Ending.STOPPED: (pb.Leave.REASON_DRAINED, "its launcher was stopped"),
}


def address_towards(endpoint: Address) -> str:
    """The address of this machine on the way to `endpoint`. Nothing is sent: connecting a datagram socket only chooses the route."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UnavailableError(f"no route to the coordinator's host {endpoint.host!r}: {error}; give --local-addr") from error
