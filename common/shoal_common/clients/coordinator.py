"""Client of the coordinator: one method for each RPC of shoal.v1.Coordinator, with the same name in
snake_case.

Clients are synchronous and thread-safe; never use a client in a forked child. Every method raises
ShoalErrors: those documented for each RPC in the .proto, and UnavailableError or DeadlineError if
the coordinator cannot be reached. `deadline` replaces ChannelSettings.deadline. This module builds
requests; the coordinator validates them.

A caller that belongs to a run of a job sets `run`; all requests of this client then refer to that
run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_protos.v1.coordinator_pb2_grpc import CoordinatorStub

from shoal_common.clients.calls import Caller, ResponseStream
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.rpc.reach import Obstacle
from shoal_common.security.authentication import MEMBER_KEY


class CoordinatorClient:
    """Synchronous client of the coordinator. A context manager. The first call opens the
    connection."""

    def __init__(self, settings: ChannelSettings, *, interceptors: Sequence[Any] = ()) -> None:
        self._caller = Caller(settings, interceptors, CoordinatorStub)
        self.address = settings.address
        """Address (host:port) of the coordinator."""
        self.run: pb.RunId | None = None
        """Run to which all requests refer; None: the newest run."""

    def find_obstacle(self) -> Obstacle | None:
        """Tries to reach the coordinator, in order to explain an UnavailableError. Returns the
        reason why the coordinator cannot be reached; None if it can."""
        return self._caller.find_obstacle()

    # ----------------------------------------------------------------------------------------- jobs

    def create_job(
        self,
        spec: pb.JobSpec,
        *,
        number: int = 0,
        resume: bool = False,
        follow: bool = False,
        deadline: timedelta | None = None,
    ) -> pb.CreateJobResponse:
        """Creates the job, joins its current run, or starts its next run. Raises UnavailableError
        with reason RUN_ENDING until all members of the previous run have left; retry then.

        Args:
            spec: specification of the job.
            number: number of the run that the caller wants to take part in; 0: any run.
            resume: True to continue a run that has failed or was stopped.
            follow: True to create or continue the launchers' auxiliary job, whose runs follow those
                of the main job. In that case, `self.run` is the run of the main job.
            deadline: maximum duration of the call.
        """
        run = pb.RunId(number=number) if number else self.run
        request = pb.CreateJobRequest(spec=spec, run=run, resume=resume, follow=follow)
        return self._caller.unary("CreateJob", request, pb.CreateJobResponse, deadline)

    def get_job(
        self,
        job_id: str,
        *,
        member_id: str = "",
        below_step: int = 0,
        deadline: timedelta | None = None,
    ) -> pb.GetJobResponse:
        """Returns a job's state. `member_id`: include only this member. `below_step`: include only
        members that have committed fewer steps."""
        request = pb.GetJobRequest(
            job_id=job_id, run=self.run, member_id=member_id, below_step=below_step
        )
        return self._caller.unary("GetJob", request, pb.GetJobResponse, deadline)

    def list_jobs(self, *, deadline: timedelta | None = None) -> pb.ListJobsResponse:
        return self._caller.unary("ListJobs", pb.ListJobsRequest(), pb.ListJobsResponse, deadline)

    def report_exit(
        self,
        job_id: str,
        member_id: str,
        *,
        key: str = "",
        exit_code: int,
        signal: int = 0,
        failure: str = "",
        finished: bool = False,
        deadline: timedelta | None = None,
    ) -> pb.ReportExitResponse:
        """Reports the exit of a process.

        Args:
            job_id: id of the job.
            member_id: id of the process as a member.
            key: the member's key, if it has one; an admin may omit it.
            exit_code: exit code of the process.
            signal: number of the signal that killed the process; 0 if none did.
            failure: if not empty, the job fails for this reason.
            finished: True if the member's script finished.
            deadline: maximum duration of the call.
        """
        request = pb.ReportExitRequest(
            job_id=job_id,
            member_id=member_id,
            exit_code=exit_code,
            signal=signal,
            failure=failure,
            finished=finished,
            run=self.run,
        )
        metadata = ((MEMBER_KEY, key),) if key else ()
        return self._caller.unary(
            "ReportExit", request, pb.ReportExitResponse, deadline, metadata=metadata
        )

    def report_machine(
        self,
        job_id: str,
        host: str,
        condition: pb.MachineCondition,
        *,
        reason: str = "",
        deadline: timedelta | None = None,
    ) -> pb.ReportMachineResponse:
        """Reports the condition of a machine. `host`: host name that the machine's members report
        when they join."""
        request = pb.ReportMachineRequest(
            job_id=job_id, host=host, condition=condition, reason=reason, run=self.run
        )
        return self._caller.unary("ReportMachine", request, pb.ReportMachineResponse, deadline)

    def drain_member(
        self,
        job_id: str,
        *,
        member_id: str | None = None,
        rank: int | None = None,
        reason: str = "",
        deadline: timedelta | None = None,
    ) -> pb.DrainMemberResponse:
        """Asks a member to leave; pass its `member_id` or its `rank`."""
        request = pb.DrainMemberRequest(
            job_id=job_id, member_id=member_id, rank=rank, reason=reason, run=self.run
        )
        return self._caller.unary("DrainMember", request, pb.DrainMemberResponse, deadline)

    def drain_server(
        self, job_id: str, server_id: str, *, reason: str = "", deadline: timedelta | None = None
    ) -> pb.DrainServerResponse:
        """Asks a parameter server to hand over its partitions and exit. Returns immediately;
        `ServerStatus.draining` is true until the server has exited."""
        request = pb.DrainServerRequest(
            job_id=job_id, server_id=server_id, reason=reason, run=self.run
        )
        return self._caller.unary("DrainServer", request, pb.DrainServerResponse, deadline)

    def stop_job(
        self,
        job_id: str,
        *,
        reason: str = "",
        ending: pb.JobEnding = pb.JOB_ENDING_UNSPECIFIED,
        deadline: timedelta | None = None,
    ) -> pb.StopJobResponse:
        """Stops a job. `ending`: outcome to record for the run of a plain script, which has no
        members."""
        request = pb.StopJobRequest(job_id=job_id, reason=reason, run=self.run, ending=ending)
        return self._caller.unary("StopJob", request, pb.StopJobResponse, deadline)

    # ------------------------------------------------------------------------------------- sessions

    def join_session(
        self, messages: Iterator[pb.MemberMessage]
    ) -> ResponseStream[pb.MemberDirective]:
        """Opens a member's session. gRPC iterates over `messages` on its own thread; the iterator
        may block, but must end when the stream has ended."""
        return self._caller.stream("JoinSession", messages, pb.MemberDirective, None)

    def get_ranks(
        self,
        job_id: str,
        *,
        generation: int,
        nonce: str,
        ranks: Iterable[int] = (),
        deadline: timedelta | None = None,
    ) -> pb.GetRanksResponse:
        """Returns the given ranks of a generation; all ranks if `ranks` is empty. Raises
        StaleGenerationError if `generation` is not the newest."""
        request = pb.GetRanksRequest(job_id=job_id, generation=generation, nonce=nonce, ranks=ranks)
        return self._caller.unary("GetRanks", request, pb.GetRanksResponse, deadline)

    def server_session(
        self, messages: Iterator[pb.ServerMessage]
    ) -> ResponseStream[pb.ServerDirective]:
        """Opens a parameter server's session. gRPC iterates over `messages` on its own thread; the
        iterator may block, but must end when the stream has ended."""
        return self._caller.stream("ServerSession", messages, pb.ServerDirective, None)

    # ----------------------------------------------------------------------------------------- data

    def declare_tensors(
        self, job_id: str, tensors: Iterable[pb.TensorSpec], *, deadline: timedelta | None = None
    ) -> pb.DeclareTensorsResponse:
        """Declares a model's tensors. Raises UnavailableError with reason NO_SERVERS until the
        job's parameter servers have registered; retry then."""
        request = pb.DeclareTensorsRequest(job_id=job_id, tensors=tensors, run=self.run)
        return self._caller.unary("DeclareTensors", request, pb.DeclareTensorsResponse, deadline)

    def get_shard_map(
        self, job_id: str, *, deadline: timedelta | None = None
    ) -> pb.GetShardMapResponse:
        return self._caller.unary(
            "GetShardMap",
            pb.GetShardMapRequest(job_id=job_id, run=self.run),
            pb.GetShardMapResponse,
            deadline,
        )

    def lease_batches(
        self,
        job_id: str,
        member_id: str,
        *,
        loader: str,
        epoch: int,
        batches_in_epoch: int,
        want: int,
        finished: Iterable[int] = (),
        sequence: int = 0,
        keep: bool = False,
        returned: Iterable[int] = (),
        batch_ms: int = 0,
        deadline: timedelta | None = None,
    ) -> pb.LeaseBatchesResponse:
        """Leases batches. gRPC does not retry this call. After an UnavailableError, retry it with
        the same `sequence`; otherwise batches may stay leased to the caller without its
        knowledge."""
        request = pb.LeaseBatchesRequest(
            job_id=job_id,
            member_id=member_id,
            loader=loader,
            epoch=epoch,
            batches_in_epoch=batches_in_epoch,
            want=want,
            finished=finished,
            sequence=sequence,
            keep=keep,
            returned=returned,
            batch_ms=batch_ms,
            run=self.run,
        )
        return self._caller.unary("LeaseBatches", request, pb.LeaseBatchesResponse, deadline)

    def watch_events(
        self,
        job_id: str,
        *,
        after_event_id: str = "",
        follow: bool = False,
        deadline: timedelta | None = None,
    ) -> ResponseStream[pb.Event]:
        """Streams a job's events, oldest first. With `follow`, the stream continues until it is
        cancelled. The call has no default deadline."""
        request = pb.WatchEventsRequest(
            job_id=job_id, after_event_id=after_event_id, follow=follow, run=self.run
        )
        return self._caller.stream("WatchEvents", request, pb.Event, deadline)

    def close(self) -> None:
        """Cancels calls in progress and closes the connection. Idempotent."""
        self._caller.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
