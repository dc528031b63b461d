"""Methods of the gRPC service shoal.v1.Coordinator. Each method parses its request, asks the job's
loop or reads the job's state, and returns the response.

Methods raise errors, which RpcServer converts to gRPC statuses. The sessions are in
member_sessions.py and server_sessions.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Final

from shoal_common.errors import LimitError, PreconditionError, UnavailableError
from shoal_common.rpc.server_interceptor import caller, member_key
from shoal_common.security.authentication import Role, check_member_key
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_coordinator.membership import runs
from shoal_coordinator.membership.leases import Leased
from shoal_coordinator.membership.members.leaving import DrainNoted, ExitNoted
from shoal_coordinator.membership.model.reasons import Refusal
from shoal_coordinator.membership.model.shards import ShardLayout
from shoal_coordinator.membership.model.state import JobState, RunId
from shoal_coordinator.membership.servers.servers import ServersAwaited
from shoal_coordinator.service.clock import Clock
from shoal_coordinator.service.job_loop import JobLoop
from shoal_coordinator.service.jobs import Jobs
from shoal_coordinator.service.member_sessions import MemberSessions
from shoal_coordinator.service.messages import checks, requests, responses
from shoal_coordinator.service.messages.requests import of_run
from shoal_coordinator.service.server_sessions import ServerSessions
from shoal_coordinator.state.store import JobStore

_EVENTS_AT_ONCE: Final = 500
_MOST_WATCHERS: Final = 1_000
"""Maximum number of callers that follow the events of one job."""


class CoordinatorServicer:
    """Implements shoal.v1.Coordinator. There is one instance per process, on the event loop."""

    def __init__(
        self,
        jobs: Jobs,
        *,
        store: JobStore,
        clock: Clock,
        members: MemberSessions,
        servers: ServerSessions,
        request_timeout: timedelta,
    ) -> None:
        self._jobs = jobs
        self._store = store
        self._clock = clock
        self._members = members
        self._servers = servers
        self._timeout_s = request_timeout.total_seconds()
        self._watchers: Counter[str] = Counter()
        """Job -> number of callers that follow its events."""

    # ----------------------------------------------------------------------------------------- jobs

    async def CreateJob(self, request: pb.CreateJobRequest, context: Any) -> pb.CreateJobResponse:  # noqa: N802
        """Creates a job, joins an existing job with the same specification, or starts its next
        run."""
        wanted = requests.parse_creation(request)
        created, granted = await self._jobs.create(wanted, timeout_s=self._timeout_s)
        return pb.CreateJobResponse(
            spec=responses.spec_message(wanted.spec),
            created=created,
            run=responses.run_message(granted.run),
            begun=granted.begun,
            previous=None
            if granted.previous is None
            else responses.past_run_message(granted.previous),
            now_unix_ms=self._clock.now().unix_ms,
        )

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobResponse:  # noqa: N802
        """Returns a job's state from memory, so that it is available while Redis is unreachable."""
        job = self._job(request)
        now, run = self._clock.now(), requests.parse_run(request.run)
        if run is not None:
            if (past := runs.find_past(job.state, run)) is not None:
                return responses.ended_run_message(past, job.state, now.unix_ms)
            self._check_run(job.state, run)
        member_id, below_step = requests.parse_job_filter(request)
        return responses.job_message(
            job.state,
            job.pulses,
            now.unix_ms,
            now_ms=now.ms,
            member_id=member_id,
            below_step=below_step,
        )

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:  # noqa: N802
        """Returns all jobs for which the caller's token is valid, ordered by id."""
        states = (state for state in self._jobs.states() if caller().may_touch(state.spec.job_id))
        return pb.ListJobsResponse(jobs=[responses.summary_message(state) for state in states])

    async def ReportExit(  # noqa: N802
        self, request: pb.ReportExitRequest, context: Any
    ) -> pb.ReportExitResponse:
        """Records the exit of a process, reported by its launcher."""
        if caller().role is not Role.ADMIN:
            self._check_speaks_for(request)
        noted = await self._job(request).ask(
            of_run(request.run, requests.parse_exit(request)), timeout_s=self._timeout_s, keep=True
        )
        assert isinstance(noted, ExitNoted)
        return pb.ReportExitResponse(was_member=noted.was_member, rank=noted.rank)

    async def ReportMachine(  # noqa: N802
        self, request: pb.ReportMachineRequest, context: Any
    ) -> pb.ReportMachineResponse:
        """Records the condition of a machine."""
        await self._job(request).ask(
            of_run(request.run, requests.parse_machine(request)),
            timeout_s=self._timeout_s,
            keep=True,
        )
        return pb.ReportMachineResponse()

    async def DrainMember(  # noqa: N802
        self, request: pb.DrainMemberRequest, context: Any
    ) -> pb.DrainMemberResponse:
        """Asks a member to leave at its next step boundary."""
        noted = await self._job(request).ask(
            of_run(request.run, requests.parse_drain(request)), timeout_s=self._timeout_s, keep=True
        )
        assert isinstance(noted, DrainNoted)
        return pb.DrainMemberResponse(member_id=noted.member_id)

    async def DrainServer(  # noqa: N802
        self, request: pb.DrainServerRequest, context: Any
    ) -> pb.DrainServerResponse:
        """Asks a parameter server to hand over its partitions and exit."""
        await self._job(request).ask(
            of_run(request.run, requests.parse_server_drain(request)),
            timeout_s=self._timeout_s,
            keep=True,
        )
        return pb.DrainServerResponse()

    async def StopJob(self, request: pb.StopJobRequest, context: Any) -> pb.StopJobResponse:  # noqa: N802
        """Asks all members of a job to leave."""
        await self._job(request).ask(
            of_run(request.run, requests.parse_stop(request)), timeout_s=self._timeout_s, keep=True
        )
        return pb.StopJobResponse()

    # ------------------------------------------------------------------------------------- sessions

    def JoinSession(  # noqa: N802
        self, messages: AsyncIterator[pb.MemberMessage], context: Any
    ) -> AsyncGenerator[bytes, None]:
        """Serves a member's session."""
        return self._members.serve(messages)

    def ServerSession(  # noqa: N802
        self, messages: AsyncIterator[pb.ServerMessage], context: Any
    ) -> AsyncGenerator[bytes, None]:
        """Serves a parameter server's session."""
        return self._servers.serve(messages)

    async def GetRanks(self, request: pb.GetRanksRequest, context: Any) -> bytes:  # noqa: N802
        """Returns ranks of the newest generation from memory. The full table is serialized once for
        all callers."""
        job = self._job(request)
        generation, positions = requests.parse_ranks(request, job.state)
        if positions:
            return bytes(responses.ranks_message(generation, positions).SerializeToString())
        return job.sessions.whole_table(generation)

    # ----------------------------------------------------------------------------------------- data

    async def DeclareTensors(  # noqa: N802
        self, request: pb.DeclareTensorsRequest, context: Any
    ) -> pb.DeclareTensorsResponse:
        """Assigns a model's tensors to the job's parameter servers."""
        job = self._job(request)
        layout = await job.ask(
            of_run(request.run, requests.parse_tensors(request)), timeout_s=self._timeout_s
        )
        if isinstance(layout, ServersAwaited):
            raise UnavailableError(
                f"job {job.state.spec.job_id} is waiting for its parameter servers: "
                f"{layout.registered} of {layout.wanted} are registered",
                reason=Refusal.NO_SERVERS,
            )
        assert isinstance(layout, ShardLayout)
        return pb.DeclareTensorsResponse(shard_map=responses.shard_map_message(layout, job.state))

    async def GetShardMap(  # noqa: N802
        self, request: pb.GetShardMapRequest, context: Any
    ) -> pb.GetShardMapResponse:
        """Returns the assignment of a model's tensors to parameter servers, from memory."""
        state = self._job(request).state
        run = requests.parse_run(request.run)
        if run is not None:
            self._check_run(state, run)
        if state.layout is None:
            raise PreconditionError(
                f"no member of job {state.spec.job_id} has declared its tensors; call "
                "DeclareTensors first",
                reason=Refusal.TENSORS_UNDECLARED,
            )
        return pb.GetShardMapResponse(shard_map=responses.shard_map_message(state.layout, state))

    async def LeaseBatches(  # noqa: N802
        self, request: pb.LeaseBatchesRequest, context: Any
    ) -> pb.LeaseBatchesResponse:
        """Leases batches to a member."""
        self._check_speaks_for(request)
        leased = await self._job(request).ask(
            of_run(request.run, requests.parse_lease(request)), timeout_s=self._timeout_s
        )
        assert isinstance(leased, Leased)
        return pb.LeaseBatchesResponse(
            batches=leased.batches,
            epoch_done=leased.epoch_done,
            retry_after_ms=leased.retry_after_ms,
            newest_epoch=leased.newest_epoch,
            first_key=leased.first_key,
        )

    async def WatchEvents(  # noqa: N802
        self, request: pb.WatchEventsRequest, context: Any
    ) -> AsyncIterator[pb.Event]:
        """Streams a job's events, oldest first."""
        job = self._job(request)
        after, run = (
            requests.parse_event_id(request.after_event_id),
            requests.parse_run(request.run),
        )
        with self._followed(job.state.spec.job_id) if request.follow else nullcontext():
            async with aclosing(self._events(job, after, run, follow=request.follow)) as events:
                async for event in events:
                    yield event

    async def _events(
        self, job: JobLoop, after: str, run: RunId | None, *, follow: bool
    ) -> AsyncGenerator[pb.Event, None]:
        while True:
            # Must be requested before the events are read, so that no commit in between is missed.
            committed = job.next_commit()
            events = await self._store.events(
                job.state.spec.job_id, after=after, count=_EVENTS_AT_ONCE
            )
            for event in events:
                if run is None or run.number == event.record.run:
                    yield responses.event_message(event)
                after = event.event_id
            if len(events) == _EVENTS_AT_ONCE:
                continue
            if not follow:
                return
            await committed.wait()
            if job.failure is not None:
                raise job.failure

    @contextmanager
    def _followed(self, job_id: str) -> Iterator[None]:
        """Counts a caller as a follower of a job's events while the block runs. Raises LimitError
        if the job already has the maximum number of followers."""
        if self._watchers[job_id] >= _MOST_WATCHERS:
            raise LimitError(
                f"job {job_id} already has {self._watchers[job_id]} callers following its events, "
                "the maximum; call again without follow",
                reason=Refusal.WATCHERS_LIMIT,
            )
        self._watchers[job_id] += 1
        try:
            yield
        finally:
            self._watchers[job_id] -= 1
            if not self._watchers[job_id]:
                del self._watchers[job_id]

    def _check_speaks_for(self, request: Any) -> None:
        """Raises PermissionDeniedError unless the caller has the key of the member on whose behalf
        it sends the request."""
        member = self._job(request).state.members.get(request.member_id)
        if member is not None:
            check_member_key(member.member_id, member.identity.key_digest, member_key())

    def _check_run(self, state: JobState, run: RunId) -> None:
        if not runs.is_current(state, run):
            raise runs.not_current(state, run, self._clock.now())

    def _job(self, request: Any) -> JobLoop:
        return self._jobs.get(checks.job_id(request.job_id))
