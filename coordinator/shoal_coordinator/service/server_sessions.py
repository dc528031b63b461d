"""Implements ServerSession: one stream per parameter server. The rules are the same as for members'
sessions, with one exception: a lost server remains registered and gets its tensors back when it
returns, unless a backup has taken over."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from datetime import timedelta

from google.protobuf.message import DecodeError
from shoal_common.errors import InvalidRequestError, ShoalError
from shoal_protos.v1 import coordinator_pb2 as pb

from shoal_coordinator.membership.model.events import Ending, Event, ServerLost
from shoal_coordinator.membership.model.pulse import ServerPulse
from shoal_coordinator.membership.servers.servers import Registered
from shoal_coordinator.membership.transition import Granted, Outcome
from shoal_coordinator.metrics import CoordinatorMetrics
from shoal_coordinator.service.clock import Clock
from shoal_coordinator.service.job_loop import JobLoop, within
from shoal_coordinator.service.jobs import Jobs
from shoal_coordinator.service.mailbox import Mailbox, Slot
from shoal_coordinator.service.messages.checks import number
from shoal_coordinator.service.messages.requests import (
    of_run,
    parse_backup_report,
    parse_move_report,
    parse_registration,
)
from shoal_coordinator.service.messages.responses import run_message, spec_message
from shoal_coordinator.service.streams import first_message


class ServerSessions:
    """Implements the ServerSession RPC for all jobs."""

    def __init__(
        self, jobs: Jobs, *, clock: Clock, metrics: CoordinatorMetrics, request_timeout: timedelta
    ) -> None:
        self._jobs = jobs
        self._clock = clock
        self._metrics = metrics
        self._request_timeout_s = request_timeout.total_seconds()
        self._registering: Counter[tuple[str, str]] = Counter()
        """(job, server) -> number of registrations in progress. If the stream breaks during a
        registration, the outcome of the registration determines what happens to the server."""

    async def serve(self, requests: AsyncIterator[pb.ServerMessage]) -> AsyncGenerator[bytes, None]:
        """Serves one stream: reads its messages, and yields serialized ServerDirectives."""
        first = await first_message(requests, self._request_timeout_s, expected="register")
        job_id, event = parse_registration(first.register)
        job = self._jobs.get(job_id)
        mailbox = Mailbox()
        reader: asyncio.Task[None] | None = None
        try:
            await self._register(job, event.server_id, of_run(first.register.run, event), mailbox)
            reader = asyncio.create_task(
                self._read(job, event.server_id, mailbox, requests),
                name=f"server {event.server_id}",
            )
            with self._metrics.sessions.labels("server").track_inprogress():
                async for message in mailbox:
                    yield message
        finally:
            if reader is not None:
                reader.cancel()
            self._detach(job, event.server_id, mailbox)

    async def _register(self, job: JobLoop, server_id: str, event: Event, mailbox: Mailbox) -> None:
        answer: asyncio.Future[Granted] = asyncio.get_running_loop().create_future()
        key = (job.state.spec.job_id, server_id)

        def done(outcome: Outcome) -> None:
            self._registering[key] -= 1
            if not self._registering[key]:
                del self._registering[key]
            if isinstance(outcome, ShoalError):
                if not answer.done():
                    answer.set_exception(outcome)
                self._check(job, server_id)
            elif isinstance(outcome, Registered):
                spec = job.state.spec
                welcome = pb.ServerWelcome(
                    server_index=outcome.index,
                    heartbeat_interval_ms=spec.heartbeat_interval_ms,
                    spec=spec_message(spec),
                    run=run_message(job.state.run),
                )
                mailbox.post(Slot.WELCOME, pb.ServerDirective(welcome=welcome).SerializeToString())
                job.sessions.attach_server(server_id, mailbox)
                if (
                    server_id in job.state.servers
                ):  # a server without a record was drained and is instructed to exit
                    job.set_server_pulse(server_id, ServerPulse(heard_ms=self._clock.now().ms))
                if answer.done():
                    self._detach(job, server_id, mailbox)
                else:
                    answer.set_result(outcome)

        self._registering[key] += 1
        submitted = job.request(event, done)
        try:
            await within(answer, self._request_timeout_s)
        except ShoalError as refusal:
            await self._jobs.confirm(refusal, timeout_s=self._request_timeout_s)
            raise
        finally:
            job.withdraw(submitted)

    def _detach(self, job: JobLoop, server_id: str, mailbox: Mailbox) -> None:
        pulse = job.pulses.servers.get(server_id)
        if job.sessions.detach_server(server_id, mailbox) and pulse is not None:
            job.set_server_pulse(server_id, replace(pulse, attached=False))
            self._check(job, server_id)

    def _check(self, job: JobLoop, server_id: str) -> None:
        """Reports a server as lost because its stream has closed, unless it has reconnected or is
        reconnecting."""
        pulse = job.pulses.servers.get(server_id)
        back = (
            server_id in job.sessions.servers
            or (job.state.spec.job_id, server_id) in self._registering
        )
        if pulse is not None and not pulse.attached and not back and not self._jobs.closing:
            job.submit(ServerLost(server_id=server_id, ending=Ending.STREAM_BROKEN))

    async def _read(
        self,
        job: JobLoop,
        server_id: str,
        mailbox: Mailbox,
        requests: AsyncIterator[pb.ServerMessage],
    ) -> None:
        """Reads messages until the stream closes. An invalid message closes the session with an
        error."""
        try:
            async for message in requests:
                match message.WhichOneof("message"):
                    case "heartbeat":
                        self._beat(
                            job,
                            server_id,
                            number("heartbeat.stored_bytes", message.heartbeat.stored_bytes),
                        )
                    case "backup":
                        job.submit(parse_backup_report(server_id, message.backup), mailbox.take())
                    case "move":
                        job.submit(parse_move_report(server_id, message.move), mailbox.take())
                    case kind:
                        raise InvalidRequestError(
                            f"unexpected server session message: {kind or 'empty'}; expected "
                            "heartbeat, backup or move"
                        )
        except ShoalError as error:
            mailbox.end(error)
        except DecodeError as error:
            mailbox.end(
                InvalidRequestError(
                    f"ServerSession: cannot parse a ServerMessage: {error}",
                    reason="MESSAGE_MALFORMED",
                )
            )
        else:
            mailbox.end()

    def _beat(self, job: JobLoop, server_id: str, stored_bytes: int) -> None:
        before = job.pulses.servers.get(server_id)
        if before is not None:
            self._metrics.heartbeats.labels("server").inc()
            job.set_server_pulse(
                server_id, replace(before, heard_ms=self._clock.now().ms, stored_bytes=stored_bytes)
            )
