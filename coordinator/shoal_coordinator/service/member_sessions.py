"""Implements JoinSession: one stream per member, open as long as the member is connected.

If a stream closes although its member has not left, the member is probably lost: a killed process
breaks its connection within milliseconds, and its peers wait in a collective until they are
notified. membership/members/closed_streams.py decides. With the setting `reconnect_grace`, a member
may reconnect within this time before a decision is made. Lost members are then detected later, but
a network that drops single connections causes no losses. Streams that close because the coordinator
is shutting down have no consequence; the next coordinator gives every member a full lease.

Two tasks of the event loop serve a stream: one reads from it, and gRPC's own task sends messages
from the mailbox.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import timedelta

from google.protobuf.message import DecodeError
from shoal_common.errors import InvalidRequestError, ShoalError, UnavailableError
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_coordinator.membership.members.joining import Joined
from shoal_coordinator.membership.model.events import (
    Ending,
    Event,
    MemberLost,
    MemberReady,
    StreamBroken,
)
from shoal_coordinator.membership.model.pulse import attached, beaten, detached, located
from shoal_coordinator.membership.model.reasons import Refusal
from shoal_coordinator.membership.transition import Granted, Outcome
from shoal_coordinator.metrics import CoordinatorMetrics
from shoal_coordinator.service.clock import Clock
from shoal_coordinator.service.job_loop import JobLoop, within
from shoal_coordinator.service.jobs import Jobs
from shoal_coordinator.service.mailbox import Mailbox, Slot
from shoal_coordinator.service.messages.requests import (
    of_run,
    parse_collective_failure,
    parse_heartbeat,
    parse_join,
    parse_leave,
    parse_observed,
)
from shoal_coordinator.service.messages.responses import run_message, spec_message
from shoal_coordinator.service.streams import first_message


class MemberSessions:
    """Implements the JoinSession RPC for all jobs."""

    def __init__(
        self,
        jobs: Jobs,
        *,
        clock: Clock,
        metrics: CoordinatorMetrics,
        store_url: str,
        reconnect_grace: timedelta,
        request_timeout: timedelta,
    ) -> None:
        self._jobs = jobs
        self._clock = clock
        self._metrics = metrics
        self._heartbeats = metrics.heartbeats.labels("member")
        self._store_url = store_url
        self._reconnect_grace_s = reconnect_grace.total_seconds()
        self._request_timeout_s = request_timeout.total_seconds()
        self._joining: Counter[tuple[str, str]] = Counter()
        """(job, member) -> number of joins in progress. If the stream breaks during a join, the
        outcome of the join determines what happens to the member."""

    async def serve(self, requests: AsyncIterator[pb.MemberMessage]) -> AsyncGenerator[bytes, None]:
        """Serves one stream: reads its messages, and yields serialized MemberDirectives."""
        first = await first_message(requests, self._request_timeout_s, expected="join")
        job_id, event = parse_join(first.join)
        job = self._jobs.get(job_id)
        member_id = event.identity.member_id
        mailbox = Mailbox()
        reader: asyncio.Task[None] | None = None
        try:
            await self._join(job, member_id, of_run(first.join.run, event), mailbox)
            reader = asyncio.create_task(
                self._read(job, member_id, mailbox, requests), name=f"member {member_id}"
            )
            with self._metrics.sessions.labels("member").track_inprogress():
                async for message in mailbox:
                    yield message
        finally:
            if reader is not None:
                reader.cancel()
            if job.sessions.detach_member(member_id, mailbox):
                self._detached(job, member_id)
                if mailbox.error is not None and not self._jobs.closing:
                    detail = f"its session was ended: {mailbox.error}"
                    job.submit(
                        MemberLost(member_id=member_id, ending=Ending.STREAM_BROKEN, detail=detail)
                    )

    # --------------------------------------------------------------------------- opening and ending

    async def _join(self, job: JobLoop, member_id: str, event: Event, mailbox: Mailbox) -> None:
        """Lets a member join. Raises an error if the join is refused. Raises UnavailableError if
        Redis does not accept the join in time; the member may then retry with the same id."""
        answer: asyncio.Future[Granted] = asyncio.get_running_loop().create_future()
        key = (job.state.spec.job_id, member_id)
        asked_to_retry = False

        def done(outcome: Outcome) -> None:
            self._joining[key] -= 1
            if not self._joining[key]:
                del self._joining[key]
            if isinstance(outcome, ShoalError):
                if not answer.done():
                    answer.set_exception(outcome)
                self._check(job, member_id)
            elif isinstance(outcome, Joined):
                self._joined(job, member_id, outcome, mailbox)
                if not answer.done():
                    answer.set_result(outcome)
                    return
                # The caller disconnected while its join was being written. If it was asked to
                # retry, it will return; otherwise its lease expires.
                job.sessions.detach_member(member_id, mailbox)
                self._detached(job, member_id, decide=not asked_to_retry)

        self._joining[key] += 1
        submitted = job.request(event, done)
        try:
            await within(answer, self._request_timeout_s)
        except UnavailableError:
            asked_to_retry = True
            raise
        except ShoalError as refusal:
            await self._jobs.confirm(refusal, timeout_s=self._request_timeout_s)
            raise
        finally:
            job.withdraw(submitted)

    def _joined(self, job: JobLoop, member_id: str, outcome: Joined, mailbox: Mailbox) -> None:
        spec = job.state.spec
        welcome = pb.Welcome(
            spec=spec_message(spec),
            heartbeat_interval_ms=spec.heartbeat_interval_ms,
            joining=outcome.replays,
            store_url=self._store_url,
            run=run_message(job.state.run),
        )
        mailbox.post(Slot.WELCOME, pb.MemberDirective(welcome=welcome).SerializeToString())
        job.sessions.attach_member(member_id, mailbox)
        job.set_pulse(member_id, attached(job.pulses.members.get(member_id), self._clock.now().ms))

    def _detached(self, job: JobLoop, member_id: str, *, decide: bool = True) -> None:
        pulse = job.pulses.members.get(member_id)
        if pulse is None or self._jobs.closing:
            return
        job.set_pulse(member_id, detached(pulse, self._clock.now().ms))
        if not decide:
            return
        if self._reconnect_grace_s == 0:
            self._check(job, member_id)
        else:
            asyncio.get_running_loop().call_later(
                self._reconnect_grace_s, self._check, job, member_id
            )

    def _check(self, job: JobLoop, member_id: str) -> None:
        """Reports that a member's stream has closed, unless the member has reconnected or is
        reconnecting."""
        pulse = job.pulses.members.get(member_id)
        back = (
            member_id in job.sessions.members or (job.state.spec.job_id, member_id) in self._joining
        )
        if pulse is not None and not pulse.attached and not back and not self._jobs.closing:
            job.submit(StreamBroken(member_id=member_id))

    # -------------------------------------------------------------------------------------- reading

    async def _read(
        self,
        job: JobLoop,
        member_id: str,
        mailbox: Mailbox,
        requests: AsyncIterator[pb.MemberMessage],
    ) -> None:
        """Reads messages until the stream closes. An invalid message closes the session with an
        error."""
        try:
            async for message in requests:
                if self._take(job, member_id, mailbox, message):
                    return
        except ShoalError as error:
            mailbox.end(error)
        except DecodeError as error:
            mailbox.end(
                InvalidRequestError(
                    f"JoinSession: cannot parse a MemberMessage: {error}",
                    reason="MESSAGE_MALFORMED",
                )
            )
        else:
            mailbox.end()

    def _take(
        self, job: JobLoop, member_id: str, mailbox: Mailbox, message: pb.MemberMessage
    ) -> bool:
        """Processes one message. Returns True if the member leaves. Its session is closed once its
        departure has been written to Redis."""

        kind = message.WhichOneof("message")
        if kind == "heartbeat":
            self._beat(job, member_id, message.heartbeat)
        elif kind == "ready":
            job.submit(MemberReady(member_id=member_id), mailbox.take())
        elif kind == "collective_failure":
            job.submit(
                parse_collective_failure(member_id, message.collective_failure), mailbox.take()
            )
        elif kind == "leave":
            job.submit(parse_leave(member_id, message.leave), mailbox.take())
        else:
            raise InvalidRequestError(
                f"unexpected session message: {kind or 'empty'}; expected heartbeat, ready, "
                "collective_failure or leave"
            )
        return bool(kind == "leave")

    def _beat(self, job: JobLoop, member_id: str, message: pb.Heartbeat) -> None:
        generation, progress = parse_heartbeat(message)
        before = job.pulses.members.get(member_id)
        if before is None:
            return
        if generation > job.state.number:
            raise InvalidRequestError(
                f"heartbeat.generation={generation}: expected at most {job.state.number}, the "
                f"newest generation of job {job.state.spec.job_id}",
                reason=Refusal.GENERATION_UNKNOWN,
            )
        self._heartbeats.inc()
        job.set_pulse(member_id, beaten(before, self._clock.now().ms, generation, progress))
        if message.observed:
            self._locate(job, member_id, message)
        if generation > before.generation:
            job.poke()

    @staticmethod
    def _locate(job: JobLoop, reader: str, message: pb.Heartbeat) -> None:
        """Records the stacks of silent members that this member (`reader`) has read at the
        coordinator's request."""
        stall = job.state.stall
        for member_id, script_line, stacks in parse_observed(message):
            pulse = job.pulses.members.get(member_id)
            if stall is not None and pulse is not None and stall.readers.get(member_id) == reader:
                job.set_pulse(member_id, located(pulse, script_line, stacks))
