"""A run on several machines, at a coordinator that all launchers share: `shoal run --rdzv-endpoint`.

torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR) must agree on all machines before any worker starts. So the launchers are members of
a job of their own, `<job>.nodes`, and take their node ranks from its generations: each new one is a new start of all plain workers.
Elastic workers get their ranks from the job itself, and stay as they are.

The site belongs to the event loop's thread; the session's thread only wakes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from datetime import timedelta
from typing import Final

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import ConfigurationError, DeadlineError, PreconditionError, ShoalError, UnavailableError
from shoal_common.settings import Address, parse_address
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal.launcher.agent import Ending
from shoal.launcher.credentials import channel_settings
from shoal.launcher.environment import NodePlacement
from shoal.launcher.jobs import JobSettings, launchers_job_id
from shoal.launcher.node_session import NodeSession, Standing
from shoal.launcher.ports import ReservedPort
from shoal.launcher.reporter import ExitReporter
from shoal.launcher.settings import RunSettings

_CONNECT_TIMEOUT: Final = timedelta(seconds=60)
_RETRY_S: Final = 0.2
_DEFAULT_MASTER_PORT: Final = 29500


class SharedSite:
    """See `agent.Site`."""

    def __init__(self, settings: RunSettings) -> None:
        """Raises ConfigurationError for addresses and certificates that cannot work."""
        assert settings.endpoint is not None
        if settings.master_address is not None and settings.node_rank is None:
            raise ConfigurationError("--master-addr without --node-rank: give both, or neither and let the launchers agree")
        self.coordinator = settings.endpoint
        self._settings = settings
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
        self._placed = 0
        """Number of the generation that the last place was given in; 0 before the first."""
        self._told: Standing | None = None
        """What `moved` and `place` have told the agent; None before the first place."""

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
        """Raises what ends this launcher's membership: its session was refused, or the job was stopped."""
        while True:
            if self._session is not None:
                self._raise_if_over(self._session)
            await self._wait_for_change()

    async def place(self, *, again: bool) -> NodePlacement:
        await self._opened.wait()
        if self._settled:
            return self._settled_place()
        if again and self._session is not None:
            # A death, to the other launchers: they stop their workers and wait for a new generation, as this one does.
            await asyncio.to_thread(self._session.leave, pb.Leave.REASON_FAILED, "its workers are started anew")
            self._join()
        timeout_s = self._settings.join_timeout.total_seconds()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._agreed_place()
        except TimeoutError:
            why = self._session.standing.why if self._session is not None else ""
            raise DeadlineError(
                f"{self._settings.nodes.least} launchers for job {self._settings.job_id} did not come together within {timeout_s:g} s"
                + (f" ({why})" if why else "")
            ) from None

    async def moved(self) -> None:
        while True:
            session = self._session
            if session is not None and self._told is not None and session.standing != self._told:
                self._told = session.standing
                session.works_in = self._told.generation
                return
            await self._wait_for_change()

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
        address = self._settings.local_address or _address_towards(parse_address(self.coordinator))
        if self._port is None and self._settings.master_port is None:
            self._port = ReservedPort(host="0.0.0.0")  # noqa: S104 - only kept; the worker of rank 0 listens on all interfaces
        port = self._settings.master_port or (self._port.port if self._port is not None else 0)
        self._session = NodeSession(
            self._client,
            job_id=self._nodes_job.job_id,
            launcher_id=self._launcher_id,
            address=str(Address(address, port)),
            on_change=self._wake,
        )

    def _wake(self) -> None:
        """Called on the session's thread, which may outlast the loop."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._changed.set)

    async def _agreed_place(self) -> NodePlacement:
        while True:
            session = self._session
            assert session is not None, "joined before the site counted as open"
            self._raise_if_over(session)
            if session.is_closed:
                raise PreconditionError(f"job {self._settings.job_id} came to its end on another machine", reason="JOB_CLOSED")
            standing = session.standing
            if standing.placement is not None and standing.generation > self._placed:
                self._placed = session.works_in = standing.generation
                self._told = standing
                return standing.placement
            await self._wait_for_change()

    def _raise_if_over(self, session: NodeSession) -> None:
        if session.error is not None and not session.is_closed:
            raise session.error
        if session.stopped is not None:
            raise PreconditionError(f"job {self._settings.job_id} was stopped: {session.stopped}", reason="JOB_STOPPED")

    async def _wait_for_change(self) -> None:
        """Until the session has heard something. Each waiter looks at the state before it waits, so they may share the event."""
        self._changed.clear()
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


def _address_towards(endpoint: Address) -> str:
    """The address of this machine on the way to `endpoint`. Nothing is sent: connecting a datagram socket only chooses the route."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UnavailableError(f"no route to the coordinator's host {endpoint.host!r}: {error}; give --local-addr") from error
